"""Quantize for small errors on text: the model's own, so that no data set is needed (arXiv 2410.17170, 2305.17888).

Layer after layer, the text runs through what is quantized so far. Each `Linear` is rounded with feedback
(`onward.quantization.feedback`) for the inputs that it gets there.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.checks import check_whole
from onward.errors import RequestError
from onward.language_model import LanguageModel
from onward.models import Model
from onward.quantization.params import ParamsQuantizer
from onward.quantization.stream import Stream, decoder_of
from onward.requests import GenerateOptions


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
    """The texts, int32 [count, length]: each is drawn from the model's own distribution, whatever its defaults are.

    A text begins with the BOS id, or where the tokenizer has none with an id that ends texts, and goes on past its end.
    """
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
    """The params of a model, quantized for texts int32 [count, length].

    A tied embedding is rounded for the inputs that it gets as the head of the unquantized model: it errs more as a
    table, but there it costs a tenth of what it costs as the head (benchmarks/LOG.md). Embeddings of their own
    are rounded to nearest, and so are the experts that get fewer tokens than they have inputs.

    Raises:
        RequestError: the model is of no built-in family.
    """
    decoder, params = decoder_of(model), model.params
    of_table = {}
    if decoder.tie_word_embeddings:
        stream = Stream(model, ids, params)
        stream.advance_from(0, params.layers)
        of_table = stream.hessian_of_head(params)
    embed_tokens = quantizer.quantized(params.embed_tokens, (pytree.GetAttrKey("embed_tokens"),), of_table)
    given = quantizer.quantized(params.layer_embeddings, (pytree.GetAttrKey("layer_embeddings"),))
    stream = Stream(model, ids, params._replace(embed_tokens=embed_tokens, layer_embeddings=given))
    layers = []
    for index, layer in enumerate(params.layers):
        path: tuple[Any, ...] = (pytree.GetAttrKey("layers"), pytree.SequenceKey(index))
        layers.append(quantizer.quantized(layer, path, stream.hessians(index, layer)))
        stream.advance(index, layers[-1])
    of_head = {} if decoder.tie_word_embeddings else stream.hessian_of_head(params)
    lm_head = quantizer.quantized(params.lm_head, (pytree.GetAttrKey("lm_head"),), of_head)
    return params._replace(embed_tokens=embed_tokens, layers=tuple(layers), lm_head=lm_head, layer_embeddings=given)
