"""The logit lens: the prediction after each layer (nostalgebraist, "interpreting GPT: the logit lens", 2020).

Shapes: L taps, T positions, K most likely ids, D values of a position, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.models import Model
from onward.models.architecture import head_of
from onward.models.blocks import Decoder
from onward.sampling.logprobs import logprobs

# The logits that are computed at once.
_MAX_LOGITS = 2**19
# The width of a table, and of its cells.
_WIDTH, _CELL = 100, 12
_VISIBLE = str.maketrans({" ": "·", "\n": "↵", "\t": "→", "\r": "↵"})


@dataclass(frozen=True, eq=False)
class Lens:
    """The prediction after each layer: the final norm and the head, applied to the values at its tap. `print` shows the
    likeliest token for each layer and position, the model's own prediction on top.

    taps: "embedding", then the layers; the last layer's prediction is the model's own.
    token_ids: of the text.
    top_ids: int64 [L, T, K], the most likely first. top_logprobs: float32 [L, T, K], theirs.
    next_logprobs: float32 [L, T - 1], those of the text's next ids.
    texts: of the ids in the table; empty without a tokenizer.
    """

    taps: Sequence[str]
    token_ids: Sequence[int]
    top_ids: Tensor
    top_logprobs: Tensor
    next_logprobs: Tensor
    texts: Mapping[int, str]

    def __repr__(self) -> str:
        return f"Lens({len(self.taps)} taps, {len(self.token_ids)} positions)"

    def __str__(self) -> str:
        """A table of the likeliest tokens, a column for each position: of the last ones, as many as fit."""
        rows = [("", self.token_ids), *reversed(list(zip(self.taps, self.top_ids[..., 0].tolist(), strict=True)))]
        columns = [[self._cell(ids[at]) for _, ids in rows] for at in range(len(self.token_ids))]
        widths = [max(map(len, column)) + 2 for column in columns]
        first, left = max(len(name) for name, _ in rows) + 2, len(columns)
        while left and first + sum(widths[left - 1 :]) <= _WIDTH:
            left -= 1
        shown = list(zip(columns, widths, strict=True))[min(left, len(columns) - 1) :]
        lines = [
            f"{name:<{first}}" + "".join(f"{column[number]:<{width}}" for column, width in shown)
            for number, (name, _) in enumerate(rows)
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _cell(self, token: int) -> str:
        text = self.texts.get(token, str(token)).translate(_VISIBLE)
        return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def checked_decoder(model: Model) -> tuple[Decoder, Any]:
    """The decoder with the model's norm and head, and its params. Raises `RequestError` if it has none, or no head."""
    model.check_head()
    architecture, params = head_of(model)
    if not isinstance(architecture, Decoder):
        raise RequestError("a lens needs a model of a built-in family, whose norm and head can be computed separately")
    return architecture, params


@torch.no_grad()
def predictions(
    decoder: Decoder, params: Any, device: torch.device, hidden: Tensor, following: Sequence[int], top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of hidden states float [T, D] before the final norm: int64 [T, K], float32 [T, K] and float32 [T - 1], as in
    `Lens`. params: the decoder's, or those of one row with an adapter. device: theirs. following: the next ids."""
    rows = max(1, _MAX_LOGITS // decoder.vocab_size)
    chosen = torch.tensor([*following, 0])
    parts = []
    for begin in range(0, len(hidden), rows):
        normed = decoder.normed(params, hidden[begin : begin + rows].unsqueeze(0).to(device), None)
        logits = decoder.logits(params, normed)[0].cpu()
        parts.append(logprobs(logits, chosen[begin : begin + rows], top))
    of_next, ids, likeliest = (torch.cat(each) for each in zip(*parts, strict=True))
    return ids, likeliest, of_next[:-1]
