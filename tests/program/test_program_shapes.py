"""For any rows, tokens and offsets: the bits of eager calls, and few traces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_models import plain, plain_cache, plain_params
from torch import Tensor
from torch.utils import _pytree as pytree

import onward
from onward import native
from onward.models import Model
from onward.models.linear import pack_params
from onward.program.shapes import MAX_ROWS, Shape
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
MAX_LEN = 40


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


def qwen3(dtype: torch.dtype = torch.bfloat16) -> Model:
    model = tiny_model("qwen3", dtype=dtype)
    object.__setattr__(model, "params", pack_params(model.params))
    return model


def compiled(model: Model) -> tuple[onward.program.Program, list[Shape]]:
    """A program, and the shapes that it traces from now on."""
    program = onward.compile(model.forward, params=model.params, cache=model.new_cache(1, MAX_LEN), tokens=0)
    return program, watched(program)


def watched(program: Any) -> list[Shape]:
    traced: list[Shape] = []
    original = program.executable._traced

    def seen(shape: Shape, *rest: Any) -> Any:
        traced.append(shape)
        return original(shape, *rest)

    program.executable._traced = seen
    return traced


def filled(cache: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for leaf in pytree.tree_leaves(cache):
        leaf.copy_(torch.randn(leaf.shape, generator=generator))
    return cache


def same(ours: Any, theirs: Any) -> bool:
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True)
    return all(mine.dtype == other.dtype and torch.equal(mine, other) for mine, other in pairs)


def drawn(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def test_a_thousand_shapes_give_the_bits_of_eager_calls() -> None:
    """Over a dirty cache, on one to four threads; each call's cache is compared whole."""
    model = qwen3()
    program, traced = compiled(model)
    generator = torch.Generator().manual_seed(0)
    caches = {b: (filled(model.new_cache(b, MAX_LEN), b), filled(model.new_cache(b, MAX_LEN), b)) for b in range(1, 9)}
    for _ in range(1000):
        native.set_num_threads(int(drawn(generator, 1, 5)))
        batch, tokens = int(drawn(generator, 1, 9)), max(1, int(drawn(generator, -8, 25)))
        offsets = drawn(generator, 0, MAX_LEN - tokens + 1, batch)
        ids = drawn(generator, 0, model.vocab_size, batch, tokens)
        ours, theirs = caches[batch]
        with torch.no_grad():
            assert same(program(ids, offsets, ours), model(ids, offsets, theirs)), (batch, tokens, offsets)
    # One row: a token, then a line in T of two more traces. Rows: a line in B (a corner and a confirming one, besides
    # the first), and all B and T.
    assert len(traced) == len(set(traced)) <= 1 + 4 + 4 + 6


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_shrinking_batch_is_traced_for_two_more_sizes(tokens: int) -> None:
    model = qwen3()
    program, traced = compiled(model)
    cache, other = (filled(model.new_cache(8, MAX_LEN), 3) for _ in range(2))
    for rows in range(8, 0, -1):
        offsets = torch.arange(rows, dtype=torch.int32)
        ids = torch.full((rows, tokens), 7, dtype=torch.int32)
        mine, plainly = (
            onward.KVCache(*(tuple(leaf[:rows] for leaf in part) for part in each)) for each in (cache, other)
        )
        with torch.no_grad():
            assert same(program(ids, offsets, mine)[0], model(ids, offsets, plainly)[0])
    assert same(cache, other)
    assert traced == [(8, tokens), (17, tokens), (MAX_ROWS, tokens), (1, tokens)]


