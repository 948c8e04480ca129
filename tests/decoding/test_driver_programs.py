"""stream, decode, generate and the inferencer run programs by default: the same tokens, traced once."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import onward
from onward import native
from onward.cache import KVCache
from onward.errors import ProgramError, RequestError
from onward.inferencer import ModelInferencer
from onward.models import Model
from onward.program import programs_of
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")


class Counted:
    """A forward that counts how often Python runs it."""

    def __init__(self, model: Model) -> None:
        self.calls = 0
        self._forward = model.forward

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        self.calls += 1
        return self._forward(*arguments, **options)


@pytest.fixture
def model() -> Model:
    return tiny_model("qwen3", dtype=torch.float32)


def weights(model: Model) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(model.params) if isinstance(leaf, Tensor)]


def decoded(forward: Any, model: Model, **options: Any) -> list[int]:
    return onward.decode(
        forward, cache=model.new_cache(1, 64), params=model.params, first_token=3, max_new_tokens=30, **options
    )


def test_one_trace_serves_all_prompts(model: Model) -> None:
    forward = Counted(model)
    first = decoded(forward, model)
    assert forward.calls == 1
    assert decoded(forward, model) == first
    assert forward.calls == 1
    assert decoded(forward, model, compile="eager") == first
    assert forward.calls == 31


def test_other_params_are_traced_again(model: Model) -> None:
    forward, other = Counted(model), tiny_model("qwen3", dtype=torch.float32, seed=9)
    first, second = decoded(forward, model), decoded(forward, other)
    assert forward.calls == 2
    assert first != second
    assert (decoded(forward, model), decoded(forward, other)) == (first, second)
    assert forward.calls == 2


def test_in_place_changes_and_swapped_memory_are_seen(model: Model) -> None:
    forward = Counted(model)
    before = decoded(forward, model)
    for leaf in weights(model):
        leaf.copy_(leaf.flip(-1))
    after = decoded(forward, model)
    assert after == decoded(forward, model, compile="eager") != before
    leaf = weights(model)[0]
    leaf.data = leaf.data.roll(1, 0).clone()
    assert decoded(forward, model) == decoded(forward, model, compile="eager")


def test_names_and_numbers_in_params_are_compared() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Any) -> tuple[Tensor, Any]:
        return params["table"][tokens.long()] * params["scale"] + 0 * params["other"], cache

    def ids(params: Any) -> list[int]:
        return onward.decode(forward, cache=None, params=params, first_token=0, max_new_tokens=3)

    first, second = torch.eye(5).roll(1, 0), torch.eye(5).roll(2, 0)
    other = {"other": torch.zeros(5)}
    assert ids({"table": first, "scale": 1.0} | other) == [4, 3, 2]
    assert ids({"table": second, "scale": 1.0} | other) == [3, 1, 4]
    assert ids({"table": first, "scale": -1.0} | other) == [0, 0, 0]
    swapped = torch.zeros(5, 5)

    def named(tokens: Tensor, offsets: Tensor, cache: Any, params: Any) -> tuple[Tensor, Any]:
        return params["a"][tokens.long()], cache

    for names, expected in ((("a", "b"), [4, 3, 2]), (("b", "a"), [0, 0, 0])):
        params = dict(zip(names, (first, swapped), strict=True))
        assert onward.decode(named, cache=None, params=params, first_token=0, max_new_tokens=3) == expected


SCALE = 1.0


def test_settings_around_a_forward_are_compared() -> None:
    weight = torch.eye(5).roll(1, 0)
    bias = 0

    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Tensor) -> tuple[Tensor, Any]:
        return params.roll(bias, 0)[tokens.long()] * SCALE, cache

    def ids() -> list[int]:
        return onward.decode(forward, cache=None, params=weight, first_token=0, max_new_tokens=4)

    assert ids() == [4, 3, 2, 1]
    bias = 1
    assert ids() == [3, 1, 4, 2]
    global SCALE
    SCALE = -1.0
    try:
        assert ids() == [0, 0, 0, 0]
    finally:
        SCALE = 1.0


def test_a_forward_that_closes_over_weights_runs_eagerly() -> None:
    weight = torch.eye(5).roll(1, 0)
    calls = []

    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Any) -> tuple[Tensor, Any]:
        calls.append(1)
        return weight[tokens.long()], cache

    for _ in range(2):
        ids = onward.decode(forward, cache=None, params=(), first_token=0, max_new_tokens=4)
        assert ids == [4, 3, 2, 1]
    assert len(calls) == 1 + 4 + 4, "one trace that failed, and it is not tried again"
    with pytest.raises(ProgramError, match="closes over a tensor"):
        onward.decode(forward, cache=None, params=(), first_token=0, max_new_tokens=4, compile="native")


def test_bound_methods_and_unhashable_forwards_decode() -> None:
    class Holder:
        __hash__ = None  # type: ignore[assignment]

        def forward(self, tokens: Tensor, offsets: Tensor, cache: Any, params: Tensor) -> tuple[Tensor, Any]:
            return params[tokens.long()], cache

        __call__ = forward

    weight = torch.eye(5).roll(1, 0)
    for forward in (Holder().forward, Holder()):
        assert onward.decode(forward, cache=None, params=weight, first_token=0, max_new_tokens=4) == [4, 3, 2, 1]


def test_programs_keep_no_references() -> None:
    """Neither params nor caches nor the forward outlive their owners for having been decoded with."""
    model = tiny_model("llama", dtype=torch.float32)
    forward, cache = Counted(model), model.new_cache(1, 64)
    onward.decode(forward, cache=cache, params=model.params, first_token=3, max_new_tokens=3)
    watched = [weakref.ref(cache.keys[0]), weakref.ref(forward)]
    watched += [weakref.ref(leaf) for leaf in weights(model)]
    programs = weakref.ref(programs_of(forward, model.params))
    gc.disable()  # all by counting references
    try:
        del cache
        assert watched[0]() is None
        params = model.params
        del model
        del params, forward
        assert [reference() for reference in watched if reference() is not None] == []
        assert programs() is None
    finally:
        gc.enable()


def test_programs_are_freed_with_their_params() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    forward = Counted(model)
    decoded(forward, model)
    programs = weakref.ref(programs_of(forward, model.params))
    weight = weakref.ref(weights(model)[0])
    del model
    gc.collect()
    assert weight() is None
    assert programs() is None


# ── tensors and inferencers ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compile", ["auto", "native"])
def test_generate_of_tensors_equals_eager_calls(model: Model, compile: str) -> None:
    prompts = torch.randint(0, model.vocab_size, (4, 6), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"seed": [1, 2, 3, 4], "temperature": 1.5, "eos": list(range(0, model.vocab_size, 9))}
    eager = onward.generate(model, prompts, 30, compile="eager", **options)
    assert torch.equal(onward.generate(model, prompts, 30, compile=compile, **options), eager)
    assert len(set((eager[:, 6:] == eager[:, -1:]).int().argmax(1).tolist())) > 1, "rows end at different steps"


def test_generate_of_tensors_traces_once_for_all_calls(model: Model) -> None:
    forward = Counted(model)
    counted = Model(forward, model.params, model.new_cache, model.vocab_size)
    prompts = torch.randint(0, model.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
    first = onward.generate(counted, prompts, 8, temperature=0)
    traces = forward.calls
    assert traces == 2, "the prompt, and one token"
    for _ in range(3):
        assert torch.equal(onward.generate(counted, prompts, 8, temperature=0), first)
    assert forward.calls == traces


def test_the_inferencer_runs_programs(model: Model) -> None:
    forward = Counted(model)
    counted = Model(forward, model.params, model.new_cache, model.vocab_size)
    outputs = []
    for compile in ("auto", "eager"):
        forward.calls = 0
        inferencer = ModelInferencer(counted, compile=compile)
        cache = inferencer.new_cache(2, 32)
        prefilled = inferencer.prefill(torch.tensor([[1, 2, 3], [4, 5, 6]]), cache, onward.greedy)
        rest = inferencer.decode(prefilled.token_ids, cache, 9, onward.greedy)
        outputs.append((prefilled.token_ids, rest.token_ids))
        assert forward.calls == (2 if compile == "auto" else 10)
    for programs, eager in zip(*outputs, strict=True):
        assert torch.equal(programs, eager)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: decoded(model.forward, model, compile="fast"),
        lambda model: onward.generate(model, torch.ones(1, 1, dtype=torch.int64), 1, compile="fast"),
        lambda model: onward.load("demo", compile="fast"),
    ],
)
def test_unknown_value_of_compile(model: Model, call: Any) -> None:
    with pytest.raises(RequestError, match="compile must be one of auto, native, cuda, inductor, eager; got 'fast'"):
        call(model)


def test_other_kinds_of_caches_keep_their_type(model: Model) -> None:
    _, cache = onward.compile(model.forward, params=model.params, cache=model.new_cache(1, 8))(
        torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), given := model.new_cache(1, 8)
    )
    assert isinstance(cache, KVCache)
    assert cache is given
