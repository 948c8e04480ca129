"""Fill in the middle: prompts for the text between a prefix and a suffix (Bavarian et al., arXiv 2207.14255)."""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from onward.errors import OptionError, TokenizerError
from onward.language_model.language_model import LanguageModel
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.request import Request, check_length
from onward.tokenizer import special_tokens
from onward.util.text_input import check_value


class InfillFormat(NamedTuple):
    """The tokens of a model family.

    prefix, suffix, middle: before the prefix, the suffix and the answer; "" if there is none. ends: tokens that end an
    answer, besides the model's own. suffix_first: whether the suffix precedes the prefix. is_bare: whether the suffix
    is encoded without the space that the tokenizer puts before a text.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False
    is_bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


# A model uses the first whose marks are tokens of its tokenizer.
INFILL_FORMATS = {
    "Qwen2.5-Coder, CodeGemma": InfillFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    "StarCoder, Granite Code": InfillFormat(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>", "<filename>")
    ),
    "DeepSeek-Coder": InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    "CodeLlama": InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), is_bare=True),
    "Codestral": InfillFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True, is_bare=True),
}
# A text before which a tokenizer may put a space, so that it puts none before the next one.
_BEFORE = "☺"


def infill_request(lm: LanguageModel, prefix: str, suffix: str, **options: Unpack[GenerateOptionsDict]) -> Request:
    """The text between `prefix` and `suffix` as one validated request, which `LanguageModel.generate` completes.

    Raises:
        TokenizerError: the tokenizer has no tokens for filling in the middle.
        RequestError: as `LanguageModel.request`.
    """
    for name, text in (("prompt", prefix), ("suffix", suffix)):
        if not isinstance(text, str):
            raise OptionError(name, f"must be a text; got {type(text).__name__}")
        check_value(text, name)
        check_length(text, lm.tokenizer, lm.model.max_seq_len, name)
    format, ids = _format_of(lm)
    encoded = _bare if format.is_bare else _plain
    parts = [
        [*ids(format.prefix), *_plain(lm.encode, prefix)],
        [*ids(format.suffix), *encoded(lm.encode, suffix)],
    ]
    if format.suffix_first:
        parts.reverse()
    rest: dict[str, Any] = {**options}
    eos = rest.get("eos", lm.defaults.eos) or ()
    eos = (eos,) if isinstance(eos, int) else tuple(eos)
    if not rest.get("ignore_eos", lm.defaults.ignore_eos):
        rest["eos"] = (*eos, *(id for end in format.ends for id in ids(end) if id not in eos))
    return lm.request([*lm.encode(""), *parts[0], *parts[1], *ids(format.middle)], **rest)


def _format_of(lm: LanguageModel) -> tuple[InfillFormat, Callable[[str], list[int]]]:
    """The format of a model, and a function from a token's text to its id, if there is such a token."""
    if lm.tokenizer is None:
        raise TokenizerError("filling in the middle needs a tokenizer, but this model has none")
    known = {text: id for id, text in special_tokens(lm.tokenizer).items()}

    def ids(text: str) -> list[int]:
        if not text or text in known:
            return [known[text]] if text else []
        found = lm.encode(text, add_special_tokens=False)
        return found if len(found) == 1 else []

    for format in INFILL_FORMATS.values():
        if all(ids(mark) for mark in format.marks):
            return format, ids
    raise TokenizerError(
        "this model's tokenizer has no tokens for filling in the middle, as those of "
        f"{', '.join(INFILL_FORMATS)} have: leave out the suffix"
    )


def _plain(encode: Callable[..., list[int]], text: str) -> list[int]:
    return encode(text, add_special_tokens=False)


def _bare(encode: Callable[..., list[int]], text: str) -> list[int]:
    before, both = _plain(encode, _BEFORE), _plain(encode, _BEFORE + text)
    return both[len(before) :] if both[: len(before)] == before else _plain(encode, text)
