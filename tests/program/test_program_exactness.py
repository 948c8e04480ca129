"""program == eager, bit for bit: the built-in families, every precision, any shape of tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onward
from onward import native
from onward.models import Model
from onward.models.linear import pack_params
from onward.program import compile
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
MAX_LEN = 96


def packed(family: str, dtype: torch.dtype, **overrides: object) -> Model:
    model = tiny_model(family, dtype=dtype, **overrides)
    object.__setattr__(model, "params", pack_params(model.params))
    return model


def quantized(family: str, how: str, **overrides: object) -> Model:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = onward.quantize(tiny_model(family, dtype=torch.bfloat16, **sizes, **overrides), how)
    object.__setattr__(model, "params", pack_params(model.params))  # routers stay floats
    return model


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


MODELS = {
    **{
        f"{family} {str(dtype)[6:]}": (lambda family=family, dtype=dtype: packed(family, dtype))
        for family in ("qwen3", "qwen2", "llama", "mistral")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    "mistral windowed": lambda: packed("mistral", torch.bfloat16, sliding_window=7),
    "llama dynamic rope": lambda: packed(
        "llama", torch.float32, max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    "qwen3 int8": lambda: quantized("qwen3", "int8"),
    "qwen3 int4": lambda: quantized("qwen3", "int4"),
    "qwen3 iq4_nl": lambda: quantized("qwen3", "iq4_nl"),
    "deepseek v3": lambda: packed("deepseekv3", torch.bfloat16),
    "mixtral": lambda: packed("mixtral", torch.bfloat16, num_local_experts=3),
    "qwen3 experts": lambda: packed("qwen3moe", torch.float32, **EXPERTS),
    "qwen3 experts int8": lambda: quantized("qwen3moe", "int8", **EXPERTS),
    "qwen3 experts int4": lambda: quantized("qwen3moe", "int4", **EXPERTS),
    "qwen3 experts iq4_nl": lambda: quantized("qwen3moe", "iq4_nl", **EXPERTS),
}
PREPARED: dict[str, tuple[Model, onward.program.Program]] = {}


def prepared(name: str) -> tuple[Model, onward.program.Program]:
    if name not in PREPARED:
        model = MODELS[name]()
        cache = model.new_cache(1, MAX_LEN)
        PREPARED[name] = model, compile(model.forward, params=model.params, cache=cache)
    return PREPARED[name]


def filled(cache: object, seed: int) -> object:
    """Every position written: what a program must not read would show."""
    generator = torch.Generator().manual_seed(seed)
    for leaf in torch.utils._pytree.tree_leaves(cache):
        leaf.copy_(torch.randn(leaf.shape, generator=generator))
    return cache


def copies(model: Model, batch: int, seed: int) -> tuple[object, object]:
    return filled(model.new_cache(batch, MAX_LEN), seed), filled(model.new_cache(batch, MAX_LEN), seed)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs), (ours.float() - theirs.float()).abs().max()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_programs_give_the_bits_of_eager_calls(name: str, data: st.DataObject) -> None:
    model, program = prepared(name)
    batch = data.draw(st.integers(1, 4), "batch")
    tokens = data.draw(st.integers(1, 40), "tokens")
    offsets = torch.tensor(data.draw(st.lists(st.integers(0, MAX_LEN - tokens), min_size=batch, max_size=batch)))
    ids = torch.randint(0, model.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    at = None
    if data.draw(st.booleans(), "some logits"):
        count = data.draw(st.integers(0, 2), "count")
        at = torch.randint(0, tokens, (batch, count), generator=torch.Generator().manual_seed(1))
    given_ids, given_offsets = ids.to(torch.int32), offsets.to(torch.int32)
    cache, theirs = copies(model, batch, seed=tokens)
    native.set_num_threads(data.draw(st.integers(1, 4), "threads"))
    logits, returned = program(given_ids, given_offsets, cache, at)
    with torch.no_grad():
        expected, _ = model(given_ids, given_offsets, theirs, at)
    assert returned is cache
    assert_same_bits(logits, expected)
    for ours, wanted in zip(
        torch.utils._pytree.tree_leaves(cache), torch.utils._pytree.tree_leaves(theirs), strict=True
    ):
        assert_same_bits(ours, wanted)


@pytest.mark.parametrize("name", ["qwen3 bfloat16", "qwen3 int4"])
def test_one_program_serves_every_number_of_tokens(name: str) -> None:
    """After two lengths no third is traced: the numbers of a program lie on a line."""
    model, program = prepared(name)
    traced = []
    original = program.executable._traced
    program.executable._traced = lambda *args: traced.append(args) or original(*args)
    try:
        cache = model.new_cache(1, 80)  # a cache of its own: nothing is there yet
        for tokens in (3, 20, 5, 41, 2, 77):
            program(torch.zeros((1, tokens), dtype=torch.int32), torch.zeros(1, dtype=torch.int32), cache)
    finally:
        del program.executable._traced
    assert [args[0].tokens for args in traced] == [3, 11, 512]