def test_rows_and_tokens_together() -> None:
    model = qwen3()
    program, traced = compiled(model)
    for batch, tokens in ((5, 4), (3, 7), (2, 2), (8, 20), (6, 31)):
        cache = model.new_cache(batch, MAX_LEN)
        ids, offsets = torch.ones((batch, tokens), dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        with torch.no_grad():
            expected = model(ids, offsets, model.new_cache(batch, MAX_LEN))
        assert same(program(ids, offsets, cache), expected)
    assert traced == [(5, 4), (17, 11), (17, 512), (MAX_ROWS, 11), (MAX_ROWS, 512)]


def test_more_rows_or_tokens_than_confirmed_are_traced() -> None:
    model = qwen3(torch.float32)
    program, traced = compiled(model)
    for batch, tokens in ((2, 1), (3, 1), (MAX_ROWS + 3, 1), (MAX_ROWS + 4, 1), (4, 1)):
        program(torch.ones((batch, tokens), dtype=torch.int32), torch.zeros(batch, dtype=torch.int32),
                model.new_cache(batch, MAX_LEN))  # fmt: skip
    assert traced == [(2, 1), (17, 1), (MAX_ROWS, 1), (MAX_ROWS + 3, 1), (MAX_ROWS + 4, 1)]


def stacked_cache(batch: int, rows: int | None = None) -> dict[str, Tensor]:
    """The plain model's cache, whose rows are no outer dimension: [L, B, H, S, D]."""
    cache = filled(plain_cache(batch, MAX_LEN), 5)
    return cache if rows is None else {name: leaf[:, :rows] for name, leaf in cache.items()}


def test_caches_whose_strides_depend_on_the_rows() -> None:
    """New caches and views of a larger one are distinguished; each is right."""
    params = plain_params()
    program = onward.compile(plain, params=params, cache=stacked_cache(6), tokens=0)
    single = onward.compile(plain, params=params, cache=stacked_cache(1), tokens=0)
    ids, offsets = torch.arange(12, dtype=torch.int32).reshape(6, 2), torch.arange(6, dtype=torch.int32)
    for rows in (6, 5, 4, 3, 2):
        for cache in (stacked_cache(rows), stacked_cache(6, rows)):
            alone = []
            for row in range(rows):
                mine = {name: leaf[:, row : row + 1].clone() for name, leaf in cache.items()}
                alone.append(single(ids[row : row + 1], offsets[row : row + 1], mine)[0])
            together, _ = program(ids[:rows], offsets[:rows], cache)
            assert torch.equal(together, torch.cat(alone))


def with_a_square(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Its mask [T, T] is no line in T."""
    length = tokens.shape[1]
    mask = torch.ones(length, length).tril()
    x = params[tokens.long()]
    return (mask @ x) @ params.T, cache


def with_a_branch(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds T up to a multiple of 4 within: a staircase, which two points do not show."""
    length = tokens.shape[1]
    padded = torch.nn.functional.embedding(tokens, params).new_zeros(tokens.shape[0], -(-length // 4) * 4, 8)
    padded[:, :length] = params[tokens.long()]
    return padded.cumsum(1)[:, :length] @ params.T, cache


@pytest.mark.parametrize("forward", [with_a_square, with_a_branch])
def test_shapes_that_do_not_generalize_are_traced_separately(forward: Callable[..., Any]) -> None:
    params = torch.randint(-3, 4, (11, 8), generator=torch.Generator().manual_seed(0)).float()  # sums are exact
    program = onward.compile(forward, params=params, cache=torch.zeros(1), tokens=0)
    for tokens in (3, 8, 2, 5, 6, 31, 4):
        for batch in (1, 3, 2):
            ids = drawn(torch.Generator().manual_seed(tokens), 0, 11, batch, tokens)
            zero = torch.zeros(batch, dtype=torch.int32)
            assert torch.equal(program(ids, zero, torch.zeros(1))[0], forward(ids, zero, torch.zeros(1), params)[0])


def test_a_setting_within_the_cache_is_part_of_its_shape() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: Tensor) -> tuple[Tensor, Any]:
        return params[tokens.long()] * cache["scale"], cache

    params = torch.eye(4)
    program = onward.compile(forward, params=params, cache={"scale": 2.0})
    ids, zero = torch.tensor([[2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for scale in (2.0, 3.0, 2.0):
        assert program(ids, zero, {"scale": scale})[0].max() == scale
