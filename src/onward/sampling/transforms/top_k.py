"""Top-k: the k most likely ids."""

from dataclasses import dataclass

from torch import Tensor

from onward.sampling.transforms.transform import Columns, Draws, Filter
from onward.util.options import SAMPLING, option


@dataclass(frozen=True, kw_only=True)
class TopK(Filter):
    """top_k: keep the k most likely ids; 0 keeps all. Ids that tie with the k-th are kept too."""

    top_k: int = option(0, low=0, help="Sample from the N most likely tokens; 0: all.", group=SAMPLING)

    def is_on(self) -> bool:
        return self.top_k > 0

    @staticmethod
    def filter(scores: Tensor, options: Columns, draws: Draws) -> Tensor:
        return apply_top_k(scores, options["top_k"])


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep ids whose logit is at least the row's k-th largest; top_k int64 [B], 0 keeps all."""
    vocab = logits.shape[-1]
    widest = min(int(top_k.max()), vocab)
    if widest == 0:
        return logits
    largest = logits.topk(widest, dim=-1).values
    kth = largest.gather(1, (top_k.clamp(1, widest) - 1).unsqueeze(1))
    off = (top_k == 0).unsqueeze(1)
    return logits.masked_fill((logits < kth) & ~off, float("-inf"))
