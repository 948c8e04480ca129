"""The steps by which sequences of requests go on: plain, with drafts, or by beams."""

from collections import abc

from onward.decoding import BeamStep, DecodeStep, SamplingChooser, Search, Sequence, Slots, Step, Work
from onward.decoding.loop import Failed
from onward.decoding.step import Emitted
from onward.models import ModelRun
from onward.speculation import SpeculativeStep, Speculator
from onward.speculation.pace import LENGTHS
from onward.speculation.step import draft_forced


class Steps:
    """A `Step` that has each sequence go on by its own kind of step. Those of one kind run together.

    Where some of those without a draft have a constraint, all of them go on by a step that drafts what constraints
    force.

    run: the model. slots: where the sequences' keys and values are.
    failed: is told of a search that could not go on, as in `decode_loop`.
    """

    def __init__(self, run: ModelRun, slots: Slots, failed: Failed | None = None) -> None:
        self._run, self._slots = run, slots
        self._device = run.model.device
        self._chooser = SamplingChooser(self._device)
        self._plain = DecodeStep(run, slots, self._chooser, self._device)
        self._beams = BeamStep(self._plain, run, slots, self._device, failed)
        self._forced = SpeculativeStep(
            self._plain,
            run,
            slots,
            SamplingChooser(self._device),
            self._device,
            longest=LENGTHS[-1],
            vocab_size=run.model.vocab_size,
        )
        self._speculative: dict[Speculator, Step] = {}
        self._own: dict[Sequence, Step] = {}  # of the sequences whose step is not the plain one

    def join(self, sequences: abc.Sequence[Sequence], draft: Speculator | None) -> None:
        """Let these sequences go on by a step of their kind. draft: drafts for all of them together.

        Those that were preempted join again; what is known of their drafts stays.
        """
        for sequence in sequences:
            if isinstance(sequence, Search):
                self._own[sequence] = self._beams
        if draft is None:
            constrained = [one for one in sequences if one.constraint is not None and not isinstance(one, Search)]
            draft_forced(sequence for sequence in constrained if sequence.drafting is None)
            self._own.update(dict.fromkeys(constrained, self._forced))
            return
        if draft not in self._speculative:
            used = set(self._own.values())
            self._speculative = {kept: step for kept, step in self._speculative.items() if step in used}
            chooser = SamplingChooser(self._device)
            self._speculative[draft] = draft.step(
                self._plain, self._run, self._slots, chooser, self._device, self._run.model.vocab_size
            )
        if new := [sequence for sequence in sequences if sequence.drafting is None]:
            draft.join(new, self._run.model.vocab_size, self._device)
        self._own.update(dict.fromkeys(sequences, self._speculative[draft]))

    def leave(self, sequences: abc.Iterable[Sequence]) -> None:
        """These sequences have ended. A drafter that none is left of is forgotten when a new one comes."""
        for sequence in sequences:
            self._own.pop(sequence, None)

    def by_kind(self, work: abc.Sequence[Work]) -> list[tuple[Step, list[int]]]:
        """The steps of work, each with the indices of its items."""
        if not self._own:
            return [(self._plain, list(range(len(work))))]
        kinds: dict[Step, list[int]] = {}
        for index, (sequence, _) in enumerate(work):
            kinds.setdefault(self._own.get(sequence, self._plain), []).append(index)
        if self._forced in kinds and self._plain in kinds:
            kinds[self._forced] = sorted([*kinds[self._forced], *kinds.pop(self._plain)])
        return list(kinds.items())

    def __call__(self, work: abc.Sequence[Work]) -> Emitted:
        kinds = self.by_kind(work)
        if len(kinds) == 1:
            return kinds[0][0](work)
        emitted: Emitted = [[] for _ in work]
        for step, indices in kinds:
            for index, tokens in zip(indices, step([work[index] for index in indices]), strict=True):
                emitted[index] = tokens
        return emitted
