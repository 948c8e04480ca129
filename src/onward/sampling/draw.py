"""Temperature, top-k, top-p, min-p and the draw: the definition, and the kernel that returns the same ids."""

from array import array
from typing import Self

import torch
from torch import Tensor

from onward import ops
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES
from onward.ops.operator import usable_library
from onward.ops.token_mask import onward_argmax
from onward.sampling.noise import by_rows, gumbel_noise
from onward.sampling.transforms.min_p import MinP, apply_min_p, lowest_score
from onward.sampling.transforms.temperature import Temperature, apply_temperature
from onward.sampling.transforms.top_k import TopK, apply_top_k
from onward.sampling.transforms.top_p import TopP, apply_top_p


# A value of each row: temperature, top_k (int64), top_p, min_score, seeds (int64), positions (int64); out: int64.
@kernel
def onward_sample(
    rows: Int, columns: Int, x: Pointer, dtype: Code, stride: Int, temperature: Pointer, top_k: Pointer, top_p: Pointer,
    min_score: Pointer, seeds: Pointer, positions: Pointer, out: Pointer,
) -> Code: ...  # fmt: skip


def greedy(logits: Tensor) -> Tensor:
    """The most likely id of each row: float [..., V] -> int64 [...]; ties go to the lowest id."""
    return ops.argmax(logits)


class Greedy:
    """`greedy` with the interface of `GumbelSampler`, also at the end of programs (`onward.program.SamplingKernel`)."""

    kernel, most_ids = onward_argmax, 2**62

    @property
    def pick(self) -> Self:
        return self

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        return greedy(logits)

    def operands(self, offsets: Tensor) -> tuple[Tensor, ...]:
        return ()


GREEDY = Greedy()


class GumbelSampler:
    """Rows' temperatures, filters and seeds, tensors [B]; logits float [B, V] of any float dtype -> ids int64 [B].

    filters: the transforms that it applies, in order.
    keys int64, the 64 bits of the seeds; temperature float32, 0 for greedy; top_k int64; top_p, min_p float32.
    """

    filters = (Temperature, TopK, TopP, MinP)
    kernel, most_ids = onward_sample, 2**22  # the kernel sums the probabilities of this many ids in 64 bits

    def __init__(self, keys: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
        self.keys, self.temperature, self.top_k, self.top_p, self.min_p = keys, temperature, top_k, top_p, min_p
        self.min_score = lowest_score(min_p)
        # Filters that no row uses are skipped; read once, since reading a tensor's value waits for a GPU.
        self._any_top_k = bool((top_k > 0).any())
        self._any_top_p = bool((top_p < 1).any())
        self._any_min_p = bool((min_p > 0).any())

    def take(self, rows: Tensor) -> Self:
        """The sampler of these rows, int64 [N], with repetitions."""
        return type(self)(*(column[rows] for column in (self.keys, *self._options)))

    def without_filters(self) -> Self:
        """The sampler for scores after temperature and filters."""
        ones = torch.ones_like(self.top_p)
        return type(self)(
            self.keys, (self.temperature > 0).to(torch.float32), torch.zeros_like(self.top_k), ones, 0 * ones
        )

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        library = usable_library()
        plain = logits.device.type == "cpu" and logits.dtype in DTYPES and 0 < logits.shape[-1] <= self.most_ids
        if library is None or not plain:
            return self.definition(logits, positions)
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        operands, out = self._operands(positions), torch.empty(logits.shape[0], dtype=torch.int64)
        status = library.onward_sample(
            *logits.shape, logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0),
            *(operand.data_ptr() for operand in operands), out.data_ptr(),
        )  # fmt: skip
        library.check(status, onward_sample)
        return out

    def definition(self, logits: Tensor, positions: Tensor) -> Tensor:
        """argmax of scores + Gumbel noise; of the logits for greedy rows and if the largest logit is not finite."""
        return by_rows(self._draw, logits, positions, self.keys, *self._options)

    def _draw(self, logits: Tensor, positions: Tensor, keys: Tensor, *options: Tensor) -> Tensor:
        noise = gumbel_noise(keys, positions, logits.shape[-1])
        sampled = greedy(self._scores(logits, *options).to(torch.float64) + noise)
        is_greedy = (options[0] == 0) | ~logits.amax(-1).isfinite()
        return torch.where(is_greedy, greedy(logits), sampled)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits after temperature and filters, float32 [B, V]; those of a greedy row as for a temperature of 1."""
        return by_rows(self._scores, logits, *self._options)

    @property
    def _options(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p

    def _scores(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        # In the model's own dtype probabilities would be lost to rounding.
        scores = apply_temperature(logits.to(torch.float32), torch.where(temperature == 0, 1.0, temperature))
        if self._any_top_k:
            scores = apply_top_k(scores, top_k)
        if self._any_top_p:
            scores = apply_top_p(scores, top_p)
        if self._any_min_p:
            scores = apply_min_p(scores, min_p)
        return scores

    def operands(self, offsets: Tensor) -> tuple[Tensor, ...]:
        """See `onward.program.SamplingKernel`."""
        positions = torch.frombuffer(array("q", [offset + 1 for offset in offsets.tolist()]), dtype=torch.int64)
        return self._operands(positions)

    def _operands(self, positions: Tensor) -> tuple[Tensor, ...]:
        """The kernel's arguments between the logits and the ids: a value for each row."""
        at = positions.to(torch.int64).contiguous()
        return self.temperature, self.top_k, self.top_p, self.min_score, self.keys, at
