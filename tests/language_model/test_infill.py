"""Prompts for the text between a prefix and a suffix, in the formats of the families."""

import dataclasses
import re

import pytest

import onward
from onward.errors import RequestError, TokenizerError
from onward.language_model import INFILL_FORMATS, infill_request
from onward.protocols import BodyError, BodyReader
from onward.testing import ByteTokenizer, scripted_model

# The prompt that each family's own code writes, with marks, for "ab" before and "cd" after.
WRITTEN = {
    "Qwen2.5-Coder, CodeGemma": "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
    "StarCoder, Granite Code": "<fim_prefix>ab<fim_suffix>cd<fim_middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>",
    "CodeLlama": "▁<PRE>_ab▁<SUF>cd▁<MID>",
    "Codestral": "[SUFFIX]cd[PREFIX]_ab",
}


@dataclasses.dataclass(frozen=True)
class FamilyTokenizer(ByteTokenizer):
    """Bytes, a BOS before texts, and a family's marks; a SentencePiece tokenizer puts a space before texts."""

    marks: tuple[str, ...] = ()
    spaces: bool = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = [256] if add_special_tokens else []
        for at, part in enumerate(re.split(f"({'|'.join(map(re.escape, self.marks)) or chr(0)})", text)):
            if part in self.marks:
                ids.append(258 + self.marks.index(part))
            elif part:
                ids += (" " * (self.spaces and at == 0) + part).encode()
        return ids

    def text_of(self, ids: tuple[int, ...]) -> str:
        texts = ["<s>", "</s>", *self.marks]
        parts = [texts[id - 256].encode() if id >= 256 else bytes([id]) for id in ids]
        return b"".join(parts).decode().replace(" ", "_")


def model(name: str, answer: str, start: list[int]) -> tuple[onward.LanguageModel, FamilyTokenizer]:
    format = INFILL_FORMATS[name]
    marks = (*format.marks, *format.ends)
    tokenizer = FamilyTokenizer(marks=marks, spaces=format.is_bare, vocab_size=258 + len(marks))
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.vocab_size - 1 if format.ends else 257]

    def script(history: list[int]) -> int:
        return ids[min(max(0, len(history) - start[0]), len(ids) - 1)]

    options = onward.GenerateOptions(max_new_tokens=20, eos=257)
    return onward.LanguageModel(
        scripted_model(script, vocab_size=tokenizer.vocab_size), tokenizer, None, options
    ), tokenizer


@pytest.mark.parametrize("name", INFILL_FORMATS)
def test_the_prompt_follows_the_family_and_its_tokens_end_the_text(name: str) -> None:
    start = [0]
    lm, tokenizer = model(name, "xyz", start)
    request = infill_request(lm, "ab", "cd")
    start[0] = len(request.prompt)
    assert tokenizer.text_of(request.prompt) == f"<s>{WRITTEN[name]}"
    completion = lm.generate(request)
    assert completion.text.strip() == "xyz"
    assert completion.finish_reason == "stop"
    body = BodyReader(lm, "m", streams=True).read("/v1/completions", {"prompt": ["ab", "b"], "suffix": "cd"})
    assert body.requests[0].prompt == request.prompt
    assert body.requests[0].options.eos == request.options.eos
    assert set(infill_request(lm, "ab", "cd", eos=5).options.stop_ids) >= {5}
    assert not infill_request(lm, "ab", "cd", ignore_eos=True).options.stop_ids


def test_infill_without_tokens_or_with_another_prompt_is_refused() -> None:
    lm = onward.load("demo")
    with pytest.raises(TokenizerError, match=r"no tokens for filling in the middle, as those of Qwen2\.5-Coder"):
        infill_request(lm, "a", "b")
    reader = BodyReader(lm, "m", streams=True)
    plain = reader.read("/v1/completions", {"prompt": "a", "suffix": ""}).requests
    assert plain == reader.read("/v1/completions", {"prompt": "a"}).requests
    for fields, param, message in [
        ({"suffix": "b"}, "suffix", "no tokens for filling in the middle"),
        ({"suffix": 5}, "suffix", "must be a string; got 5"),
        ({"suffix": "b", "prompt": [1, 2]}, "suffix", "needs prompts as texts"),
        ({"suffix": "b", "echo": True}, "echo", "cannot be combined with suffix"),
    ]:
        with pytest.raises(BodyError, match=message) as refused:
            reader.read("/v1/completions", {"prompt": "a"} | fields)
        assert refused.value.param == param
    with pytest.raises(RequestError, match="suffix must be a text; got int"):
        infill_request(lm, "a", 5)  # type: ignore[arg-type]
