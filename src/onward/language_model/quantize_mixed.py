"""Quantize for small errors on text: the model's own, so that no data set is needed (arXiv 2410.17170, 2305.17888).

Layer after layer, the text runs through what is quantized so far, and each `Linear` is rounded with feedback
(`onward.quantization.gptq`) for the inputs that it gets. A budget of bits gives int8 to the matrices that cost most
in iq4_nl: the KL divergence of the model with that matrix alone in iq4_nl. That costs add up is an approximation (arXiv
2411.17525).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.utils import _pytree as pytree

from onward.checkpoint.quantized_folder import parameter_name
from onward.errors import RequestError
from onward.language_model.language_model import LanguageModel
from onward.language_model.options import GenerateOptions
from onward.models import Embedding, ExpertLinear, Linear, Model, map_marked
from onward.ops.linear import weight_shape
from onward.ops.quantized_layout import data_shape
from onward.quantization.params import FormatChoice, ParamsQuantizer
from onward.quantization.watch import LayerwiseRunner, decoder_of
from onward.util.checks import check_whole


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that a model is quantized for.

    texts: how many the model writes. length: tokens of each, its first given; less where the context is shorter.
    seed: of what is drawn. ids: texts of your own, ids [count, length] of one length, in place of the model's.
    """

    texts: int = 32
    length: int = 256
    seed: int = 0
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        check_whole("texts", self.texts, low=1)
        check_whole("length", self.length, low=2)
        check_whole("seed", self.seed, low=0)
        ids = self.ids
        if ids is not None and (ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or ids.numel() == 0):
            raise RequestError(
                f"the ids to calibrate with are int32 or int64 [count, length]; got {ids.dtype} {list(ids.shape)}"
            )


def calibration_ids(lm: LanguageModel, calibration: Calibration) -> Tensor:
    """The texts, int32 [count, length], drawn from the model's own distribution, whatever its defaults are. A text
    begins with the BOS id, or where the tokenizer has none with an id that ends texts, and goes on past its end."""
    if (given := calibration.ids) is not None:
        if int(given.min()) < 0 or int(given.max()) >= lm.model.vocab_size:
            raise RequestError(
                f"the ids to calibrate with lie in 0 … {lm.model.vocab_size - 1}; got {given.min()} … {given.max()}"
            )
        return given.to(device=lm.model.device, dtype=torch.int32)
    length = min(calibration.length, lm.model.max_seq_len or calibration.length)
    first = _first_id(lm)
    writer = LanguageModel(lm.model, defaults=GenerateOptions(), compile=lm._model_run.compile, prefix_memory=0)
    completions = writer.generate(
        [[first]] * calibration.texts,
        max_new_tokens=length - 1,
        temperature=1.0,
        per_prompt=[{"seed": calibration.seed + index} for index in range(calibration.texts)],
    )
    ids = [[first, *completion.token_ids] for completion in completions]
    return torch.tensor(ids, dtype=torch.int32, device=lm.model.device)


def _first_id(lm: LanguageModel) -> int:
    bos = None if lm.tokenizer is None else lm.tokenizer.bos_id
    ends = sorted(lm.defaults.eos or ())
    if bos is None and not ends:
        raise RequestError("this model has neither a BOS nor an EOS id for its texts to begin with: give ids=")
    return ends[0] if bos is None else bos


@torch.no_grad()
def calibrated_params(model: Model, ids: Tensor, quantizer: ParamsQuantizer) -> Any:
    """The params of a model, quantized for texts int32 [count, length]. A tied embedding is rounded for the inputs that
    it gets as the head of the unquantized model (benchmarks/LOG.md). Embeddings of their own are rounded to nearest,
    and so are the experts that get fewer tokens than they have inputs."""
    decoder, params = decoder_of(model), model.params
    of_table = {}
    if decoder.tie_word_embeddings:
        stream = LayerwiseRunner(model, ids, params)
        stream.advance_from(0, params.layers)
        of_table = stream.hessian_of_head(params)
    embed_tokens = quantizer.quantized(params.embed_tokens, (pytree.GetAttrKey("embed_tokens"),), of_table)
    given = quantizer.quantized(params.layer_embeddings, (pytree.GetAttrKey("layer_embeddings"),))
    stream = LayerwiseRunner(model, ids, params._replace(embed_tokens=embed_tokens, layer_embeddings=given))
    layers = []
    for index, layer in enumerate(params.layers):
        path: tuple[Any, ...] = (pytree.GetAttrKey("layers"), pytree.SequenceKey(index))
        layers.append(quantizer.quantized(layer, path, stream.hessians(index, layer)))
        stream.advance(index, layers[-1])
    of_head = {} if decoder.tie_word_embeddings else stream.hessian_of_head(params)
    lm_head = quantizer.quantized(params.lm_head, (pytree.GetAttrKey("lm_head"),), of_head)
    return params._replace(embed_tokens=embed_tokens, layers=tuple(layers), lm_head=lm_head, layer_embeddings=given)


_NARROW, _WIDE = "iq4_nl", "int8"  # the formats chosen from
_TABLE, _HEAD = (pytree.GetAttrKey("embed_tokens"),), (pytree.GetAttrKey("lm_head"),)
# The room of a budget is divided into so many parts.
_STEPS = 4096
# The texts that are measured: the first of those that are calibrated with, as far as these.
MEASURED = Calibration(texts=4, length=128)


