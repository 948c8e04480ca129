"""Quantization of models and checkpoints, also calibrated on text of the model's own (arXiv 2410.17170, 2305.17888).

With a calibration, the text runs through the quantized layers one by one, and each `Linear` is rounded with error
feedback for the inputs that it gets (`onward.quantization.gptq`). A limit of bits gives int8 to the matrices that cost
most in iq4_nl: the KL divergence of the model with only that matrix in iq4_nl. Adding up costs is an approximation
(arXiv 2411.17525).
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.utils import _pytree as pytree

from onward.checkpoint import CheckpointFolder, find_folder, page_releaser, read_weights
from onward.checkpoint.gguf import is_gguf
from onward.checkpoint.quantized_folder import read_manifest, write_quantized
from onward.errors import RequestError
from onward.language_model.generation_config import generation_defaults, within_vocabulary
from onward.language_model.language_model import LanguageModel
from onward.language_model.options import GenerateOptions
from onward.models import (
    Embedding,
    ExpertLinear,
    Linear,
    Model,
    build_model,
    map_marked,
    marked_parts,
    pack_params,
    parameter_name,
    read_config,
)
from onward.ops.linear import weight_shape
from onward.ops.quantized import rounded_formats
from onward.ops.quantized_layout import data_shape
from onward.quantization.params import FormatChoice, ParamsQuantizer, Progress, TensorReport
from onward.quantization.rounding import check_format
from onward.quantization.watch import LayerwiseRunner, decoder_of
from onward.util.checks import check_whole, is_finite
from onward.util.files import check_destination
from onward.util.option_names import checks_option_names


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that a model is quantized for.

    texts: the number of texts that the model generates. length: tokens of each, at most the context. seed: of the
    sampling. ids: your own texts instead, ids [count, length].
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
                f"the ids to calibrate with must be int32 or int64 [count, length]; got {ids.dtype} {list(ids.shape)}"
            )


def calibration_ids(lm: LanguageModel, calibration: Calibration) -> Tensor:
    """The texts, int32 [count, length], sampled from the model's own distribution regardless of its defaults. A text
    begins with the BOS id, or else with an id that ends texts, and does not stop at its end."""
    if (ids := calibration.ids) is not None:
        if int(ids.min()) < 0 or int(ids.max()) >= lm.model.vocab_size:
            raise RequestError(
                f"the ids to calibrate with must be in 0 … {lm.model.vocab_size - 1}; got {ids.min()} … {ids.max()}"
            )
        return ids.to(device=lm.model.device, dtype=torch.int32)
    length = min(calibration.length, lm.model.max_seq_len or calibration.length)
    bos, ends = None if lm.tokenizer is None else lm.tokenizer.bos_id, sorted(lm.defaults.eos or ())
    if bos is None and not ends:
        raise RequestError("this model has neither a BOS nor an EOS id for its texts to begin with: give ids=")
    first = ends[0] if bos is None else bos
    writer = LanguageModel(lm.model, defaults=GenerateOptions(), compile=lm._model_run.compile, prefix_memory=0)
    completions = writer.generate(
        [[first]] * calibration.texts,
        max_new_tokens=length - 1,
        temperature=1.0,
        per_prompt=[{"seed": calibration.seed + index} for index in range(calibration.texts)],
    )
    texts = [[first, *completion.token_ids] for completion in completions]
    return torch.tensor(texts, dtype=torch.int32, device=lm.model.device)


@torch.no_grad()
def calibrated_params(model: Model, ids: Tensor, quantizer: ParamsQuantizer) -> Any:
    """The params of a model, quantized for texts int32 [count, length]. A tied embedding is rounded for its inputs as
    the head of the unquantized model (benchmarks/LOG.md). Other embeddings are rounded to nearest, like experts that
    get fewer tokens than they have inputs."""
    decoder, params = decoder_of(model), model.params
    embedding_hessian = {}
    if decoder.tie_word_embeddings:
        stream = LayerwiseRunner(model, ids, params)
        stream.advance_from(0, params.layers)
        embedding_hessian = stream.hessian_of_head(params)
    embed_tokens = quantizer.quantized(params.embed_tokens, _EMBED_TOKENS, embedding_hessian)
    layer_embeddings = quantizer.quantized(params.layer_embeddings, (pytree.GetAttrKey("layer_embeddings"),))
    params = params._replace(embed_tokens=embed_tokens, layer_embeddings=layer_embeddings)
    stream = LayerwiseRunner(model, ids, params)
    layers = []
    for index, layer in enumerate(params.layers):
        path: tuple[Any, ...] = (pytree.GetAttrKey("layers"), pytree.SequenceKey(index))
        layers.append(quantizer.quantized(layer, path, stream.hessians(index, layer)))
        stream.advance(index, layers[-1])
    head_hessian = {} if decoder.tie_word_embeddings else stream.hessian_of_head(params)
    lm_head = quantizer.quantized(params.lm_head, _LM_HEAD, head_hessian)
    return params._replace(layers=tuple(layers), lm_head=lm_head)


_NARROW, _WIDE = "iq4_nl", "int8"
_EMBED_TOKENS, _LM_HEAD = (pytree.GetAttrKey("embed_tokens"),), (pytree.GetAttrKey("lm_head"),)
# The resolution of the budget in the knapsack.
_STEPS = 4096
# The maximum number and length of the texts for measuring costs.
MEASURED = Calibration(texts=4, length=128)


@dataclass(frozen=True)
class _Unit:
    """Matrices that share a format: one of a layer, a tied pair, or those of a layer's experts. paths: in the params.
    layer: None outside the layers."""

    paths: tuple[tuple[Any, ...], ...]
    layer: int | None
    shapes: tuple[tuple[int, int], ...]

    def nbytes(self, format: str) -> int:
        return sum(math.prod(data_shape(format, shape)) for shape in self.shapes)


@torch.no_grad()
def choose_formats(
    model: Model, ids: Tensor, bits: float, show_fraction: Callable[[float], None] = lambda fraction: None
) -> dict[str, FormatChoice]:
    """Choose the format of each matrix, by name, with its cost in iq4_nl. ids: texts for measuring, int32 [count,
    length]. bits: the maximum average of bits per weight; too few raise `RequestError`."""
    units = _units(model)
    weights = sum(rows * inputs for unit in units for rows, inputs in unit.shapes)
    narrow = sum(unit.nbytes(_NARROW) for unit in units)
    added = [unit.nbytes(_WIDE) - unit.nbytes(_NARROW) for unit in units]
    # Blocks are padded, so a matrix of 32 inputs or fewer takes no more bytes in int8.
    minimum = narrow + sum(min(size, 0) for size in added)
    room = math.floor(bits * weights / 8 + 1e-6) - narrow
    if room < minimum - narrow:
        raise RequestError(
            f"this model's matrices take at least {8 * minimum / weights:.4g} bits per weight; got a limit of {bits:g}"
        )
    costs = []
    for cost in _costs(model, ids[: MEASURED.texts, : MEASURED.length], units):
        costs.append(cost)
        show_fraction(len(costs) / len(units))
    chosen = _knapsack(costs, added, room)
    return {
        f"{parameter_name(path)}.weight": FormatChoice(_WIDE if index in chosen else _NARROW, costs[index])
        for index, unit in enumerate(units)
        for path in unit.paths
    }


def _knapsack(costs: Sequence[float], sizes: Sequence[int], room: int) -> set[int]:
    """The items that fit with the highest total cost, by dynamic programming. Sizes of 0 or less are always chosen."""
    if sum(sizes) <= room:
        return set(range(len(sizes)))
    chosen = {index for index, size in enumerate(sizes) if size <= 0}
    room -= sum(sizes[index] for index in chosen)
    step = max(1, math.ceil(room / _STEPS))
    needs = [math.ceil(max(size, 0) / step) for size in sizes]
    left = room // step
    best = torch.zeros(left + 1, dtype=torch.float64)  # the highest cost for each room
    chosen_at = torch.zeros(len(sizes), left + 1, dtype=torch.bool)
    for index, (cost, need) in enumerate(zip(costs, needs, strict=True)):
        if need <= left:
            with_it = best[: left + 1 - need] + cost
            chosen_at[index, need:] = with_it > best[need:]
            best[need:] = torch.maximum(with_it, best[need:].clone())
    for index in reversed(range(len(sizes))):
        if chosen_at[index, left]:
            chosen.add(index)
            left -= needs[index]
    return chosen


def _units(model: Model) -> list[_Unit]:
    tied = decoder_of(model).tie_word_embeddings
    groups: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Any]]] = {}

    def collect(path: tuple[Any, ...], part: Any) -> Any:
        if isinstance(part, ExpertLinear):
            groups.setdefault(path[:-1], []).append((path, part))
        elif isinstance(part, Linear | Embedding):
            groups.setdefault(_EMBED_TOKENS if tied and path == _LM_HEAD else path, []).append((path, part))
        return part

    map_marked(collect, model.params)
    units = []
    for key, parts in groups.items():
        in_layers = key[0] == pytree.GetAttrKey("layers")
        shapes: list[tuple[int, int]] = []
        for _, part in parts if in_layers else parts[:1]:  # a tied pair is one matrix
            matrices = part.matrices if isinstance(part, ExpertLinear) else (part.weight,)
            shapes += [weight_shape(matrix) for matrix in matrices]
        units.append(_Unit(tuple(path for path, _ in parts), key[1].idx if in_layers else None, tuple(shapes)))
    return units


def _costs(model: Model, ids: Tensor, units: Sequence[_Unit]) -> Iterator[float]:
    """The KL divergence of each unit in iq4_nl, in nats per token. Units are in the order of their layers."""
    params = model.params
    full = LayerwiseRunner(model, ids, params)
    full.advance_from(0, params.layers)
    exact = list(full.logprobs(params))
    before, next_layer = LayerwiseRunner(model, ids, params), 0
    for unit in units:
        small = _with_narrow(params, unit)
        if unit.layer is not None:
            before.advance_from(next_layer, params.layers[: unit.layer])
            next_layer = unit.layer
            stream = before.copy()
            stream.advance_from(next_layer, small.layers)
        elif unit.paths == (_LM_HEAD,):
            stream = full
        else:
            stream = LayerwiseRunner(model, ids, small)
            stream.advance_from(0, small.layers)
        pairs = zip(stream.logprobs(small), exact, strict=True)
        yield sum(float(kl_div(got, want, reduction="sum", log_target=True)) for got, want in pairs) / ids.numel()


def _with_narrow(params: Any, unit: _Unit) -> Any:
    quantizer = ParamsQuantizer(params, _NARROW)

    def convert(path: tuple[Any, ...], part: Any) -> Any:
        return quantizer.quantized(part, path) if path in unit.paths else part

    return map_marked(convert, params)


_ModelT = TypeVar("_ModelT", Model, LanguageModel)


@checks_option_names
def quantize(
    model: _ModelT, format: str | float, *, progress: Progress | None = None, calibrate: Calibration | None = None
) -> _ModelT:
    """Quantize all matrices of a model to 8 or 4 bits, including the embedding and the head.

    Norms, biases, short convolutions, the routers of experts and the matrices of latents (MLA's `kv_b_proj`) stay. The
    original model is not changed; drop it to free its weights. Its adapters are loaded again, from their folders; those
    that are trained are copied.

    Args:
        model: a `LanguageModel` or a `Model` of a built-in family, as loaded.
        format: "int8" (a scale for each row), "int4" or "iq4_nl" (a scale for each 32 inputs of a row, for whole
            numbers or for the table of IQ4_NL, which is more accurate); or a number, the maximum average of bits per
            weight: the matrices that cost most in iq4_nl then get int8.
        progress: called with each matrix's report, in order. A tied pair has one report.
        calibrate: round with error feedback on text, such as `onward.language_model.Calibration()`: the same size with
            a smaller error, but minutes of work (docs/calibration.md). By default matrices are rounded to nearest.

    Raises:
        RequestError: another format, a model of no built-in family, a quantized model, or weights that are not finite.
            For a forward of your own, call `ops.linear` with weights from `quantize_weight`.
    """
    check_quantizing(format, calibrate)
    lm = model if isinstance(model, LanguageModel) else LanguageModel(model)
    lm.model.refresh()
    small = lm.model.with_params(quantized_params(lm, format, calibrate, progress)[0])
    if not isinstance(model, LanguageModel):
        return small
    quantized = lm.with_model(small)
    quantized.add_adapters(lm.adapters.sources())
    return quantized


def check_quantizing(format: object, calibrate: object) -> None:
    if isinstance(format, str):
        check_format(format)
    elif not is_finite(format):
        raise RequestError(f"the format must be {rounded_formats()}, or a number of bits per weight; got {format!r}")
    if not isinstance(calibrate, Calibration | None):
        raise RequestError(f"calibrate must be an onward.language_model.Calibration or None; got {calibrate!r}")


def quantized_params(
    lm: LanguageModel,
    format: str | float,
    calibrate: Calibration | None,
    progress: Progress | None = None,
    show_fraction: Callable[[float], None] = lambda fraction: None,
    release: Callable[[], None] = lambda: None,
) -> tuple[Any, list[TensorReport]]:
    """The quantized params of a model, and a report for each matrix. show_fraction: called with the fraction of
    matrices measured and then quantized. The other arguments are those of `quantize` and `quantize_params`."""
    params = lm.model.params
    if not marked_parts(params):
        raise RequestError(
            f"quantize finds matrices by their types, Linear and Embedding; got a model whose params are "
            f"{type(params).__name__}, without any: make its weights with quantize_weight"
        )

    def report(done: TensorReport) -> None:
        if progress is not None:
            progress(done)
        show_fraction(quantizer.fraction)

    if calibrate is None and isinstance(format, str):
        quantizer = ParamsQuantizer(params, format, report, release)
        return quantizer.quantized(params), quantizer.reports
    ids = calibration_ids(lm, MEASURED if calibrate is None else calibrate)
    formats = format if isinstance(format, str) else choose_formats(lm.model, ids, format, show_fraction)
    quantizer = ParamsQuantizer(params, formats, report)
    if calibrate is None:
        return quantizer.quantized(params), quantizer.reports
    return calibrated_params(lm.model, ids, quantizer), quantizer.reports


def quantize_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: str | float,
    *,
    progress: Progress | None = None,
    show_downloads: bool = False,
    show_fraction: Callable[[float], None] = lambda fraction: None,
    calibrate: Calibration | None = None,
) -> list[TensorReport]:
    """Quantize a checkpoint into a folder that `onward.load` maps into memory, and return a report for each matrix.

    Args:
        source: a folder, a hub id or "demo", as for `onward.load`.
        destination: an absent or empty folder, written atomically.
        format, progress, calibrate: as for `onward.quantize`.
        show_downloads: show progress bars for downloads.
        show_fraction: called after each matrix with the fraction of quantized matrices, from 0 to 1; with a limit of
            bits, first with that of measured ones.
    """
    check_quantizing(format, calibrate)
    target = Path(destination).expanduser()
    check_destination(target)
    path = find_folder(source, progress=show_downloads)
    if is_gguf(path):
        raise RequestError(
            f"{path} is a GGUF file, and only folders can be quantized: run onward convert --to safetensors first, or "
            "pass quantize= to onward.load"
        )
    folder = CheckpointFolder(path)
    if (manifest := read_manifest(path, folder.config)) is not None:
        raise RequestError(f"{path} is already {manifest.format}: quantize the original checkpoint")
    config = read_config(folder.config)
    params = read_weights(path, config, dtype=None, device=torch.device("cpu"))
    release = page_releaser(path)
    if calibrate is None and isinstance(format, str):
        lm = LanguageModel(build_model(config, params))
    else:
        lm = _writer(folder, build_model(config, pack_params(params, release=release)))
    params, reports = quantized_params(lm, format, calibrate, progress, show_fraction, release)
    errors = {report.name: report.relative_rms_error for report in reports}
    write_quantized(folder, config, params, target, errors)
    return reports


def _writer(folder: CheckpointFolder, model: Model) -> LanguageModel:
    path, tokenizer = folder.path, folder.tokenizer
    defaults = generation_defaults(
        folder.generation_config, folder.eos, has_text=tokenizer is not None, folder=path, file=folder.generation_file
    )
    tokenizer = None if tokenizer is None else tokenizer.within(path, model.vocab_size)
    return LanguageModel(model, tokenizer, defaults=within_vocabulary(defaults, model.vocab_size, path))
