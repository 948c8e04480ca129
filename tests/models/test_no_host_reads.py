"""The code for GPUs reads no tensor's value on the host and uploads none, which would wait and prevent graphs.

The tests need no GPU: the definitions run on the CPU, in modes in which such a read raises.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onward import native, ops
from onward.language_model import quantize
from onward.models import FAMILIES
from onward.ops import packed, quantized
from onward.ops.operator import Operator
from onward.testing import tiny_model
from tiny_checkpoint import FEW_EXPERTS

_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "cpu"}
_UPLOADS = {"tensor", "as_tensor", "from_numpy", "asarray"}


class HostReadError(AssertionError):
    pass


class NoPythonReads(TorchFunctionMode):
    """Methods that hand a value to Python, which the dispatcher does not see on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        # A tensor given to as_tensor is no upload.
        uploads = name in _UPLOADS and not (args and isinstance(args[0], torch.Tensor))
        if name in _READS or uploads:
            raise HostReadError(f"{name} in what a GPU would run")
        return function(*args, **(kwargs or {}))


class NoDispatchedReads(TorchDispatchMode):
    """Operators that read a value, or whose result's shape depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten._unique2,
            torch.ops.aten.equal,
        ):
            raise HostReadError(f"{function} in what a GPU would run")
        indexing = function.overloadpacket in (
            torch.ops.aten.index,
            torch.ops.aten.index_put,
            torch.ops.aten.index_put_,
        )
        if indexing and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            raise HostReadError(f"{function} by a mask in what a GPU would run")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Ops run their definitions, as on every device but the CPU."""
    ops.choose("definition")
    monkeypatch.setattr(Operator, "__call__", lambda self, *arguments: self.definition(*arguments))
    for module in (packed, quantized):
        monkeypatch.setattr(module, "check_ids", packed.assert_ids)
    yield
    ops.choose("native" if native.built_isas() else "definition")


NAMES = [name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM")]
CONFIGS = [
    *((family, FEW_EXPERTS.get(family, {})) for family in NAMES),
    ("mistral", {"sliding_window": 3}),
    ("ministral", {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}),
    (
        "ministral3",
        {"rope_parameters": {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0}},
    ),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0]},
            "partial_rotary_factor": 0.25,
            "original_max_position_embeddings": 8,
        },
    ),
    ("mixtral", {"num_local_experts": 3}),
    ("qwen3moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}),
    ("glm4moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 8}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
]


def test_the_modes_detect_host_reads():
    x = torch.tensor([1, 0])
    reads = [
        x.tolist,
        x.max().item,
        lambda: int(x[0]),
        lambda: bool(x[0]),
        lambda: x[x > 0],
        x.unique,
        lambda: torch.tensor(1.0),
    ]
    for read in reads:
        with pytest.raises(HostReadError), NoPythonReads(), NoDispatchedReads():
            read()


@pytest.mark.strength(1)
@pytest.mark.parametrize(("family", "overrides"), CONFIGS, ids=str)
@pytest.mark.parametrize("weights", ["float", "int8", "int4", "iq4_nl"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_a_step_of_every_family_reads_nothing_on_the_host(as_on_a_gpu, family, overrides, weights, tokens, paged):
    model = tiny_model(family, seed=3, **overrides)
    model = model if weights == "float" else quantize(model, weights)
    recurrent = bool(model.new_blocks(1).plan.states)
    cache = model.new_cache(2, 16)
    if paged:
        blocks, table = model.new_blocks(4), torch.tensor([[3, 0], [1, -1]], dtype=torch.int32)
        more = [] if blocks.windows is None else [table]
        more += [torch.arange(2, dtype=torch.int32)] if recurrent else []
        cache = blocks.view(table, *more)
    ids, offsets = (
        torch.tensor([[5] * tokens, [6] * tokens], dtype=torch.int32),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    if recurrent:
        offsets[1] = 0  # a recurrent layer would not find the state of what this cache does not hold
    at = torch.full((2, 1), tokens - 1)
    with torch.no_grad():
        model(ids, offsets, cache, at)  # uploads constants, as before a capture
        with NoPythonReads(), NoDispatchedReads():
            logits, cache = model(ids, offsets, cache, at)
    assert logits.isfinite().all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_definition_over_all_rows_equals_each_row_alone(tokens, softcap, window, with_sinks):
    """Whatever lies past the rows' ends. Both sum S <= 24 products in float32, in orders of their own: each is within
    S / 2 * 2^-23 of the exact sum of values below 4, so 24 * 2^-23 * 4 apart at the most; a softmax sums to 1."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(3, 4, tokens, 8, generator=generator)
    keys, values = (torch.randn(3, 2, 24, 8, generator=generator) for _ in range(2))
    offsets = torch.tensor([0, 5, 24 - tokens], dtype=torch.int32)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    arguments = (sinks, 8**-0.5, window or 0, softcap, None, 8)
    for row, offset in enumerate(offsets.tolist()):
        keys[row, :, offset + tokens :], values[row, :, offset + tokens :] = float("nan"), float("inf")
    whole = ops.attention._cached_definition(q, keys, values, offsets, *arguments)
    by_row = ops.attention._cached_by_row(q, keys, values, offsets, *arguments)
    torch.testing.assert_close(whole, by_row, rtol=0, atol=24 * 2**-23 * 4)
    assert whole.transpose(1, 2).is_contiguous()
    assert by_row.transpose(1, 2).is_contiguous()
