"""Picking a token: greedy, or Gumbel-max with noise that is an argument.

token = argmax over the allowed ids of logits / temperature + g, with Gumbel noise g keyed by (seed, position, token
id): a sample from the softmax (Gumbel 1954; Maddison et al., arXiv 1411.0030) that is independent of other rows, chunks
and drafts. docs/sampling.md explains the order of the transforms before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from onward.errors import NothingToDrawError, OptionError, RequestError
from onward.ops.operator import is_followed
from onward.sampling.constraint import ConstraintState, mask_logits, nothing_left
from onward.sampling.draw import GREEDY, Greedy, GumbelSampler, greedy
from onward.sampling.history import History
from onward.sampling.logprobs import DrawnLogprobs, logprobs, support
from onward.sampling.noise import by_rows
from onward.sampling.params import SamplingParams
from onward.sampling.transforms import Adjustment, Changes, Columns, Draws, Filter, LogitEntries, transforms_of
from onward.sampling.transforms.temperature import Temperature
from onward.sampling.transforms.transform import Kind, Transform, columns, is_neutral
from onward.util.text import brief_list


class AdjustmentPass:
    """The adjustments of logits before temperature and filters, in the order of docs/sampling.md.

    An option that no row uses costs nothing. needs_history: whether some row's options read its history.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device | None) -> None:
        self._device = torch.device("cpu") if device is None else device
        kinds = _kinds(rows, Adjustment)
        # The enabled adjustments of each row, and of all rows, in order.
        self._by_row = [[kind for kind in kinds if _is_on(kind, row)] for row in rows]
        self._rows = rows
        pairs = [(kind, row) for row, enabled in zip(rows, self._by_row, strict=True) for kind in enabled]
        self._kinds = [kind for kind in kinds if any(kind is one for one, _ in pairs)]
        self.any = bool(pairs)
        self.needs_history = any(kind.needs_history for kind in self._kinds)
        self._can_ban = any(kind.can_ban(row) for kind, row in pairs)
        named = [(max(ids, default=-1), name) for kind, row in pairs for name, ids in kind.named_ids(row).items()]
        self._max_id, self._names_it = max(named, default=(-1, ""))

    def __call__(
        self, logits: Tensor, histories: Sequence[History] | None, drafts: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Adjusted logits, float32 [B, K, V], from the arguments of `Sampler`."""
        batch, positions, vocab = logits.shape
        if self._max_id >= vocab:
            raise OptionError(self._names_it, f"names id {self._max_id}, but the vocabulary ends at {vocab - 1}")
        if histories is None:
            if self.needs_history:
                raise RequestError("penalties, DRY, n-grams, bad words and min_new_tokens need the rows' histories")
            histories = [History(()) for _ in self._rows]
        if len(histories) != batch:
            raise RequestError(f"the sampler was called with {batch} rows and {len(histories)} histories")
        changes: dict[type[Adjustment], list[tuple[int, Changes]]] = {kind: [] for kind in self._kinds}
        for place, row in _places(histories, drafts, positions):
            for kind in self._by_row[row]:
                ids, values = kind.changes(self._rows[row], histories[row])
                changes[kind].append((place, (ids.copy(), values)))  # a history's arrays change with it
        flat = adjusted = logits.reshape(batch * positions, vocab)
        for kind, places in changes.items():
            adjusted = kind.adjust(adjusted, LogitEntries.of(places, self._device))
        if self._can_ban:
            empty = (adjusted.amax(-1) == float("-inf")) & (flat.amax(-1) > float("-inf"))
            if bool(empty.any()):
                raise NothingToDrawError(
                    "logit_bias, bad_words, no_repeat_ngram_size and min_new_tokens together ban every id: nothing is "
                    "left to sample"
                )
        return adjusted.view(logits.shape)


def _places(
    histories: Sequence[History], drafts: Sequence[Sequence[int]] | None, positions: int
) -> Iterator[tuple[int, int]]:
    """(index, row) of every position of every row, with the row's history up to it. Each draft is walked once."""
    for row, history in enumerate(histories):
        draft = () if drafts is None else drafts[row]
        with history.assuming(()):
            for position in range(positions):
                yield row * positions + position, row
                if position < min(len(draft), positions - 1):
                    history.append(draft[position])


def fresh_seed() -> int:
    """A seed from torch's default generator, so that `torch.manual_seed` makes unseeded requests reproducible."""
    return int(torch.randint(0, 2**63 - 1, ()).item())


class Sampler:
    """Picks a token for each row with that row's own parameters.

    A pure function of its arguments: the same logits, positions and histories give the same tokens, alone or in any
    batch. `seeds` are the rows' seeds, drawn here for rows without one. `needs_history` is whether the rows' options
    read their histories.

    Raises:
        RequestError: bad words as text; a Sampler takes ids.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device | None = None) -> None:
        self.seeds = tuple(fresh_seed() if row.seed is None else row.seed for row in rows)
        self._rows = tuple(rows)
        self._device = device
        self._adjust = AdjustmentPass(self._rows, device)
        self.needs_history = self._adjust.needs_history
        signed = [seed - 2**64 if seed >= 2**63 else seed for seed in self.seeds]
        self._draw = GumbelSampler(
            keys=torch.tensor(signed, dtype=torch.int64, device=device),
            temperature=self._column("temperature"),
            top_k=torch.tensor([min(row.top_k, 2**62) for row in rows], dtype=torch.int64, device=device),
            top_p=self._column("top_p"),
            min_p=self._column("min_p"),
        )
        self._all_greedy = all(row.temperature == 0 for row in rows)
        self._filters = _filters(rows, device)

    def __repr__(self) -> str:
        return f"Sampler({brief_list(self._rows)})"

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        histories: Sequence[History] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        constraints: Sequence[ConstraintState | None] | None = None,
    ) -> Tensor:
        """The next token of each row; or, for a draft, the token after each of several positions of each row.

        Args:
            logits: float [B, V] or [B, K, V].
            positions: int [B] or [B, K], the absolute positions of the tokens to sample.
            histories: each of the B rows' ids up to its first position; None if `needs_history` is false.
            drafts: for K positions a row's drafted ids, K - 1 or fewer: position k is sampled as if the first k of
                them had been.
            constraints: the state of each of the B rows at its first position; None for a row without a constraint.

        Returns:
            int64 ids in the shape of `positions`; for a row of logits whose largest is NaN or infinite the id of that.

        Raises:
            RequestError: an option names an id outside the vocabulary, histories are missing, or bans and constraints
                leave nothing to sample.
        """
        logits, draw, rows = self._masked(self._adjusted(logits, histories, drafts), drafts, constraints)
        if self._all_greedy:
            return greedy(logits).view(positions.shape)
        flat = positions.reshape(-1)
        if self._filters:
            scores = self._scores(logits, flat, draw, rows)
            # Greedy rows see no filter.
            logits = torch.where((draw.temperature == 0).unsqueeze(1), logits.to(torch.float32), scores)
            draw = draw.without_filters()
        return draw(logits, flat).view(positions.shape)

    def scores(
        self,
        logits: Tensor,
        positions: Tensor | None = None,
        histories: Sequence[History] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        constraints: Sequence[ConstraintState | None] | None = None,
    ) -> Tensor:
        """Logits after temperature and filters, float32 in the shape of `logits`; sampled rows have their softmax as
        distribution. The arguments are those of a call; positions may be left out if no row uses XTC.

        Autograd follows the logits. Which ids are excluded counts as constant, and excluded ids get no gradient.
        """
        adjusted = self._adjusted(logits, histories, drafts)
        with torch.no_grad():
            flat, draw, rows = self._masked(adjusted, drafts, constraints)
            scores = self._scores(flat, positions, draw, rows).view(logits.shape)
        if not is_followed(adjusted):
            return scores
        temperature = torch.where(draw.temperature == 0, 1.0, draw.temperature).view(*logits.shape[:-1], 1)
        followed: Tensor = _Scores.apply(adjusted, scores, temperature)  # type: ignore[no-untyped-call]
        return followed

    def drawn(
        self,
        ids: Tensor,
        logits: Tensor,
        positions: Tensor,
        histories: Sequence[History] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        constraints: Sequence[ConstraintState | None] | None = None,
    ) -> DrawnLogprobs:
        """The logprobs of ids under the distributions that they were drawn from; 0 for greedy rows.

        ids: int, in the shape of `positions`. The other arguments, and the errors, are those of a call.
        """
        scores = self.scores(logits, positions, histories, drafts, constraints)
        chosen, count = logprobs(scores, ids).chosen, support(scores)
        is_greedy = (self._draw.temperature == 0).view(-1, *[1] * (ids.dim() - 1))
        return DrawnLogprobs(torch.where(is_greedy, 0.0, chosen), torch.where(is_greedy, 1, count))

    def probabilities(
        self,
        logits: Tensor,
        positions: Tensor,
        histories: Sequence[History] | None = None,
        constraints: Sequence[ConstraintState | None] | None = None,
    ) -> Tensor:
        """The distribution of each row: float64 [B, V], from logits [B, V] and positions int [B].

        1 for the id of a greedy row. NaN for a row of logits that is no distribution.
        """
        probabilities = self.scores(logits, positions, histories, None, constraints).to(torch.float64).softmax(-1)
        greedy_rows = self._draw.temperature == 0
        if not bool(greedy_rows.any()):
            return probabilities
        picked = torch.nn.functional.one_hot(self(logits, positions, histories, None, constraints), logits.shape[-1])
        return torch.where(greedy_rows.unsqueeze(1), picked.to(torch.float64), probabilities)

    @property
    def pick(self) -> Greedy | GumbelSampler | None:
        """The kernel that picks tokens without constraints, for the end of a program; None if it takes several."""
        if self._adjust.any or self._filters:
            return None
        return GREEDY if self._all_greedy else self._draw

    @property
    def keys(self) -> Tensor:
        """The 64 bits of the seeds: int64 [B]."""
        return self._draw.keys

    def row(self, index: int) -> SamplingParams:
        """The options of a row, with its seed."""
        return self._rows[index].with_values(seed=self.seeds[index])

    def take(self, rows: Sequence[int]) -> Self:
        """A sampler of these rows, with their seeds."""
        return type(self)([self.row(row) for row in rows], self._device)

    def _adjusted(
        self, logits: Tensor, histories: Sequence[History] | None, drafts: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Adjusted logits in the same shape, float32 if any are."""
        batch = len(self._rows)
        if logits.dim() not in (2, 3) or logits.shape[0] != batch:
            raise RequestError(
                f"a sampler of {batch} rows takes logits [{batch}, V] or [{batch}, K, V]; got {list(logits.shape)}"
            )
        if not self._adjust.any:
            return logits
        several = logits.unsqueeze(1) if logits.dim() == 2 else logits
        return self._adjust(several.to(torch.float32), histories, drafts).view(logits.shape)

    def _masked(
        self,
        logits: Tensor,
        drafts: Sequence[Sequence[int]] | None,
        constraints: Sequence[ConstraintState | None] | None,
    ) -> tuple[Tensor, GumbelSampler, Tensor | None]:
        """Masked logits [N, V], the options of the N = B K rows, and their index in B (None: N = B)."""
        if logits.dim() == 2 and constraints is None:
            return logits, self._draw, None
        several = logits.unsqueeze(1) if logits.dim() == 2 else logits
        if constraints is not None:
            several, left = mask_logits(several, constraints, drafts)
            if not bool(left.all()):
                raise nothing_left()
        flat = several.reshape(-1, logits.shape[-1])
        if several.shape[1] == 1:
            return flat, self._draw, None
        rows = torch.arange(len(self._rows), device=logits.device).repeat_interleave(several.shape[1])
        return flat, self._draw.take(rows), rows

    def _scores(self, logits: Tensor, positions: Tensor | None, draw: GumbelSampler, rows: Tensor | None) -> Tensor:
        """Logits after temperature and filters, float32 [N, V]."""
        if not self._filters:
            return draw.scores(logits)

        def filtered(logits: Tensor, at: Tensor) -> Tensor:
            scores, draws = logits.to(torch.float32), Draws(draw.keys[at], None if flat is None else flat[at])
            for kind, options in self._filters:
                row = at if rows is None else rows[at]
                scores = kind.filter(scores, {name: column[row] for name, column in options.items()}, draws)
            return scores

        flat = None if positions is None else positions.reshape(-1)
        return by_rows(filtered, logits, torch.arange(len(logits), device=logits.device))

    def _column(self, name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in self._rows], dtype=torch.float32, device=self._device)


