"""Forwards that can't be programs are refused in one sentence that names the line or the argument."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_models import VOCAB, gpt2, gpt2_params, new_cache, plain, plain_cache, plain_params
from torch import Tensor

import onward
from onward import native
from onward.errors import OnwardError, ProgramError, RequestError

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")

WEIGHT = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(8, generator=torch.Generator().manual_seed(1))
ZERO = torch.zeros(1, dtype=torch.int32)


def head(tokens: Tensor, params: Tensor) -> Tensor:
    return params[tokens.long()] @ params.T


def slices_to_the_offset(tokens, offsets, cache, params):
    past = cache[:, : offsets[0] + 1]  # wrong
    return head(tokens, params) + past.sum(), cache


def branches_on_the_offset(tokens, offsets, cache, params):
    if offsets[0] > 3:  # wrong
        cache = cache + 1
    return head(tokens, params), cache


def counts_with_item(tokens, offsets, cache, params):
    length = int(offsets.max())  # wrong
    return head(tokens, params), cache + length


def picks_with_a_mask(tokens, offsets, cache, params):
    some = params[tokens[0] > 3]  # wrong
    return head(tokens, params) + some.sum(), cache


def closes_over_a_weight(tokens, offsets, cache, params):
    return head(tokens, params * OTHER), cache  # wrong


LINES = [
    (slices_to_the_offset, "reads the value of a tensor"),
    (branches_on_the_offset, "reads the value of a tensor"),
    (counts_with_item, "reads the value of a tensor"),
    (picks_with_a_mask, "indexes with a mask"),
    (closes_over_a_weight, r"closes over a tensor \(torch.float32 \[8\]\), used by aten.mul.Tensor"),
]


def line_of(forward: Callable[..., Any]) -> str:
    lines, first = inspect.getsourcelines(forward)
    return f"{first + next(i for i, line in enumerate(lines) if '# wrong' in line)}"


@pytest.mark.parametrize(("forward", "what"), LINES, ids=lambda given: getattr(given, "__name__", ""))
def test_the_line_is_named(forward: Callable[..., Any], what: str) -> None:
    name = forward.__name__
    with pytest.raises(ProgramError, match=rf"{what}.*program/test_bad_forwards\.py:{line_of(forward)} in {name}"):
        onward.compile(forward, params=WEIGHT, cache=torch.zeros(1, 4))


def returning(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda tokens, offsets, cache, params: (head(tokens, params), change(cache))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache: {"k": cache["k"]}, "with the structure of its input"),
        (lambda cache: (cache["k"], cache["v"]), "with the structure of its input"),
        (lambda cache: cache | {"v": cache["v"][:, :3]}, r"float32 \[1, 4\] became .*float32 \[1, 3\]"),
        (lambda cache: cache | {"v": cache["v"].double()}, r"float32 \[1, 4\] became .*float64 \[1, 4\]"),
        (lambda cache: cache | {"n": 3}, "2 became 3"),
    ],
)
def test_the_cache_must_be_returned_unchanged_in_form(change: Callable[[Any], Any], message: str) -> None:
    cache = {"k": torch.zeros(1, 4), "v": torch.zeros(1, 4), "n": 2}
    with pytest.raises(ProgramError, match=f"must return (a|the) cache .*{message}"):
        onward.compile(returning(change), params=WEIGHT, cache=cache)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda t, o, c, p: head(t, p), r"must return \(logits, cache\); got a tensor torch.float32 \[1, 1, 61\]"),
        (lambda t, o, c, p: (head(t, p)[:, 0], c), r"float logits \[1, 1, 'V'\]; got .*\[1, 61\]"),
        (lambda t, o, c, p: (head(t, p).argmax(-1, keepdim=True), c), r"float logits .*; got .*int64 \[1, 1, 1\]"),
        (lambda t, o, c, p: (None, c), r"must return \(logits, cache\); got tuple of 2"),
    ],
)
def test_the_logits_must_follow_the_contract(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        onward.compile(forward, params=WEIGHT, cache=torch.zeros(1, 4))


@pytest.mark.parametrize("wrong", ["wte", "wpe"])
def test_params_of_other_shapes_name_the_line(wrong: str) -> None:
    params = gpt2_params()._replace(**{wrong: torch.zeros(64, 5)})
    with pytest.raises(ProgramError, match=r"do not broadcast: .* \(program/foreign_models\.py:\d+ in gpt2\)"):
        onward.compile(gpt2, params=params, cache=new_cache(1, 8))


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        (torch.zeros(1, 1, dtype=torch.int64), ZERO, r"tokens int32 \[B, T\].*got torch.int64 \[1, 1\]"),
        (torch.zeros(1, 1), ZERO, r"tokens int32 \[B, T\].*got torch.float32"),
        (torch.zeros(1, dtype=torch.int32), ZERO, r"tokens int32 \[B, T\].*got torch.int32 \[1\]"),
        (torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), r"int32 \[B\].*\[2\]"),
        (torch.zeros(1, 1, dtype=torch.int32), ZERO.long(), r"offsets int32 \[B\]; got torch.int64"),
        (torch.zeros(0, 1, dtype=torch.int32), ZERO[:0], "at least one row and one token"),
        (torch.zeros(1, 0, dtype=torch.int32), ZERO, "at least one row and one token"),
    ],
)
def test_tokens_and_offsets_are_int32(tokens: Tensor, offsets: Tensor, message: str) -> None:
    program = onward.compile(gpt2, params=gpt2_params(), cache=new_cache(1, 8))
    with pytest.raises(ProgramError, match=message):
        program(tokens, offsets, new_cache(1, 8))


# ── past the end ──────────────────────────────────────────────────────────────────────────────────────────────

ENDS = {
    "heads": lambda: (gpt2, gpt2_params(), new_cache),
    "index": lambda: (plain, plain_params(), plain_cache),
}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize(("tokens", "offset"), [(1, 8), (3, 6), (1, 2**30), (1, -1)])
def test_nothing_is_written_past_the_cache(kind: str, tokens: int, offset: int) -> None:
    forward, params, make = ENDS[kind]()
    if kind == "index" and offset == -1:
        pytest.skip("torch's own index counts a negative position from the end")
    program = onward.compile(forward, params=params, cache=make(2, 8), batch=2)
    cache = make(2, 8)
    leaves = torch.utils._pytree.tree_leaves(cache)
    ids, offsets = torch.ones((2, tokens), dtype=torch.int32), torch.tensor([0, offset], dtype=torch.int32)
    with pytest.raises(ProgramError, match=r"must lie within the cache|outside the"):
        program(ids, offsets, cache)
    assert all(not leaf[..., 1, :, :, :].any() for leaf in leaves if leaf.dim() == 5), "the row has no such positions"
    # And it continues normally, because positions at or past an offset are never read.
    ours, _ = program(ids[:, :1], torch.zeros(2, dtype=torch.int32), cache)
    fresh, _ = program(ids[:, :1], torch.zeros(2, dtype=torch.int32), make(2, 8))
    assert torch.equal(ours, fresh)


def test_the_driver_stops_before_the_end_of_a_cache_of_unknown_length() -> None:
    params, cache = plain_params(), plain_cache(1, 8)
    with pytest.raises(ProgramError, match=r"offsets \[8\].*must lie within the cache"):
        onward.decode(plain, cache=cache, params=params, first_token=1, max_new_tokens=20)
    with pytest.raises(onward.errors.ContextOverflowError):
        onward.decode(plain, cache=cache, params=params, first_token=1, max_new_tokens=20, max_len=8)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_an_id_outside_the_vocabulary(token: int) -> None:
    program = onward.compile(gpt2, params=gpt2_params(), cache=new_cache(1, 8))
    with pytest.raises(ProgramError, match=f"a table of {VOCAB} rows: a token id outside the vocabulary"):
        program(torch.tensor([[token]], dtype=torch.int32), ZERO, new_cache(1, 8))


@pytest.mark.parametrize("options", [{"backend": "fast"}, {"fallback": "never"}])
def test_unknown_options(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"backend is one of auto, native, .* fallback one of eager, "):
        onward.compile(gpt2, params=gpt2_params(), cache=new_cache(1, 8), **options)


def test_a_cache_for_another_number_of_rows() -> None:
    program = onward.compile(gpt2, params=gpt2_params(), cache=new_cache(1, 8))
    with pytest.raises(OnwardError, match=r"a cache \[B, G, S, D\] expects new .* got cache .*\[2, 3, 8, 8\]"):
        program(torch.zeros(1, 1, dtype=torch.int32), ZERO, new_cache(2, 8))


def test_an_error_of_the_forward_names_its_line() -> None:
    def fails(tokens: Tensor, offsets: Tensor, cache: Any, params: Any) -> Any:
        raise KeyError("layer 3")

    with pytest.raises(ProgramError, match=r"cannot be traced: 'layer 3' \(program/test_bad_forwards\.py:\d+ in fails"):
        onward.compile(fails, params=WEIGHT, cache=None)
    with pytest.raises(KeyError, match="layer 3"):
        onward.decode(fails, cache=None, params=WEIGHT, first_token=1, max_new_tokens=2)
