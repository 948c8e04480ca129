"""Programs with paged caches: the bits of eager calls and of the dense cache, without unnecessary traces."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onward
from onward import native
from onward.cache import PagedKVCache
from onward.errors import ProgramError
from onward.models import Model
from onward.models.linear import pack_params
from onward.ops.heads import BLOCK
from onward.program.shapes import MAX_ROWS
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
MAX_LEN = 3 * BLOCK


def tiny(family: str, weights: str, **overrides: object) -> Model:
    if weights in ("int8", "int4"):
        sizes = {"hidden_size": 64, "intermediate_size": 96}
        return onward.quantize(tiny_model(family, dtype=torch.bfloat16, **sizes, **overrides), weights)
    model = tiny_model(family, dtype=getattr(torch, weights), **overrides)
    object.__setattr__(model, "params", pack_params(model.params))
    return model


MODELS = {
    **{
        f"{family} {weights}": (lambda family=family, weights=weights: tiny(family, weights))
        for family in ("qwen3", "qwen2", "llama", "mistral")
        for weights in ("float32", "bfloat16", "int8", "int4")
    },
    "mistral windowed": lambda: tiny("mistral", "bfloat16", sliding_window=70),
    "qwen3 wide heads": lambda: tiny("qwen3", "bfloat16", head_dim=128),
}
PREPARED: dict[str, tuple[Model, onward.program.Program]] = {}


def prepared(name: str) -> tuple[Model, onward.program.Program]:
    if name not in PREPARED:
        model = MODELS[name]()
        PREPARED[name] = model, compiled(model)
    return PREPARED[name]


def compiled(model: Model) -> onward.program.Program:
    return onward.compile(model.forward, params=model.params, cache=paged(model, 1), tokens=0, fallback="raise")


def paged(model: Model, batch: int, max_len: int = MAX_LEN, spare: int = 1, seed: int = 0) -> PagedKVCache:
    """A cache in blocks that are shuffled, and full of NaN."""
    assert model.new_blocks is not None
    blocks = model.new_blocks(batch * max_len // BLOCK + spare)
    order = torch.randperm(blocks.count, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    cache = blocks.view(order[: batch * max_len // BLOCK].view(batch, -1))
    for leaf in (*cache.keys, *cache.values):
        leaf.fill_(float("nan"))
    return cache


def same_memory(ours: PagedKVCache, theirs: PagedKVCache) -> bool:
    pairs = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
    return all(torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0)) for mine, other in pairs)


def ids_of(model: Model, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocab_size, shape, generator=generator, dtype=torch.int32)


def watched(program: Any) -> list[Any]:
    """The shapes that the program traces from now on."""
    traced: list[Any] = []
    original = program.executable._traced
    program.executable._traced = lambda shape, *rest: traced.append(shape) or original(shape, *rest)
    return traced


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_programs_equal_eager_calls_and_the_dense_cache(name: str, data: st.DataObject) -> None:
    """Chunks of a prompt and single tokens, over rows of the same and of different lengths."""
    model, program = prepared(name)
    batch, seed = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(0, 99), "seed")
    spare = data.draw(st.integers(0, 5), "spare")
    cache, eager, dense = paged(model, batch, spare=spare, seed=seed), paged(model, batch, spare=spare, seed=seed), None
    dense = model.new_cache(batch, MAX_LEN)
    native.set_num_threads(data.draw(st.integers(1, 4), "threads"))
    lengths = [0] * batch
    for turn, tokens in enumerate(data.draw(st.lists(st.sampled_from((1, 1, 2, 7, 61, 64)), min_size=2, max_size=4))):
        if max(lengths) + tokens > MAX_LEN:
            break
        offsets = torch.tensor(lengths, dtype=torch.int32)
        ids = ids_of(model, batch, tokens, seed=turn)
        with torch.no_grad():
            expected, _ = model(ids, offsets, eager)
            by_dense, _ = model(ids, offsets, dense)
        logits, returned = program(ids, offsets, cache)
        assert returned is cache
        assert torch.equal(logits, expected)
        assert torch.equal(logits, by_dense)
        assert same_memory(cache, eager)
        # Rows take back tokens, each as many as it likes.
        lengths = [data.draw(st.integers(length, length + tokens), "length") for length in lengths]


def test_paging_takes_no_more_kernels() -> None:
    model, program = prepared("qwen3 int8")
    dense = onward.compile(model.forward, params=model.params, cache=model.new_cache(1, 64))
    rows = [
        sorted((row.op, row.kernel, row.calls) for row in report.rows)
        for report in (program.explain(paged(model, 1)), dense.explain(model.new_cache(1, MAX_LEN)))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_memory_of_another_size_and_another_table_need_no_new_trace(batch: int) -> None:
    model = tiny("qwen3", "bfloat16")
    program = compiled(model)
    traced = watched(program)
    for turn, spare in enumerate((3, 0, 900, 3)):
        cache, eager = paged(model, batch, spare=spare, seed=turn), paged(model, batch, spare=spare, seed=turn)
        for _ in range(2):
            ids, offsets = ids_of(model, batch, 1, seed=turn), torch.zeros(batch, dtype=torch.int32)
            with torch.no_grad():
                expected, _ = model(ids, offsets, eager)
            assert torch.equal(program(ids, offsets, cache)[0], expected)
            assert same_memory(cache, eager)
            # The next view of the same memory: another tensor of another order.
            cache, eager = (each._replace(table=each.table.flip(1).contiguous()) for each in (cache, eager))
    assert len(traced) == 1
    program(ids_of(model, batch, 1), torch.zeros(batch, dtype=torch.int32), paged(model, batch, max_len=BLOCK))
    assert len(traced) == 2


def test_the_number_of_rows_is_not_inferred_from_other_sizes() -> None:
    """A guess would take the first size of 2: that of the layer's heads, or of the blocks."""
    model = tiny("qwen3", "bfloat16", num_key_value_heads=2)
    program = compiled(model)
    traced = watched(program)
    for batch in (2, 3, 4, 5, 6):
        cache, eager = (paged(model, batch, spare=0) for _ in range(2))
        ids, offsets = ids_of(model, batch, 1), torch.zeros(batch, dtype=torch.int32)
        with torch.no_grad():
            expected, _ = model(ids, offsets, eager)
        assert torch.equal(program(ids, offsets, cache)[0], expected)
    assert [shape.batch for shape in traced] == [2, 17, MAX_ROWS]


