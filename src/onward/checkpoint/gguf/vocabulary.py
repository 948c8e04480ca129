"""The tokenizer inside a GGUF file's metadata, rebuilt for the `tokenizers` library.

Three kinds: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names the pre-tokenizer), "llama" (sentencepiece's BPE with
byte fallback; its merges follow from the scores), and "gemma4" (the same, with merges). Which tokens end a text follows
llama.cpp's rules: names of tokens count, whatever `eos_token_id` and their types say.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from onward.checkpoint.gguf.pretokenizer import PIECES, SPLITTINGS
from onward.errors import TokenizerError, warn
from onward.tokenizer.tokenizer import LETTERS, JsonTokenizer, _named_errors, byte_level
from onward.util.process import without_collections

_ENDS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <\uff5cend▁of▁sentence\uff5c> [e~[
"""
ENDS = frozenset(_ENDS.split())
# In Gemma 4 it ends text that is struck through.
STRUCK = "</s>"
# Of filling in the middle: the key before "_token_id" -> what the token is called where no key names it.
FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Marks of filling in the middle, which end nothing.
_FIM_MARKS = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
FIM_MARKS = frozenset(_FIM_MARKS.split())


def known_ends(tokens: Sequence[str], named: Mapping[str, int] | None = None) -> list[int]:
    """The ids that end a text by what they are called. named: ids that keys name, by the key before "_token_id"."""
    named = named or {}
    present = ENDS.intersection(tokens)
    ids = set(ids_of(tokens, present - no_ends(present)))
    for key, called in FIM_ENDS.items():
        token = named.get(key, next(iter(ids_of(tokens, called)), None))
        ids |= set() if token is None else {token}
    return sorted(ids)


def ids_of(tokens: Sequence[str], texts: Collection[str]) -> list[int]:
    """The ids of the tokens with these texts. Few vocabularies have any: one look at all tells."""
    present = set(texts).intersection(tokens)
    return [id for id, text in enumerate(tokens) if text in present] if present else []


def no_ends(present: Collection[str]) -> set[str]:
    """Those that mean something else beside others."""
    none = set()
    # Harmony (gpt-oss) and Solar end messages with <|end|>, and turns in other ways.
    calls = "<|call|>" in present or "<|calls|>" in present
    if calls and ("<|return|>" in present or "<|flush|>" in present):
        none.add("<|end|>")
    if "<|tool_response>" in present:
        none.add(STRUCK)
    return none


_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
# Characters. The longest pieces in use are runs of some 128 spaces.
_LONGEST_PIECE = 512
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ids that end a text and have a key of their own.
NAMED_ENDS = "eos", "eot", "eom"
# Tokens of Phi-3 behind which whitespace stays.
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
# The tokens of single bytes among pieces.
_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))
# Of the kind "llama", where the file names none.
_USUAL = {"unk": 0, "bos": 1, "eos": 2}


