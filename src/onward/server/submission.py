"""The requests of one body on their way through an engine, and those who wait for the answer."""

from collections.abc import Sequence
from typing import Any

from onward.completion import Completion
from onward.engine import Generation
from onward.errors import EngineError
from onward.openai import Body
from onward.server.handover import EventIds, Handover
from onward.server.models import ServedModel
from onward.server.told import Events, Teller


class Submission:
    """The requests of one body while engines serve them.

    asked: tells what it asks for from what others do. clients: who wait for it; several where a body came again.
    is_cut: whether it was cancelled before its end. counted: whether it was counted as ended. tokens: of its prompts
    and texts, once nobody waits.
    """

    def __init__(self, served: ServedModel, body: Body, generations: Sequence[Generation], asked: str) -> None:
        self.served, self.body, self.generations, self.asked = served, body, generations, asked
        self.clients: set[Recipient] = set()
        self.is_cut = self.counted = False
        self.tokens = 0

    def cancel(self) -> None:
        """End all of them with their next step."""
        for generation in self.generations:
            self.is_cut = self.is_cut or not generation.done
            generation.cancel()

    def leave(self, client: "Recipient") -> None:
        """One of those who wait has left. Where nobody is left, all is cancelled."""
        self.clients.discard(client)
        if not self.clients:
            self.cancel()

    def completion(self, at: int) -> Completion:
        """Of the request numbered `at`, which has ended.

        Raises:
            OnwardError: what made it fail, or that the server ends.
        """
        completion = self.generations[at].result(0)
        if completion.finish_reason == "cancelled":
            raise EngineError("the server shuts down, and the text was not finished")
        return completion

    def ended(self) -> list[Completion | None]:
        """The completions of its requests; None for one that has failed or goes on."""
        return [_completion_of(generation) for generation in self.generations]

    @property
    def has_failed(self) -> bool:
        """Whether one of them ended with an error."""
        return any(generation.done and _completion_of(generation) is None for generation in self.generations)

    def emitted(self) -> list[list[int]]:
        """The ids of each text so far."""
        return [ids for generation in self.generations for ids in generation.emitted()]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        completions = [completion for completion in self.ended() if completion is not None]
        texts = [text for completion in completions for text in completion.choices]
        facts: dict[str, Any] = {"model": self.body.model, "stream": self.body.stream}
        facts["prompt_tokens"] = sum(completion.prompt_tokens for completion in completions)
        facts["completion_tokens"] = sum(len(text.token_ids) for text in texts)
        ends = {str(text.finish_reason) for text in texts}
        if len(completions) < len(self.generations):
            ends.add("error" if all(generation.done for generation in self.generations) else "cancelled")
        facts["finish"] = sorted(ends)
        return facts

    async def completions(self) -> list[Completion]:
        """Wait for all of them. Where one fails the others are cancelled.

        Raises:
            OnwardError: as `completion`.
        """
        for generation in self.generations:
            try:
                await generation
            except Exception:
                self.cancel()
                raise
        return [self.completion(at) for at in range(len(self.generations))]


class Recipient:
    """One of those who wait for a submission.

    handover: what was known of the answer. ids: of its events; None for an answer in one piece.
    """

    def __init__(self, submission: Submission, handover: Handover, ids: EventIds | None) -> None:
        self.submission, self.handover, self.ids = submission, handover, ids
        submission.clients.add(self)

    def leave(self) -> None:
        self.submission.leave(self)

    def teller(self, events: Events) -> Teller:
        """Tells it the answer as a stream."""
        assert self.ids is not None, "a stream has ids"
        known = [len(ids) for ids in self.handover.emitted or ()]
        known = known or [0] * sum(len(track.counts) for track in self.ids.before.tracks)
        return Teller(events, self.ids.prefix, self.ids.before, known)


def _completion_of(generation: Generation) -> Completion | None:
    try:
        return generation.result(0) if generation.done else None
    except Exception:  # whatever made it fail; who waits for it is told
        return None
