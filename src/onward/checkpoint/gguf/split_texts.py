"""How byte-level tokenizers cut a text before they merge: the regular expressions behind `tokenizer.ggml.pre`.

They are those of the models' own tokenizer.json files.
"""

from typing import NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str = "") -> str:
    """Words cut where camelCase begins one, each with `end`."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"


_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_QWEN35 = rf"{_CONTRACTIONS}|{_MARKS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_cased()}|\p{{N}}|{_REST_SLASH}"
_GPT4O = rf"{_cased(f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_REST_SLASH}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class Splitting(NamedTuple):
    """expressions: applied one after the other; each cuts what the ones before left whole. whole_words: a piece that is
    a token is not merged from parts. nfc: texts are normalized first. add_bos: whether a text begins with the BOS where
    the file does not say."""

    expressions: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


_LLAMA3_SPLITTING = Splitting((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_SPLITTING = Splitting((_QWEN2,), nfc=True)
_GPT2_SPLITTING = Splitting((_GPT2,))
_DIGITS_SPLITTING = Splitting((r"\p{N}", _GPT2))

SPLITTINGS = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_SPLITTING,
    "gpt2": _GPT2_SPLITTING,
    "olmo": _GPT2_SPLITTING,
    "exaone4": _GPT2_SPLITTING,
    "granite-docling": _GPT2_SPLITTING,
    "llama-bpe": _LLAMA3_SPLITTING,
    "llama3": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    "dbrx": Splitting((_LLAMA3,)),
    "smaug-bpe": Splitting((_LLAMA3,)),
    "glm4": Splitting((_LLAMA3,)),
    "chatglm-bpe": Splitting((_LLAMA3,)),
    "qwen2": _QWEN2_SPLITTING,
    "deepseek-r1-qwen": _QWEN2_SPLITTING,
    "qwen35": Splitting((_QWEN35,), nfc=True),
    "smollm": _DIGITS_SPLITTING,
    "starcoder": _DIGITS_SPLITTING,
    "refact": _DIGITS_SPLITTING,
    "command-r": _DIGITS_SPLITTING,
    "tekken": Splitting((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": Splitting((_GPT4O,)),
    "llama4": Splitting((_GPT4O,)),
    "deepseek-v3": Splitting(_DEEPSEEK3),
    "seed-coder": Splitting((_SEED,)),
}
