"""Adapter updates of products with the same x run in one call of a program, with the bits of separate calls."""

import torch

import onward
from onward import ops


def forward(tokens, offsets, cache, params):
    x = ops.embedding(tokens, params["table"])
    slots = cache[0]
    for layer in params["layers"]:
        products = [ops.linear(x, weight) for weight in layer["weights"]]
        stacks = layer["stacks"]
        first, second = (
            ops.lora(x, y, a, b, slots, ranks) for y, (a, b, ranks) in zip(products, stacks[:2], strict=True)
        )
        again = ops.lora(x, first, *stacks[0][:2], slots, stacks[0][2])  # of what the first one made
        x = ops.add(again, second)
    return x, cache


def test_a_program_fuses_neighbors_and_preserves_the_bits():
    g = torch.Generator().manual_seed(0)
    width, slots, rank = 48, 4, 5

    def stack():
        a, b = (torch.randn(slots, rank, width, generator=g) for _ in range(2))
        return a, b, torch.tensor([0, 5, 2, 0], dtype=torch.int32)

    params = {
        "table": torch.randn(11, width, generator=g),
        "layers": [
            {
                "weights": [ops.pack(torch.randn(width, width, generator=g) / 7) for _ in range(2)],
                "stacks": [stack(), stack()],
            }
            for _ in range(2)
        ],
    }
    for batch, tokens in ((3, 1), (3, 40), (40, 1)):
        cache = (torch.arange(batch, dtype=torch.int32) % slots,)
        ids = torch.randint(0, 11, (batch, tokens), generator=g, dtype=torch.int32)
        offsets = torch.zeros(batch, dtype=torch.int32)
        program = onward.compile(forward, params=params, cache=cache, batch=batch, tokens=tokens)
        assert torch.equal(program(ids, offsets, cache)[0], forward(ids, offsets, cache, params)[0])
        if program.backend == "native":
            rows = program.explain(cache, batch, tokens).rows
            calls = sum(row.calls for row in rows if row.kernel == "lora")
            assert calls == 4, "the third of each layer waits for the first"
