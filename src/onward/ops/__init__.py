"""The operations that a transformer spends its time in, one file per op.

An op has a readable definition in plain torch and usually a native kernel that agrees with it. It checks shapes and
dtypes and rejects unknown options. It works eagerly and under `torch.compile(fullgraph=True)`, on the CPU and on CUDA.
CUDA runs the definition; on the CPU kernels run, also under autograd. An op without a gradient raises. `choice()`
returns the form that runs on the CPU; `choose()` and the variables ONWARD_OPS and ONWARD_ISA set it.
"""

from onward.ops.activation import add, geglu, sigmoid_gate, swiglu
from onward.ops.attention import cached_attention, scaled_dot_product_attention
from onward.ops.expert_weights import ExpertWeights, NativeExperts, QuantizedExperts, pack_experts
from onward.ops.experts import experts
from onward.ops.gated_delta import gated_delta
from onward.ops.kv_write import write_cache
from onward.ops.linear import Table, Weight, einsum, embedding, linear, pack
from onward.ops.linear_by_head import linear_by_head
from onward.ops.lora import lora
from onward.ops.norm import layer_norm, rms_norm
from onward.ops.operator import OpsBackend, choice, choose
from onward.ops.packed import NativeWeight
from onward.ops.pointwise import log, tanh
from onward.ops.quantized import QuantizedWeight
from onward.ops.rope import rope, rotary_angles, rotate
from onward.ops.router import top_experts
from onward.ops.short_conv import short_conv
from onward.ops.ssd import ssd
from onward.ops.token_mask import apply_token_mask, argmax

__all__ = [
    "ExpertWeights", "NativeExperts", "NativeWeight", "OpsBackend", "QuantizedExperts", "QuantizedWeight", "Table",
    "Weight", "add", "apply_token_mask", "argmax", "cached_attention", "choice", "choose", "einsum", "embedding",
    "experts", "gated_delta", "geglu", "layer_norm", "linear", "linear_by_head", "log", "lora", "pack", "pack_experts",
    "rms_norm", "rope", "rotary_angles", "rotate", "scaled_dot_product_attention", "short_conv", "sigmoid_gate", "ssd",
    "swiglu", "tanh", "top_experts", "write_cache",
]  # fmt: skip