@dataclass(frozen=True)
class _Unit:
    """Matrices of one format: one of a layer, a tied pair, or those of a layer's experts. paths: of the marked parts,
    in the whole params. layer: None outside the layers."""

    paths: tuple[tuple[Any, ...], ...]
    layer: int | None
    shapes: tuple[tuple[int, int], ...]

    def nbytes(self, format: str) -> int:
        sizes = (data_shape(format, shape) for shape in self.shapes)
        return sum(blocks * of_block for blocks, of_block in sizes)

    @property
    def weights(self) -> int:
        return sum(rows * inputs for rows, inputs in self.shapes)


@torch.no_grad()
def choose_formats(
    model: Model, ids: Tensor, bits: float, show_fraction: Callable[[float], None] = lambda fraction: None
) -> dict[str, FormatChoice]:
    """The format of each matrix, by the name of its part, and what it costs in iq4_nl. ids: texts to measure with,
    int32 [count, length]. bits: the most bits a weight, on average over all matrices; too few raise `RequestError`."""
    units = _units(model)
    weights = sum(unit.weights for unit in units)
    narrow = sum(unit.nbytes(_NARROW) for unit in units)
    added = [unit.nbytes(_WIDE) - unit.nbytes(_NARROW) for unit in units]
    # Blocks are filled up, so a matrix of 32 inputs or fewer takes no more bytes in int8.
    least = narrow + sum(min(size, 0) for size in added)
    room = math.floor(bits * weights / 8 + 1e-6) - narrow
    if room < least - narrow:
        raise RequestError(
            f"matrices take {8 * least / weights:.4g} bits a weight of this model at least; got a budget of {bits:g}"
        )
    costs = []
    for cost in _costs(model, ids[: MEASURED.texts, : MEASURED.length], units):
        costs.append(cost)
        show_fraction(len(costs) / len(units))
    chosen = _dearest(costs, added, room)
    return {
        f"{parameter_name(path)}.weight": FormatChoice(_WIDE if index in chosen else _NARROW, costs[index])
        for index, unit in enumerate(units)
        for path in unit.paths
    }


def _dearest(costs: Sequence[float], sizes: Sequence[int], room: int) -> set[int]:
    """The things that fit and cost most together: a knapsack, by dynamic programming. Sizes of 0 or less are always
    chosen."""
    if sum(sizes) <= room:
        return set(range(len(sizes)))
    chosen = {index for index, size in enumerate(sizes) if size <= 0}
    room -= sum(sizes[index] for index in chosen)
    step = max(1, math.ceil(room / _STEPS))
    needs = [math.ceil(max(size, 0) / step) for size in sizes]
    left = room // step
    best = torch.zeros(left + 1, dtype=torch.float64)  # the most cost in so much room
    taken = torch.zeros(len(sizes), left + 1, dtype=torch.bool)
    for index, (cost, need) in enumerate(zip(costs, needs, strict=True)):
        if need <= left:
            with_it = best[: left + 1 - need] + cost
            taken[index, need:] = with_it > best[need:]
            best[need:] = torch.maximum(with_it, best[need:].clone())
    for index in reversed(range(len(sizes))):
        if taken[index, left]:
            chosen.add(index)
            left -= needs[index]
    return chosen


def _units(model: Model) -> list[_Unit]:
    tied = decoder_of(model).tie_word_embeddings
    found: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Any]]] = {}

    def collect(path: tuple[Any, ...], part: Any) -> Any:
        if isinstance(part, ExpertLinear):
            found.setdefault(path[:-1], []).append((path, part))
        elif isinstance(part, Linear | Embedding):
            found.setdefault(_TABLE if tied and path == _HEAD else path, []).append((path, part))
        return part

    map_marked(collect, model.params)
    return [_unit(key, parts) for key, parts in found.items()]


def _unit(key: tuple[Any, ...], parts: Sequence[tuple[tuple[Any, ...], Any]]) -> _Unit:
    in_layers = key[0] == pytree.GetAttrKey("layers")
    shapes: list[tuple[int, int]] = []
    for _, part in parts if in_layers else parts[:1]:  # a tied pair is one matrix
        matrices = part.matrices if isinstance(part, ExpertLinear) else (part.weight,)
        shapes += [weight_shape(matrix) for matrix in matrices]
    return _Unit(tuple(path for path, _ in parts), key[1].idx if in_layers else None, tuple(shapes))


def _costs(model: Model, ids: Tensor, units: Sequence[_Unit]) -> Iterator[float]:
    """The KL divergence of each unit in iq4_nl, in nats a token. Units come in the order of their layers."""
    params = model.params
    behind = LayerwiseRunner(model, ids, params)
    behind.advance_from(0, params.layers)
    exact = list(behind.logprobs(params))
    before, reached = LayerwiseRunner(model, ids, params), 0
    for unit in units:
        small = _in_4_bits(params, unit)
        if unit.layer is not None:
            before.advance_from(reached, params.layers[: unit.layer])
            reached = unit.layer
            stream = before.copy()
            stream.advance_from(reached, small.layers)
        elif unit.paths == (_HEAD,):
            stream = behind
        else:
            stream = LayerwiseRunner(model, ids, small)
            stream.advance_from(0, small.layers)
        pairs = zip(stream.logprobs(small), exact, strict=True)
        yield sum(float(kl_div(got, want, reduction="sum", log_target=True)) for got, want in pairs) / ids.numel()


def _in_4_bits(params: Any, unit: _Unit) -> Any:
    """The params with one unit in iq4_nl."""
    quantizer = ParamsQuantizer(params, _NARROW)

    def convert(path: tuple[Any, ...], part: Any) -> Any:
        return quantizer.quantized(part, path) if path in unit.paths else part

    return map_marked(convert, params)
