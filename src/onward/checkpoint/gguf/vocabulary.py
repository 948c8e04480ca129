"""The tokenizer in a GGUF file's metadata, rebuilt for the `tokenizers` library.

There are three kinds: "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names the pre-tokenizer), "llama" (sentencepiece BPE
with byte fallback; merges follow from the scores), and "gemma4" (the same, with merges). As in llama.cpp, end-of-text
tokens are recognized by their text, whatever `eos_token_id` and token types say.
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
# In Gemma 4 it ends struck-through text.
STRIKETHROUGH = "</s>"
# Fill-in-the-middle ends: the key before "_token_id" -> the token's text if no key names it.
FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Fill-in-the-middle marks that do not end text.
_FIM_MARKS = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
FIM_MARKS = frozenset(_FIM_MARKS.split())


def known_ends(tokens: Sequence[str], named: Mapping[str, int] | None = None) -> list[int]:
    present = ENDS.intersection(tokens)
    ids = set(ids_of(tokens, present - non_ends(present)))
    for key, texts in FIM_ENDS.items():
        token = (named or {}).get(key, next(iter(ids_of(tokens, texts)), None))
        ids |= set() if token is None else {token}
    return sorted(ids)


def ids_of(tokens: Sequence[str], texts: Collection[str]) -> list[int]:
    """The ids of the tokens with these texts. Few vocabularies have any, so all are checked at once first."""
    present = set(texts).intersection(tokens)
    return [id for id, text in enumerate(tokens) if text in present] if present else []


def non_ends(present: Collection[str]) -> set[str]:
    """Tokens that do not end text if certain others are present."""
    texts = set()
    # Harmony (gpt-oss) and Solar end messages with <|end|>, but turns with other tokens.
    if {"<|call|>", "<|calls|>"}.intersection(present) and {"<|return|>", "<|flush|>"}.intersection(present):
        texts.add("<|end|>")
    if "<|tool_response>" in present:
        texts.add(STRIKETHROUGH)
    return texts


_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
# In characters. The longest pieces in use are runs of some 128 spaces.
_MAX_PIECE_LENGTH = 512
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ids that end text and have a key.
NAMED_ENDS = "eos", "eot", "eom"
# Phi-3 tokens after which whitespace is kept.
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
# Tokens for single bytes.
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
# Default ids for the kind "llama".
_LLAMA_IDS = {"unk": 0, "bos": 1, "eos": 2}


class Vocabulary:
    """The validated `tokenizer.ggml.*` of a file. `where` is the file, for errors."""

    def __init__(self, metadata: Mapping[str, Any], where: Path) -> None:
        self._metadata, self._where = metadata, where
        self.kind = self._get("model", str)
        if self.kind not in _KINDS:
            raise TokenizerError(f"{where}: tokenizer kind {self.kind!r} is not supported; {', '.join(_KINDS)} are")
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
        default = _LLAMA_IDS.get(name, len(self.tokens)) if self.kind == "llama" else len(self.tokens)
        if token is not None and token >= len(self.tokens):
            warn(f"{self._where}: {_PREFIX}{key} is {token}, and there are {len(self.tokens)} tokens: it is ignored")
        if token is not None and 0 <= token < len(self.tokens):
            return token
        return default if default < len(self.tokens) else None

    def _types(self, known: list[int]) -> list[int]:
        """The file's token types, except that tokens whose text ends a text are control tokens."""
        stored = self._get_array("token_type", len(self.tokens))
        types = [NORMAL] * len(self.tokens) if stored is None else list(map(_whole, stored))
        if set(map(type, types)) != {int}:
            raise TokenizerError(f"{self._where}: {_PREFIX}token_type must be integers")
        for id in known:
            types[id] = CONTROL
        for id in ids_of(self.tokens, non_ends(self.tokens)):
            types[id] = NORMAL if self.tokens[id] == STRIKETHROUGH and types[id] == CONTROL else types[id]
        for id in ids_of(self.tokens, FIM_MARKS):
            types[id] = USER if types[id] == USER else CONTROL
        return types

    @property
    def config(self) -> dict[str, Any]:
        texts = {f"{name}_token": self._special[name] for name in SPECIAL}
        named = {name: id for name, id in texts.items() if id is not None and id not in self._no_text}
        config: dict[str, Any] = {name: self.tokens[id] for name, id in named.items()}
        add_bos = self._get("add_bos_token", bool, optional=True)
        splitting = self._splitting()
        # Converters wrote false for Gemma 4.
        if add_bos is None or splitting == "gemma4":
            rule = SPLITTINGS.get(splitting or "")
            add_bos = splitting in (None, "gemma4") or (rule is not None and rule.add_bos)
        add_eos = self._get("add_eos_token", bool, optional=True) is True
        return config | {"add_bos_token": add_bos and "bos_token" in config, "add_eos_token": add_eos}

    def tokenizer(self) -> JsonTokenizer:
        with _named_errors(self._where), without_collections():
            inner = self.merged_pieces() if self._splitting() in PIECES else _KINDS[self.kind](self)
            self._mark_added(inner)
        return JsonTokenizer(inner, self.config, self._where, self._spelling)

    def _splitting(self) -> str | None:
        """The pre-tokenization rule; None if merges follow from scores."""
        if self.kind != "gpt2":
            return "gemma4" if self.kind == "gemma4" else None
        name: str = self._get("pre", str, optional=True) or "default"
        if name not in SPLITTINGS and name not in PIECES:
            known = ", ".join((*SPLITTINGS, *PIECES))
            raise TokenizerError(f"{self._where}: the pre-tokenizer {name!r} is not known; known are {known}")
        return name

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Token -> id, without unused tokens. Of duplicates, an id that a key names wins, then a special one (or piece,
        if the special one is misread), then the last, as in llama.cpp."""
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
        """The ids of tokens that no text contains."""
        if self.kind != "gpt2" or UNUSED not in self.types:
            return self._no_text
        unused = [id for id, kind in enumerate(self.types) if kind == UNUSED]
        return self._no_text.union(id for id in unused if self.tokens[id] not in self._merged_unused)

    @cached_property
    def _no_text(self) -> frozenset[int]:
        """The ids of tokens whose bytes are not UTF-8."""
        if not _has_surrogates("".join(self.tokens)):
            return frozenset()
        return frozenset(id for id, text in enumerate(self.tokens) if _has_surrogates(text))

    @cached_property
    def _merged_unused(self) -> frozenset[str]:
        """Tokens of type unused that do occur in text: single characters, and the results of merges."""
        unused = {text for text, kind in zip(self.tokens, self.types, strict=True) if kind == UNUSED}
        made = (merge[:1] + merge[1:].replace(" ", "", 1) for merge in self._get("merges", list))
        return frozenset(unused.intersection(made)) | {text for text in unused if len(text) == 1}

    @cached_property
    def _has_letters(self) -> bool:
        """Whether tokens are spelled with letters that stand for bytes."""
        return self.kind == "gpt2" and self._splitting() not in PIECES

    def _is_misread(self, text: str) -> bool:
        """Whether a decoder would decode an added token's letters as bytes: "naïve" would be b"na\\xefve"."""
        return self._has_letters and not text.isascii() and byte_level(text) != text.encode()

    @cached_property
    def _spelling(self) -> dict[int, tuple[int, ...]]:
        """The ids that the tokenizer does not know, because another id has their text or they would decode wrongly:
        each with ids whose texts make up its own; () if decoded text omits it."""
        return {**self._twins(), **self._raw()}

    def _twins(self) -> dict[int, tuple[int, ...]]:
        ids = self._ids
        if len(ids) == len(self.tokens) - len(self._unused):
            return {}
        every = [id for id, text in enumerate(self.tokens) if text and id not in self._unused]
        twins = {id: ids[self.tokens[id]] for id in every if ids[self.tokens[id]] != id}
        both = (*twins, *twins.values())
        shown = {self.tokens[id] for id in both if not self._is_special(id)}
        # `_mark_added` adds a text that a plain token shares as a plain one.
        hidden: list[int] = [id for id in both if self._is_special(id) and self.tokens[id] in shown]
        return {**{id: (same,) for id, same in twins.items()}, **dict.fromkeys(hidden, ())}

    def _raw(self) -> dict[int, tuple[int, ...]]:
        """The ids whose bytes are their literal text: those that are not UTF-8, and misread added tokens."""
        added = [id for id, kind in enumerate(self.types) if kind == USER and id not in self._no_text]
        raw = {*self._no_text, *(id for id in added if self._is_misread(self.tokens[id]))}
        by_byte = [self._ids.get(letter) for letter in (LETTERS if self._has_letters else _BYTE_TOKENS)]
        spelling: dict[int, tuple[int, ...]] = {}
        for id in sorted(raw):
            text = self.tokens[id].encode("utf-8", "surrogateescape")
            # In other vocabularies "▁" marks spaces.
            text = text if self._has_letters or self.types[id] == USER else text.replace("▁".encode(), b" ")
            parts = [part for byte in text if (part := by_byte[byte]) is not None]
            if len(parts) < len(text) and not self._is_special(id):
                warn(f"{self._where}: token {id} is {text!r}, which byte tokens cannot spell: decoded text omits it")
            spelling[id] = () if self._is_special(id) or len(parts) < len(text) else tuple(parts)
        return spelling

    def _is_special(self, id: int) -> bool:
        return self.types[id] in (UNKNOWN, CONTROL)

    def _is_added(self, id: int) -> bool:
        return self._is_special(id) or self.types[id] == USER

    def byte_level(self) -> tokenizers.Tokenizer:
        if self._get("pre", str, optional=True) is None:
            warn(f"{self._where}: {_PREFIX}pre is missing: text is split by the default rule, which few models use")
        splitting = SPLITTINGS[self._splitting() or "default"]
        merges = self._pairs(self._get("merges", list))
        tokenizer = tokenizers.Tokenizer(self._bpe(merges, ignore_merges=splitting.whole_words))
        if splitting.nfc:
            tokenizer.normalizer = normalizers.NFC()
        cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in splitting.expressions]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def sentencepiece(self) -> tokenizers.Tokenizer:
        scores = self._get_array("scores", len(self.tokens))
        prefix = self._get("add_space_prefix", bool, optional=True) is not False
        merges = self._get("merges", list, optional=True)  # present if scores do not determine their order
        if scores is None and merges is None:
            raise TokenizerError(f"{self._where}: a tokenizer of kind 'llama' needs scores")
        pairs = list(merges_of(self._ids, scores, self.types)) if merges is None else self._pairs(merges)
        return self._pieces(pairs, prefix)

    def merged_pieces(self) -> tokenizers.Tokenizer:
        return self._pieces(self._pairs(self._get("merges", list)), prefix=False)

    def _pieces(self, merges: list[tuple[str, str]], prefix: bool) -> tokenizers.Tokenizer:
        """BPE with marked spaces and byte fallback. prefix: whether a space is prepended to text."""
        unknown = self._special["unk"]
        text = None if unknown is None else self.tokens[unknown]
        tokenizer = tokenizers.Tokenizer(self._bpe(merges, unk_token=text, fuse_unk=True, byte_fallback=True))
        steps = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
        """Skip merges of unknown tokens, which the library rejects, and duplicates, as in llama.cpp."""
        if len(merges) != len(pairs := dict.fromkeys(merges)):
            merges = list(pairs)
        try:
            return models.BPE(self._ids, merges, **options)
        except Exception:  # the library has no specific class for a merge with an unknown token
            skipped = dict.fromkeys(pair for pair in merges if not {*pair, "".join(pair)} <= self._ids.keys())
            if not skipped:
                raise
        warn(
            f"{self._where}: {len(skipped)} of {len(merges)} merges, such as {' '.join(next(iter(skipped)))!r}, use a "
            "token that the vocabulary lacks: they are skipped, so text may be tokenized differently"
        )
        return models.BPE(self._ids, [pair for pair in merges if pair not in skipped], **options)

    def _pairs(self, merges: list[str]) -> list[tuple[str, str]]:
        """Split merges. There are hundreds of thousands, so they are only checked one by one after a failure."""
        cuts = [merge.find(" ", 1) for merge in merges]  # a piece may begin with a space
        pairs = [(merge[: max(at, 0)], merge[at + 1 :]) for merge, at in zip(merges, cuts, strict=True)]
        if not all(map(all, pairs)):
            wrong = next(merge for merge, pair in zip(merges, pairs, strict=True) if not all(pair))
            raise TokenizerError(f"{self._where}: the merge {wrong!r} is not a pair of tokens")
        return pairs

    def _mark_added(self, tokenizer: tokenizers.Tokenizer) -> None:
        ids = [id for id in range(len(self.tokens)) if self._is_added(id) and id not in self._no_text]
        # If pieces make the text too, the tokenizer knows only the piece.
        ids = [id for id in ids if self._is_added(self._ids[self.tokens[id]]) or not self._is_misread(self.tokens[id])]
        special = [self.tokens[id] for id in ids if self._is_special(id)]
        plain = [self.tokens[id] for id in ids if self.types[id] == USER]
        shown = {self.tokens[id] for id in ids if self._spelling.get(id) == ()}
        special, plain = [text for text in special if text not in shown], [*plain, *sorted(shown)]

        def added(texts: list[str], *, special: bool) -> list[AddedToken]:
            options = {"special": special, "normalized": False}
            return [AddedToken(text, rstrip=self._takes_spaces(text), **options) for text in texts if text]

        tokenizer.add_special_tokens(added(special, special=True))
        tokenizer.add_tokens(added(plain, special=False))

    def _takes_spaces(self, text: str) -> bool:
        """Whether an added token absorbs the whitespace after it. Without a key, llama.cpp recognizes Phi-3 by name."""
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
            got = "nothing" if value is None else type(value).__name__
            raise TokenizerError(f"{self._where}: {_PREFIX}{name} must be a {kind.__name__}; got {got}")
        return value

    def _get_array(self, name: str, length: int) -> Any:
        """A list with a number for each token, if present. As in llama.cpp, extra numbers are ignored."""
        value = self._metadata.get(_PREFIX + name)
        if value is not None and (not hasattr(value, "tolist") or len(value) < length):
            raise TokenizerError(f"{self._where}: {_PREFIX}{name} must have a number for each of {length} tokens")
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
    """Integral floats as ints, since files store integers in any type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merges_of(ids: Mapping[str, int], scores: list[float], types: list[int]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make up a piece, best scores first: sentencepiece's merge order, as ranks."""
    texts = {id: text for text, id in ids.items() if len(text) <= _MAX_PIECE_LENGTH}
    pieces = [id for id in texts if types[id] in (NORMAL, USER, UNUSED)]
    for id in sorted(pieces, key=lambda id: (-scores[id], id)):
        text = texts[id]
        pairs = ((text[:at], text[at:]) for at in range(1, len(text)))
        yield from sorted((p for p in pairs if p[0] in ids and p[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