class Vocabulary:
    """`tokenizer.ggml.*` of a file, checked. `where` names the file in errors."""

    def __init__(self, metadata: Mapping[str, Any], where: Path) -> None:
        self._metadata, self._where = metadata, where
        self.kind = self._get("model", str)
        if self.kind not in _KINDS:
            raise TokenizerError(
                f"{where}: a tokenizer of kind {self.kind!r} is not supported; {', '.join(_KINDS)} are"
            )
        self.tokens: list[str] = self._get("tokens", list)
        if not self.tokens:
            raise TokenizerError(f"{where}: the tokenizer has no tokens")
        self._special = {name: self._special_id(name) for name in (*SPECIAL, "eot", "eom", *FIM_ENDS)}
        named = {name: id for name, id in self._special.items() if id is not None}
        known = known_ends(self.tokens, named)
        self.ends: tuple[int, ...] = tuple(dict.fromkeys([*(named[n] for n in NAMED_ENDS if n in named), *known]))
        self.types = self._types(known)

    def _special_id(self, name: str) -> int | None:
        key = f"{SPECIAL.get(name, name)}_token_id"
        token: int | None = self._get(key, int, optional=True)
        usual = _USUAL.get(name, len(self.tokens)) if self.kind == "llama" else len(self.tokens)
        if token is not None and token >= len(self.tokens):
            warn(f"{self._where}: {_PREFIX}{key} is {token}, and there are {len(self.tokens)} tokens: it is ignored")
        if token is not None and 0 <= token < len(self.tokens):
            return token
        return usual if usual < len(self.tokens) else None

    def _types(self, known: list[int]) -> list[int]:
        """The file's, but that a token which ends texts by what it is called is a control token, whatever they say."""
        stored = self._get_array("token_type", len(self.tokens))
        types = [NORMAL] * len(self.tokens) if stored is None else list(map(_whole, stored))
        if set(map(type, types)) != {int}:
            raise TokenizerError(f"{self._where}: {_PREFIX}token_type must be whole numbers")
        for id in known:
            types[id] = CONTROL
        for id in ids_of(self.tokens, no_ends(self.tokens)):
            types[id] = NORMAL if self.tokens[id] == STRUCK and types[id] == CONTROL else types[id]
        for id in ids_of(self.tokens, FIM_MARKS):
            types[id] = USER if types[id] == USER else CONTROL
        return types

    @property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json's fields."""
        texts = {f"{name}_token": self._special[name] for name in SPECIAL}
        named = {name: id for name, id in texts.items() if id is not None and id not in self._no_text}
        config: dict[str, Any] = {name: self.tokens[id] for name, id in named.items()}
        add_bos = self._get("add_bos_token", bool, optional=True)
        # Converters wrote false into files of Gemma 4.
        config["add_bos_token"] = self._adds_bos() if add_bos is None or self._splitting() == "gemma4" else add_bos
        config["add_eos_token"] = self._get("add_eos_token", bool, optional=True) is True
        if config["add_bos_token"] and "bos_token" not in config:
            config["add_bos_token"] = False
        return config

    def tokenizer(self) -> JsonTokenizer:
        with _named_errors(self._where), without_collections():
            inner = self.merged_pieces() if self._splitting() in PIECES else _KINDS[self.kind](self)
            self._mark_added(inner)
        return JsonTokenizer(inner, self.config, self._where, self._spelling)

    def _adds_bos(self) -> bool:
        splitting = self._splitting()
        return splitting == "gemma4" or splitting is None or (splitting in SPLITTINGS and SPLITTINGS[splitting].add_bos)

    def _splitting(self) -> str | None:
        """The rule by which texts are cut; None for pieces whose merges follow from scores."""
        if self.kind != "gpt2":
            return "gemma4" if self.kind == "gemma4" else None
        name: str = self._get("pre", str, optional=True) or "default"
        if name not in SPLITTINGS and name not in PIECES:
            raise TokenizerError(
                f"{self._where}: the tokenizer cuts texts by the rule {name!r}, which is not known; known are "
                f"{', '.join((*SPLITTINGS, *PIECES))}"
            )
        return name

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Token -> id; without those that no text has. Where a text is there more than once, the id that a key names is
        taken, or else a special one, and of several the last, as in llama.cpp; but that pieces of bytes come first."""
        ids: dict[str, int] = {}
        named = set(self._special.values())

        def rank(id: int) -> tuple[bool, bool]:
            return id in named, self._is_added(id) != self._is_misread(self.tokens[id])

        for id, text in enumerate(self.tokens):
            if (text not in ids or rank(id) >= rank(ids[text])) and id not in self._unused:
                ids[text] = id
        return ids

    @cached_property
    def _unused(self) -> frozenset[int]:
        """The ids that no text has."""
        if self.kind != "gpt2" or UNUSED not in self.types:
            return self._no_text
        unused = [id for id, kind in enumerate(self.types) if kind == UNUSED]
        return self._no_text.union(id for id in unused if self.tokens[id] not in self._merged_unused)

    @cached_property
    def _no_text(self) -> frozenset[int]:
        """The ids of tokens that are bytes, but no UTF-8: no text has them."""
        if not _has_surrogates("".join(self.tokens)):
            return frozenset()
        return frozenset(id for id, text in enumerate(self.tokens) if _has_surrogates(text))

    @cached_property
    def _merged_unused(self) -> frozenset[str]:
        """The tokens of type unused of which texts have some all the same: single characters, and what merges make."""
        unused = {text for text, kind in zip(self.tokens, self.types, strict=True) if kind == UNUSED}
        made = (merge[:1] + merge[1:].replace(" ", "", 1) for merge in self._get("merges", list))
        return frozenset(unused.intersection(made)) | {text for text in unused if len(text) == 1}

    @cached_property
    def _has_letters(self) -> bool:
        """Whether pieces are spelled as letters that stand for bytes."""
        return self.kind == "gpt2" and self._splitting() not in PIECES

    def _is_misread(self, text: str) -> bool:
        """Whether a decoder takes an added token's letters for bytes: "naïve" would be b"na\\xefve"."""
        return self._has_letters and not text.isascii() and byte_level(text) != text.encode()

    @cached_property
    def _spelling(self) -> dict[int, tuple[int, ...]]:
        """The ids that the tokenizer does not know, since another id has their text, or would decode wrongly: each with
        the ids whose texts make its own; none where a decoded text leaves it out."""
        return {**self._twins(), **self._raw()}

    def _twins(self) -> dict[int, tuple[int, ...]]:
        ids = self._ids
        if len(ids) == len(self.tokens) - len(self._unused):
            return {}
        every = [id for id, text in enumerate(self.tokens) if text and id not in self._unused]
        twins = {id: ids[self.tokens[id]] for id in every if ids[self.tokens[id]] != id}
        shown = {self.tokens[id] for id in (*twins, *twins.values()) if not self._is_special(id)}
        # `_mark_added` adds a text that a plain token has, too, as a plain one.
        hidden = [id for id in (*twins, *twins.values()) if self._is_special(id) and self.tokens[id] in shown]
        nothing: tuple[int, ...] = ()
        return {id: (same,) for id, same in twins.items()} | dict.fromkeys(hidden, nothing)

    def _raw(self) -> dict[int, tuple[int, ...]]:
        """The ids whose bytes are their text as it stands: those of no UTF-8, and added tokens that are misread."""
        added = [id for id, kind in enumerate(self.types) if kind == USER and id not in self._no_text]
        raw = {*self._no_text, *(id for id in added if self._is_misread(self.tokens[id]))}
        of_byte = [self._ids.get(letter) for letter in (LETTERS if self._has_letters else _FALLBACK)]
        spelling: dict[int, tuple[int, ...]] = {}
        for id in sorted(raw):
            text = self.tokens[id].encode("utf-8", "surrogateescape")
            # Spaces are marked in pieces.
            text = text if self._has_letters or self.types[id] == USER else text.replace("▁".encode(), b" ")
            parts = [of_byte[byte] for byte in text]
            if self._is_special(id):
                spelling[id] = ()
            elif None in parts:
                warn(f"{self._where}: token {id} is {text!r}, and not each of its bytes is a token: texts lack it")
                spelling[id] = ()
            else:
                spelling[id] = tuple(part for part in parts if part is not None)
        return spelling

    def _is_special(self, id: int) -> bool:
        return self.types[id] in (UNKNOWN, CONTROL)

    def _is_added(self, id: int) -> bool:
        return self._is_special(id) or self.types[id] == USER

    def byte_level(self) -> tokenizers.Tokenizer:
        if self._get("pre", str, optional=True) is None:
            warn(f"{self._where}: {_PREFIX}pre is missing: texts are cut by the default rule, which few models use")
        splitting = SPLITTINGS[self._splitting() or "default"]
        merges = self._pairs(self._get("merges", list))
        model = self._bpe(merges, ignore_merges=splitting.whole_words)
        tokenizer = tokenizers.Tokenizer(model)
        if splitting.nfc:
            tokenizer.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in splitting.expressions]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def sentencepiece(self) -> tokenizers.Tokenizer:
        ids = self._ids
        scores = self._get_array("scores", len(self.tokens))
        prefix = self._get("add_space_prefix", bool, optional=True) is not False
        said = self._get("merges", list, optional=True)  # where a score says too little of their order
        if scores is None and said is None:
            raise TokenizerError(f"{self._where}: a tokenizer of kind 'llama' needs scores")
        merges = list(merges_of(ids, scores, self.types)) if said is None else self._pairs(said)
        return self._of_pieces(merges, prefix)

    def merged_pieces(self) -> tokenizers.Tokenizer:
        return self._of_pieces(self._pairs(self._get("merges", list)), prefix=False)

    def _of_pieces(self, merges: list[tuple[str, str]], prefix: bool) -> tokenizers.Tokenizer:
        """BPE with spaces as marks, and bytes for what is no piece. prefix: whether a text gets a space in front."""
        unknown = self._special["unk"]
        text = None if unknown is None else self.tokens[unknown]
        model = self._bpe(merges, unk_token=text, fuse_unk=True, byte_fallback=True)
        tokenizer = tokenizers.Tokenizer(model)
        steps = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
        """Merges through a token that the vocabulary lacks are left out: the library has no id for what they make. Of
        a pair that is there twice the first counts, as in llama.cpp."""
        ids = self._ids
        if len(merges) != len(pairs := dict.fromkeys(merges)):
            merges = list(pairs)
        try:
            return models.BPE(ids, merges, **options)
        except Exception:  # the library has no class of its own for a merge that names no token
            lost = [pair for pair in merges if not {*pair, "".join(pair)} <= ids.keys()]
            if not lost:
                raise
        warn(
            f"{self._where}: {len(lost)} of {len(merges)} merges name a token that the vocabulary lacks, the first "
            f"{' '.join(lost[0])!r}: they are left out, so texts may be cut in other tokens"
        )
        left_out = set(lost)
        return models.BPE(ids, [pair for pair in merges if pair not in left_out], **options)

    def _pairs(self, merges: list[str]) -> list[tuple[str, str]]:
        """There are hundreds of thousands: one look at all, and another only where one is wrong."""
        cuts = [merge.find(" ", 1) for merge in merges]  # a piece may begin with a space
        pairs = [(merge[: max(at, 0)], merge[at + 1 :]) for merge, at in zip(merges, cuts, strict=True)]
        if not all(map(all, pairs)):
            wrong = next(merge for merge, pair in zip(merges, pairs, strict=True) if not all(pair))
            raise TokenizerError(f"{self._where}: the merge {wrong!r} is no pair of tokens")
        return pairs

    def _mark_added(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Tokens that are never merged from a text's pieces: those that mark turns, say."""
        # Of a text that pieces make, too, the tokenizer knows the piece alone.
        found = [id for id in range(len(self.tokens)) if self._is_added(id) and id not in self._no_text]
        found = [
            id for id in found if self._is_added(self._ids[self.tokens[id]]) or not self._is_misread(self.tokens[id])
        ]
        special = [self.tokens[id] for id in found if self._is_special(id)]
        plain = [self.tokens[id] for id in found if self.types[id] == USER]
        shown = {self.tokens[id] for id in found if self._spelling.get(id) == ()}
        special, plain = [text for text in special if text not in shown], [*plain, *sorted(shown)]

        def added(texts: list[str], *, special: bool) -> list[AddedToken]:
            return [
                AddedToken(text, special=special, normalized=False, rstrip=self._takes_spaces(text))
                for text in texts
                if text
            ]

        tokenizer.add_special_tokens(added(special, special=True))
        tokenizer.add_tokens(added(plain, special=False))

    def _takes_spaces(self, text: str) -> bool:
        """Whether an added token takes the whitespace behind it with it. No key says that: llama.cpp knows Phi-3 by its
        name."""
        name = self._metadata.get("general.name")
        is_phi3 = isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))
        return is_phi3 and text not in _PHI3_KEEPS_SPACES

    def _get(self, name: str, kind: type, *, optional: bool = False) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is None and optional:
            return None
        if kind is bool and isinstance(value, int | float) and value in (0, 1):
            value = bool(value)
        elif kind is int:
            value = _whole(value)
        if type(value) is not kind:
            raise TokenizerError(
                f"{self._where}: {_PREFIX}{name} must be a {kind.__name__}; got "
                f"{'nothing' if value is None else type(value).__name__}"
            )
        return value

    def _get_array(self, name: str, length: int) -> Any:
        """A list of numbers, one for each token; None where there is none. As in llama.cpp there may be more."""
        value = self._metadata.get(_PREFIX + name)
        if value is not None and (not hasattr(value, "tolist") or len(value) < length):
            raise TokenizerError(f"{self._where}: {_PREFIX}{name} must be {length} numbers, one for each token")
        return None if value is None else value[:length].tolist()


_KINDS: dict[str, Callable[[Vocabulary], tokenizers.Tokenizer]] = {
    "gpt2": Vocabulary.byte_level,
    "llama": Vocabulary.sentencepiece,
    "gemma4": Vocabulary.merged_pieces,
}


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _whole(value: Any) -> Any:
    """A number that is whole as an int, whatever type it is stored in."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merges_of(ids: Mapping[str, int], scores: list[float], types: list[int]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make a piece, best scores first: what sentencepiece merges, written as ranks."""
    texts = {id: text for text, id in ids.items() if len(text) <= _LONGEST_PIECE}
    pieces = [id for id in texts if types[id] in (NORMAL, USER, UNUSED)]
    for id in sorted(pieces, key=lambda id: (-scores[id], id)):
        text = texts[id]
        pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
        yield from sorted((p for p in pairs if p[0] in ids and p[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