@pytest.mark.parametrize("name", ["qwen3 bfloat16", "llama int8", "mistral windowed"])
def test_logits_of_only_the_first_rows(name: str) -> None:
    """They equal a call for all rows, and the program does not depend on the number of rows."""
    model = MODELS[name]()
    program = compiled(model)
    traced = watched(program)
    for batch in (5, 7, 9, 12):
        cache, eager, all_rows = (paged(model, batch) for _ in range(3))
        ids, offsets = ids_of(model, batch, 1), torch.zeros(batch, dtype=torch.int32)
        at = torch.zeros(3, 1, dtype=torch.int64)
        with torch.no_grad():
            expected, _ = model(ids, offsets, eager, at)
        logits = program(ids, offsets, cache, at)[0]
        assert torch.equal(logits, expected)
        assert torch.equal(logits, program(ids, offsets, all_rows)[0][:3])
        assert same_memory(cache, eager)
    # Of the first rows, then of all: for 5 rows, and for any number when the second one comes.
    assert [shape.batch for shape in traced] == [5, 5, 17, MAX_ROWS, 17, MAX_ROWS]


def test_a_table_changes_between_steps() -> None:
    model = tiny("qwen3", "float32")
    program = compiled(model)
    assert model.new_blocks is not None
    blocks = model.new_blocks(4)
    table = torch.tensor([[0, 1, 3]], dtype=torch.int32)
    cache = blocks.view(table)
    ids, zero = ids_of(model, 1, 70), torch.zeros(1, dtype=torch.int32)
    before, _ = program(ids, zero, cache)
    blocks.copy(1, 2, 6)
    table[0, 1] = 2  # written in place, as a table that is used again is
    blocks.view(torch.ones(1, 1, dtype=torch.int32)).keys[0][1].fill_(float("nan"))
    ids_after, at = ids_of(model, 1, 1, seed=1), torch.tensor([70], dtype=torch.int32)
    after, _ = program(ids_after, at, cache)
    dense = model.new_cache(1, MAX_LEN)
    with torch.no_grad():
        assert torch.equal(before, model(ids, zero, dense)[0])
        assert torch.equal(after, model(ids_after, at, dense)[0])


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_table_of_another_number_of_rows_is_refused(rows: int) -> None:
    model, program = prepared("llama bfloat16")
    with pytest.raises(ProgramError, match=f"a program of 3 rows got a cache of {rows}"):
        program(ids_of(model, 3, 1), torch.zeros(3, dtype=torch.int32), paged(model, rows))


@pytest.mark.parametrize("offset", [-1, MAX_LEN])
def test_positions_past_the_table_are_refused(offset: int) -> None:
    model, program = prepared("llama bfloat16")
    with pytest.raises(ProgramError, match="must lie within the cache"):
        program(ids_of(model, 1, 1), torch.tensor([offset], dtype=torch.int32), paged(model, 1))


def test_explain_changes_no_rows_and_takes_little_memory() -> None:
    model = tiny("qwen3", "bfloat16")
    program = compiled(model)
    assert model.new_blocks is not None
    blocks = model.new_blocks(1 << 26)  # more than the machine has
    cache = blocks.view(torch.zeros(1, 2, dtype=torch.int32))
    cache.keys[0][0] = 3.0
    assert program.explain(cache, offset=5).rows
    assert (cache.keys[0][0] == 3.0).all()


def test_alternating_caches_are_recognized() -> None:
    """An engine's steps use different rows of the same memory each time: nothing is created again."""
    model = tiny("qwen3", "bfloat16")
    program: Any = compiled(model)
    assert model.new_blocks is not None
    blocks = model.new_blocks(12)
    tables = [torch.arange(3 * rows, dtype=torch.int32).view(rows, 3) for rows in (1, 2, 4)]

    def step(rows: int, tokens: int) -> None:
        table = tables[rows // 2]
        program(ids_of(model, rows, tokens), torch.zeros(rows, dtype=torch.int32), blocks.view(table))

    steps = [(4, 1), (1, 20), (2, 1), (1, 1)]
    for each in steps * 2:  # the second time in memory that has grown
        step(*each)
    programs = program.executable._programs
    made = dict(programs.recent)
    bound = []
    for made_program in made.values():
        made_program._bind = bound.append
    for each in steps:
        step(*each)
    assert dict(programs.recent) == made
    assert len(made) == len(steps)
    assert not bound


def test_settings_next_to_the_same_tensors_are_part_of_a_cache() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Tensor) -> tuple[Tensor, Any]:
        return params[tokens.long()] * cache["scale"] + cache["base"], cache

    base = torch.ones(4)
    program = onward.compile(forward, params=torch.eye(4), cache={"base": base, "scale": 2.0})
    ids, zero = torch.tensor([[2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for scale in (2.0, 3.0, 2.0):
        assert program(ids, zero, {"base": base, "scale": scale})[0].max() == scale + 1
