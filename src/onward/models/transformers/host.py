"""A causal language model of transformers as a `Model`: its own forward pass with Onward's weights, attention and KV
cache."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from onward.cache import CachePlan, KVCache, KVPool, LayerShape
from onward.errors import OnwardError, RequestError, one_line
from onward.models.model import Model
from onward.models.module import CausalLM, ModuleForward
from onward.models.transformers.forward import TransformersForward, TransformersParams, attend, mask
from onward.models.transformers.linears import (
    NAME,
    CacheSurvey,
    TransformersEmbedding,
    TransformersHead,
    UnsupportedModuleError,
    library,
    replace_linears,
    run_experts,
)
from onward.ops.kv_format import KVFormat

Prepare = Callable[[TransformersParams], TransformersParams]

# The tolerance, relative to the largest logit, between a hosted module and the original. A lost mask, scale or cap
# changes logits by more, rounding by less.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TOKENS_COMPARED = 4


def host(
    module: Any, prepare: Prepare = lambda params: params, max_seq_len: int | None = None,
    cache_format: KVFormat | None = None,
) -> Model:  # fmt: skip
    """Create a Model from a transformers module.

    If its attention can run over Onward's KV cache, its forward may be compiled, and rows may join and leave a batch.
    If not, it keeps its own attention and runs eagerly, and `Model.why_eager` says why.

    Args:
        module: a causal language model with its weights. It is modified: its linear layers are replaced.
        prepare: packs or quantizes the weights.
        max_seq_len: the maximum number of positions; the config's max_position_embeddings by default.
        cache_format: of keys and values over Onward's attention; floats of their dtype by default.

    Raises:
        RequestError: the module cannot be decoded (`Model.from_module` says why), or is not causal.
    """
    module.eval().requires_grad_(False)
    plain = Model.from_module(module, max_seq_len=max_seq_len)
    tokens = torch.arange(_TOKENS_COMPARED, dtype=torch.int32, device=plain.device).unsqueeze(0) % plain.vocab_size
    expected = _logits(plain, tokens)
    if _difference(_logits(plain, tokens[:, :2]), expected[:, :2]):
        raise RequestError(f"{type(module).__name__} cannot be decoded: its logits depend on later tokens")
    own = [(x, x._attn_implementation, getattr(x, "_experts_implementation", None)) for x in _configs(module)]
    parts = replace_linears(module)
    outer = {name for name, part in parts.items() if isinstance(part, TransformersHead | TransformersEmbedding)}
    assert isinstance(plain.forward, ModuleForward)
    assert isinstance(plain.forward.call, CausalLM)
    forward = TransformersForward(module, parts, outer, plain.forward.call.first_position, plain.max_seq_len)
    model, why = plain, ""
    try:
        plan = _take_over(module, forward, plain.device, cache_format).up_to(plain.max_seq_len)
        model = replace(
            plain,
            forward=forward,
            params=forward.params(),
            new_cache=partial(KVCache.of, plan),
            new_blocks=partial(KVPool, plan),
            compiles=True,
        )
        why = _difference(_logits(model, tokens), expected)
    except Exception as error:
        why = one_line(error) if isinstance(error, OnwardError) else f"{type(error).__name__}: {one_line(error)}"
    params = prepare(forward.params())
    forward.bind(params)
    if not why:
        return replace(model, params=params)
    for config, attention_name, experts_name in own:
        config._attn_implementation, config._experts_implementation = attention_name, experts_name
    return replace(plain, why_eager=f"transformers' own attention runs, since {why}")


def _take_over(
    module: Any, forward: TransformersForward, device: torch.device, cache_format: KVFormat | None
) -> CachePlan:
    """Install Onward's attention and experts in the module; what its layers cache."""
    _register()
    _silence(module)
    for config in _configs(module):
        config._attn_implementation = config._experts_implementation = NAME
    found = forward.survey(device)
    if len(found.dtypes) != 1:
        raise UnsupportedModuleError(f"its layers cache {len(found.dtypes)} dtypes")
    return CachePlan(_shapes(found), found.dtypes.pop(), device, format=cache_format)


@cache
def _register() -> None:
    """Register Onward's attention, masks and experts in transformers."""
    library("modeling_utils").ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    library("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    library("integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def _shapes(found: CacheSurvey) -> tuple[LayerShape, ...]:
    """What each layer caches, with its window. If some layer's keys are attended both with and without a window, the
    module has no windows, since attention does not say which one applies."""
    windows = {layer: found.windows_of.get(layer, {None}) for layer in sorted(found.cached)}
    if any(None in seen and len(seen) > 1 for seen in windows.values()):
        windows = {layer: {None} for layer in windows}
    widest = {layer: max((w for w in seen if w is not None), default=None) for layer, seen in windows.items()}
    return tuple(found.cached[layer]._replace(window=window) for layer, window in widest.items())


def _silence(module: Any) -> None:
    """Disable a warning about padding, for which some modules read the ids; a trace has no values to read."""
    for part in module.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = lambda *_, **__: None


def _configs(module: Any) -> Iterable[Any]:
    """The distinct configs of the module and its submodules."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    return {id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values()


def _logits(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    return model(tokens, offsets, model.new_cache(tokens.shape[0], tokens.shape[1]))[0]


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> str:
    """A description of the difference between logits over Onward's cache and the module's own; "" if there is none."""
    largest = float(expected.abs().max())
    difference = float((logits.float() - expected.float()).abs().max())
    if difference <= _TOLERANCE[expected.dtype] * largest:
        return ""
    return f"over Onward's caches its logits are off by {difference:.2g} of {largest:.2g}"
