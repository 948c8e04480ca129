"""What `transformers` says of small random models: the judge of every family."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

transformers.utils.logging.disable_progress_bar()

# Logits are made of order 1 below, where float32 resolves 1e-7; the few hundred roundings on the way to one, in
# another order here than there, leave about 3e-6. A wrong angle, mask, norm or bias shifts them by 1e-2 or more.
TOLERANCE = 1e-4
NEW_TOKENS = 64
# Past every window below and past the original length of the RoPE scalings, by 37 already.
PROMPT_LENGTHS = (37, 18, 1)

CONFIGS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "mistral": MistralConfig}
MODELS = {
    "qwen3": transformers.Qwen3ForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
}
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Case:
    """A family and the fields in which its config differs from `SMALL`."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_dynamic(self) -> bool:
        return self.fields.get("rope_parameters") == DYNAMIC


CASES = {
    # head_dim is not hidden_size / num_attention_heads = 8 in any Qwen3 here.
    "qwen3": Case("qwen3", {"head_dim": 24}),
    "qwen3 tied": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 one kv head": Case("qwen3", {"head_dim": 6, "num_key_value_heads": 1}),
    "qwen3 biases": Case("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 window from layer 1": Case(
        "qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3 window by layer": Case(
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 window not used": Case("qwen3", {"head_dim": 16, "use_sliding_window": False, "sliding_window": 3}),
    "qwen2": Case("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied, one kv head": Case("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2 window everywhere": Case("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "llama, every head its own": Case("llama", {"num_key_value_heads": 4}),
    "llama head_dim of its own": Case("llama", {"head_dim": 10, "tie_word_embeddings": True}),
    "llama biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama linear": Case("llama", {"rope_parameters": LINEAR, "max_position_embeddings": 128}),
    "llama llama3": Case("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama dynamic": Case("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral window": Case("mistral", {"sliding_window": 6, "num_key_value_heads": 1}),
    "mistral window of itself": Case("mistral", {"sliding_window": 1, "head_dim": 12}),
    "mistral window past the prompt": Case("mistral", {"sliding_window": 60, "tie_word_embeddings": True}),
}


def build(case: Case) -> PreTrainedModel:
    """The model of a case with random weights, in float32 with the plain attention."""
    config = CONFIGS[case.family](**(SMALL | case.fields), attn_implementation="eager")
    torch.manual_seed(0)
    model = MODELS[case.family](config).eval()
    # The weights that transformers draws are so small that all logits would be nearly 0.
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        weight.data = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * weight.shape[-1] ** -0.5
    return model


@dataclass(frozen=True)
class Expected:
    """What a model makes of a prompt: logits [T, V] after each of its ids, and the greedy continuation."""

    prompt: list[int]
    logits: Tensor
    greedy: list[int]


def expect(model: PreTrainedModel, case: Case, length: int) -> Expected:
    """The expectation for a prompt of `length`, one for which greedy decoding hangs on no rounding.

    Two right implementations may differ by TOLERANCE in each logit, so they are bound to agree on a token only
    where the best logit leads by more than twice that. Prompts are tried until one has such a lead at every step.
    """
    for seed in range(20):
        ids = torch.randint(0, SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))
        prompt = ids.tolist()
        logits, greedy = [], []
        for row in _next_logits(model, case, prompt, greedy):
            logits.append(row)
            best = row[-1].topk(2).values
            if best[0] - best[1] <= 2 * TOLERANCE:
                break
            greedy.append(int(row[-1].argmax()))
            if len(greedy) == NEW_TOKENS:
                return Expected(prompt, logits[0], greedy)
    raise AssertionError("20 prompts in a row came within the tolerance of a tie: are the logits of order 1?")


@torch.no_grad()
def _next_logits(model: PreTrainedModel, case: Case, prompt: list[int], greedy: list[int]) -> Iterator[Tensor]:
    """Yields logits [T, V] of the prompt, then of the prompt and what the caller has appended to `greedy`."""
    if case.is_dynamic:
        yield from _token_by_token(model, prompt, greedy)
    while True:
        yield model(torch.tensor([prompt + greedy]), use_cache=False).logits[0]


def _token_by_token(model: PreTrainedModel, prompt: list[int], greedy: list[int]) -> Iterator[Tensor]:
    """Dynamic RoPE in transformers gives a token the angles of the length fed so far, so tokens are fed alone."""
    cache = transformers.DynamicCache(config=model.config)

    def feed(token: int) -> Tensor:
        return model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0]

    yield torch.cat([feed(token) for token in prompt])
    while True:
        yield feed(greedy[-1])


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
