"""Products of one x with the same input order gather x once and run in one call, with the bits of separate calls."""

import pytest
import torch

import onward
from onward import native, ops
from onward.quantization.rounding import quantize_int4

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
WIDTH = 96
GENERATOR = torch.Generator().manual_seed(0)
ORDER, OTHER = (torch.randperm(WIDTH, generator=GENERATOR) for _ in range(2))


def weight(order):
    return quantize_int4(torch.randn(WIDTH, WIDTH, generator=GENERATOR)).in_order(order)


def one_order(x, weights):
    a, b, c = (ops.linear(x, w) for w in weights)
    return ops.add(ops.add(a, b), c)


def changed_between(x, weights):
    """The second product reads what x has become."""
    a = ops.linear(x, weights[0])
    x.mul_(2)
    return ops.add(a, ops.linear(x, weights[1]))


def changed_after(x, weights):
    """A result of a selection that is written to is not another's."""
    mine, same = (x.index_select(-1, weight.order) for weight in weights)
    mine.mul_(2)
    return mine + same


CASES = [  # orders of the weights, the body, selections and products in the program
    ((ORDER, ORDER, ORDER), one_order, 1, 1),
    ((ORDER, ORDER, OTHER), one_order, 2, 2),
    ((ORDER, None, ORDER), one_order, 1, 2),
    ((ORDER, ORDER), changed_between, 2, 2),
    ((ORDER, ORDER), changed_after, 2, 0),
]


@pytest.mark.parametrize(("orders", "body", "selections", "products"), CASES)
def test_equal_selections_are_shared_if_nothing_changes(orders, body, selections, products):
    params = {"table": torch.randn(11, WIDTH, generator=GENERATOR), "weights": [weight(order) for order in orders]}

    def forward(tokens, offsets, cache, params):
        return body(ops.embedding(tokens, params["table"]), params["weights"]), cache

    cache, offsets = torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)
    for tokens in (1, 40):
        ids = torch.randint(0, 11, (2, tokens), generator=GENERATOR, dtype=torch.int32)
        program = onward.compile(forward, params=params, cache=cache, batch=2, tokens=tokens)
        assert program.backend == "native"
        assert torch.equal(program(ids, offsets, cache)[0], forward(ids, offsets, cache, params)[0])
        rows = program.explain(cache, 2, tokens).rows
        assert sum(row.calls for row in rows if row.kernel == "index") == selections
        assert sum(row.calls for row in rows if row.kernel == "linear_many") == products