class _Scores(torch.autograd.Function):
    """Scores [..., V] that were computed from logits, in the graph of these. temperature: [..., 1]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scores: Tensor, temperature: Tensor) -> Tensor:
        ctx.save_for_backward(scores == float("-inf"), temperature, scores.argmax(-1, keepdim=True))
        ctx.dtype = logits.dtype
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        excluded, temperature, best = ctx.saved_tensors
        grad = (grad / temperature).masked_fill(excluded, 0.0)
        grad = grad.scatter_add(-1, best, -grad.sum(-1, keepdim=True))  # scores are relative to the row's best
        return grad.to(ctx.dtype), None, None


def _filters(rows: Sequence[SamplingParams], device: torch.device | None) -> list[tuple[type[Filter], Columns]]:
    """The filters that rows use, with their options; none if `GumbelSampler` applies all of them."""
    kinds = _kinds(rows, Filter)
    on = [kind for kind in kinds if any(_is_on(kind, row) for row in rows)]
    if all(kind in GumbelSampler.filters for kind in on):
        return []
    # Scores are relative to the row's best after Temperature, also in batches with greedy rows.
    return [(kind, columns(rows, kind, device)) for kind in kinds if kind is Temperature or kind in on]


def _is_on(kind: type[Transform], row: SamplingParams) -> bool:
    return isinstance(row, kind) and not is_neutral(kind, row) and kind.is_on(row)


def _kinds(rows: Sequence[SamplingParams], kind: type[Kind]) -> list[type[Kind]]:
    """The adjustments or the filters of the rows' classes, each once, in order."""
    classes = dict.fromkeys(map(type, rows))
    return list(dict.fromkeys(one for options in classes for one in transforms_of(options, kind)))


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    *,
    typical_p: float = 1.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    logit_bias: Mapping[int, float] | None = None,
    positions: Tensor | int = 0,
) -> Tensor:
    """One step of your own loop: float [B, V] logits -> int64 [B] ids.

    With a seed the result depends on (seed, position, logits) alone, so a loop with a seed must pass each step's
    position too, or every step uses the same noise. Otherwise each row's seed is drawn from torch's default generator.
    Options that read a row's history need a `Sampler`.

    Args:
        logits: float [B, V], any float dtype; computed with in float32.
        temperature, top_k, top_p, min_p, seed, typical_p, xtc_probability, xtc_threshold, logit_bias: as in
            `SamplingParams`.
        positions: absolute position of the token to sample, an int or int [B].

    Raises:
        RequestError: logits of another shape, or a value outside its range.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise RequestError(f"sample: logits must be float [B, V]; got {logits.dtype} {list(logits.shape)}")
    row = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        logit_bias=() if logit_bias is None else logit_bias,
        seed=seed,
    )
    at = torch.as_tensor(positions, device=logits.device).expand(logits.shape[0])
    return Sampler([row] * logits.shape[0], logits.device)(logits, at)
