"""The trained families, at tiny sizes, and comparisons of their logprobs."""

import tempfile
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

import onward
from onward.models import FAMILIES, read_config
from onward.testing import random_checkpoint, tiny_config
from tiny_checkpoint import FEW_EXPERTS

DTYPES = (torch.float32, torch.bfloat16)
_NAMES = sorted({name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM")})
RECURRENT = [name for name in _NAMES if getattr(read_config(tiny_config(name)), "states", ())]
TRAINED = [name for name in _NAMES if name not in RECURRENT]
# One for each thing that attention can have: queries and keys with norms, windows and softcaps, sinks and experts, a
# latent, keys that layers share.
VARIED = ["qwen3", "gemma2", "gptoss", "deepseekv3", "gemma4"]
PROMPTS = [[5, 6, 7], [9, 8] * 40, [11] * 23]


def trainable(family: str, dtype: torch.dtype = torch.float32, **overrides: object) -> onward.LanguageModel:
    with tempfile.TemporaryDirectory() as folder:
        fields = FEW_EXPERTS.get(family, {}) | overrides
        return onward.load(random_checkpoint(folder, family, dtype=dtype, **fields), trainable=True)


def samples(lm: onward.LanguageModel, **options: object) -> list[onward.Completion]:
    chosen = {"max_new_tokens": 20, "n": 2, "temperature": 1.0, "seed": 0, "logprobs": 0, "ignore_eos": True, **options}
    return [text for completion in lm.generate(PROMPTS, **chosen) for text in completion.choices]


def reported(text: onward.Completion) -> Tensor:
    return torch.tensor([token.chosen for token in text.logprobs])


def assert_equal(texts: Sequence[onward.Completion], logprobs: Iterable[Tensor]) -> None:
    for text, own in zip(texts, logprobs, strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(own.detach(), reported(text))


def step(lm: onward.LanguageModel, texts: Sequence[onward.Completion], rate: float = 1e-2) -> None:
    """One step of AdamW that changes every weight."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate)
    torch.cat(lm.logprobs(list(texts))).sum().neg().backward()
    optimizer.step()
    optimizer.zero_grad()
