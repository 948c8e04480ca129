"""The tokenizer inside a GGUF file's metadata, rebuilt for the `tokenizers` library.

Three kinds: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how texts are cut), "llama" (sentencepiece's BPE with
bytes for what is no piece; its merges follow from the scores), and "gemma4" (the same, with merges).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from onward.checkpoint.gguf.split_texts import SPLITTINGS
from onward.checkpoint.tokenizer import JsonTokenizer, _named_errors
from onward.errors import TokenizerError
from onward.garbage import without_collections

_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
# Characters. The longest pieces in use are runs of some 128 spaces.
_LONGEST_PIECE = 512
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ids that end a text and have a key of their own.
NAMED_ENDS = "eos", "eot", "eom"
# Tokens that end an answer whatever eos_token_id says, as in llama.cpp.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    "<turn|>",
)


class Vocabulary:
    """`tokenizer.ggml.*` of a file, checked. `where` names the file in errors.

    Raises:
        TokenizerError: the kind or the splitting is not known, or the parts do not fit each other.
    """

    def __init__(self, metadata: Mapping[str, Any], where: Path) -> None:
        self._metadata, self._where = metadata, where
        self.kind = self._get("model", str)
        if self.kind not in _KINDS:
            raise TokenizerError(
                f"{where}: a tokenizer of kind {self.kind!r} is not supported; {', '.join(_KINDS)} are"
            )
        self.tokens: list[str] = self._get("tokens", list)
        types = self._get_array("token_type", len(self.tokens))
        if types is not None and not all(type(kind) is int for kind in types):
            raise TokenizerError(f"{where}: {_PREFIX}token_type must be whole numbers")
        self.types: list[int] = [NORMAL] * len(self.tokens) if types is None else types
        if not self.tokens:
            raise TokenizerError(f"{where}: the tokenizer has no tokens")

    def special(self, name: str) -> int | None:
        """The id of "bos", "eos", "eot" …; None where the file names none."""
        token: int | None = self._get(f"{SPECIAL.get(name, name)}_token_id", int, optional=True)
        if token is not None and not 0 <= token < len(self.tokens):
            raise TokenizerError(f"{self._where}: the {name} token is {token}, and there are {len(self.tokens)} tokens")
        return token

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text."""
        named = [token for name in NAMED_ENDS if (token := self.special(name)) is not None]
        return tuple(dict.fromkeys(named + known_ends(self.tokens, self.types)))

    @property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json's fields."""
        texts = {f"{name}_token": self.special(name) for name in SPECIAL}
        config: dict[str, Any] = {name: self.tokens[id] for name, id in texts.items() if id is not None}
        add_bos = self._get("add_bos_token", bool, optional=True)
        config["add_bos_token"] = self._adds_bos() if add_bos is None else add_bos
        if config["add_bos_token"] and "bos_token" not in config:
            config["add_bos_token"] = False
        return config

    def tokenizer(self) -> JsonTokenizer:
        with _named_errors(self._where), without_collections():
            inner = _KINDS[self.kind](self)
            self._mark_added(inner)
        return JsonTokenizer(inner, self.config, self._where)

    def _adds_bos(self) -> bool:
        return self.kind != "gpt2" or SPLITTINGS[self._splitting()].add_bos

    def _splitting(self) -> str:
        name: str = self._get("pre", str, optional=True) or "default"
        if name not in SPLITTINGS:
            raise TokenizerError(
                f"{self._where}: the tokenizer cuts texts by the rule {name!r}, which is not known; known are "
                f"{', '.join(SPLITTINGS)}"
            )
        return name

    def _ids(self, *without: int) -> dict[str, int]:
        """Token -> id, but of these types. Where a text is there twice the first id is taken."""
        every = range(len(self.tokens) - 1, -1, -1)
        return {self.tokens[id]: id for id in every if self.types[id] not in without}

    def byte_level(self) -> tokenizers.Tokenizer:
        splitting = SPLITTINGS[self._splitting()]
        merges = self._pairs(self._get("merges", list))
        model = models.BPE(self._ids(UNUSED), merges, ignore_merges=splitting.whole_words)
        tokenizer = tokenizers.Tokenizer(model)
        if splitting.nfc:
            tokenizer.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in splitting.expressions]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def sentencepiece(self) -> tokenizers.Tokenizer:
        ids = self._ids()
        scores = self._get_array("scores", len(self.tokens))
        if scores is None:
            raise TokenizerError(f"{self._where}: a tokenizer of kind 'llama' needs scores")
        prefix = self._get("add_space_prefix", bool, optional=True) is not False
        said = self._get("merges", list, optional=True)  # where a score says too little of their order
        merges = list(merges_of(ids, scores, self.types)) if said is None else self._pairs(said)
        return self._of_pieces(ids, merges, prefix)

    def merged_pieces(self) -> tokenizers.Tokenizer:
        prefix = self._get("add_space_prefix", bool, optional=True) is True
        return self._of_pieces(self._ids(), self._pairs(self._get("merges", list)), prefix)

    def _of_pieces(self, ids: dict[str, int], merges: list[tuple[str, str]], prefix: bool) -> tokenizers.Tokenizer:
        """BPE with spaces as marks, and bytes for what is no piece. prefix: whether a text gets a space in front."""
        unknown = self.special("unk")
        text = None if unknown is None else self.tokens[unknown]
        model = models.BPE(ids, merges, unk_token=text, fuse_unk=True, byte_fallback=True)
        tokenizer = tokenizers.Tokenizer(model)
        steps = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def _pairs(self, merges: list[str]) -> list[tuple[str, str]]:
        """There are hundreds of thousands: one look at all, and another only where one is wrong."""
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        if not all(map(all, pairs)):
            wrong = next(merge for merge, pair in zip(merges, pairs, strict=True) if not all(pair))
            raise TokenizerError(f"{self._where}: the merge {wrong!r} is no pair of tokens")
        return pairs

    def _mark_added(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Tokens that are never merged from a text's pieces: those that mark turns, say."""
        special = [self.tokens[id] for id, kind in enumerate(self.types) if kind in (UNKNOWN, CONTROL)]
        plain = [self.tokens[id] for id, kind in enumerate(self.types) if kind == USER]
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special if text])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain if text])

    def _get(self, name: str, kind: type, *, optional: bool = False) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is None and optional:
            return None
        if type(value) is not kind:
            raise TokenizerError(
                f"{self._where}: {_PREFIX}{name} must be a {kind.__name__}; got "
                f"{'nothing' if value is None else type(value).__name__}"
            )
        return value

    def _get_array(self, name: str, length: int) -> Any:
        """A list of numbers, one for each token; None where there is none."""
        value = self._metadata.get(_PREFIX + name)
        if value is not None and (not hasattr(value, "tolist") or len(value) != length):
            raise TokenizerError(f"{self._where}: {_PREFIX}{name} must be {length} numbers, one for each token")
        return None if value is None else value.tolist()


_KINDS: dict[str, Callable[[Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": Vocabulary.byte_level,
    "llama": Vocabulary.sentencepiece,
    "gemma4": Vocabulary.merged_pieces,
}


def known_ends(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """The ids that end a text by what they are called."""
    # gpt-oss ends its messages with <|end|>, and its turn with <|return|>.
    texts = set(_ENDS) - ({"<|end|>"} if "<|return|>" in tokens else set())
    return [id for id, text in enumerate(tokens) if text in texts and types[id] == CONTROL]


def merges_of(ids: Mapping[str, int], scores: list[float], types: list[int]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make a piece, best scores first: what sentencepiece merges, written as ranks."""
    texts = {id: text for text, id in ids.items() if len(text) <= _LONGEST_PIECE}
    pieces = [id for id in texts if types[id] in (NORMAL, USER, UNUSED)]
    for id in sorted(pieces, key=lambda id: (-scores[id], id)):
        text = texts[id]
        pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
        yield from sorted((p for p in pairs if p[0] in ids and p[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
