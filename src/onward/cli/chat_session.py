"""A chat with a model: its conversation, its context, and one answer at a time.

The part of the conversation that the model has processed stays in the cache of an `onward.Session`, so that a turn
costs only its new tokens.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onward
from onward.cli.terminal import follow
from onward.errors import ContextOverflowError, OnwardError, RequestError, SessionError
from onward.util.text_input import parse_request_json

if TYPE_CHECKING:
    from onward.language_model import Completion, LanguageModel, Piece

# The note of a saved session that has its conversation.
_NOTE = "conversation"


@dataclass
class Conversation:
    """The messages of a chat. turns: pairs of question and answer, after the system message."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """For the chat template, with a new question at the end."""
        said = [("system", self.system)] if self.system is not None else []
        for asked, answered in self.turns:
            said += [("user", asked), ("assistant", answered)]
        if question is not None:
            said.append(("user", question))
        return [{"role": role, "content": content} for role, content in said]

    def to_json(self) -> str:
        """An object with the system message, a string or null, and the turns, pairs of strings."""
        return json.dumps({"system": self.system, "turns": self.turns}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        """Parse what `to_json` wrote.

        Raises:
            RequestError: it is something else.
        """
        content = parse_request_json(text)
        if not isinstance(content, dict) or content.keys() != {"system", "turns"}:
            raise RequestError("a conversation is an object with 'system' and 'turns'")
        system, turns = content["system"], content["turns"]
        if not (system is None or isinstance(system, str)):
            raise RequestError("the system message of a conversation is a string or null")
        if not (isinstance(turns, list) and all(map(_is_turn, turns))):
            raise RequestError("the turns of a conversation are a list of pairs of strings")
        return cls(system, [(asked, answered) for asked, answered in turns])


def _is_turn(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


@dataclass(frozen=True)
class ChatAnswer:
    """text: what was emitted, and stays in the conversation. completion: None for an answer that was interrupted.
    same_as_before: of an answer that was asked for again."""

    text: str
    completion: "Completion | None"
    same_as_before: bool = False


class ChatSession:
    """The state of `onward chat`.

    lm: has a chat template. model: its name, for people. options: of every answer; without max_new_tokens an answer
    may take what is left of the context. variables: of the chat template. last: the last answer that was not
    interrupted. generated: tokens so far.
    """

    def __init__(
        self,
        lm: "LanguageModel",
        model: str,
        options: Mapping[str, Any],
        conversation: Conversation,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.lm = lm
        self.model = model
        self.conversation = conversation
        self.last: Completion | None = None
        self.generated = 0
        self.options = dict(options)
        self.variables = dict(variables or {})
        self._retries = 0  # of the last question
        self._now = datetime.datetime.now(datetime.UTC)  # when it began: a chat past midnight keeps its prompt
        self._session = onward.Session(lm)
        self._file: Path | None = None
        self._kept: tuple[str, int] | None = None

    def keep_in(self, file: Path) -> None:
        """Go on with the chat that `file` holds, if there is such a file, and have `keep` write it there.

        Raises:
            SessionError: it cannot be read or written, or is no chat with this model.
        """
        if file.exists():
            session = onward.Session.load(file, self.lm)
            if _NOTE not in session.notes:
                raise SessionError(f"{str(file)!r} is a session without a chat: `onward.Session.load` goes on with it")
            try:
                conversation = Conversation.from_json(session.notes[_NOTE])
            except RequestError as error:
                raise SessionError(f"{str(file)!r} is a session with a damaged chat: {error}") from error
            self.adopt(conversation)
            self._session = session
        self._file = file
        self.keep()

    def keep(self) -> None:
        """Write the chat to its file, where it has one and was changed since.

        Raises:
            SessionError: it cannot be written; the file is as it was.
        """
        if self._file is None:
            return
        content = self.conversation.to_json()
        state = (content, len(self._session.tokens))
        if state != self._kept:
            self._session.notes[_NOTE] = content
            self._session.save(self._file)
            self._kept = state

    @property
    def context(self) -> int:
        """The most tokens a conversation may have."""
        length = self.lm.model.max_seq_len
        assert length is not None, "checkpoints say how long their context is"
        return length

    def tokens(self) -> int:
        """How long the conversation is: the prompt of a next message, less its words."""
        messages = self.conversation.messages("")
        return len(self.lm.chat_prompt(messages, self.variables, self._now)) if len(messages) > 1 else 0

    def reset(self) -> None:
        """Begin anew, with the same system message; what was said is in no file that `keep` writes from now on."""
        self.conversation = Conversation(self.conversation.system)
        self._now = datetime.datetime.now(datetime.UTC)
        self._session.truncate()

    def adopt(self, conversation: Conversation) -> None:
        """Go on with another conversation.

        Raises:
            RequestError: the chat template cannot render it; the conversation is as it was.
        """
        before, self.conversation = self.conversation, conversation
        try:
            self.tokens()
        except OnwardError:
            self.conversation = before
            raise

    def ask(self, question: str, emit: "Callable[[Piece], None]") -> ChatAnswer:
        """Answer a question, a piece at a time; both join the conversation.

        An answer that is interrupted joins it as far as it was emitted; if that is nothing, the conversation stays
        as it was.

        Raises:
            ContextOverflowError: no room is left for an answer; the conversation is as it was.
        """
        self._retries = 0
        return self._answer(question, emit, {})

    def retry(self, emit: "Callable[[Piece], None]") -> ChatAnswer:
        """Answer the last question again, in the place of the answer it has; with a seed, with one derived from it.

        An answer that is interrupted before it began leaves the one that was there.

        Raises:
            RequestError: no question was asked yet. ContextOverflowError: as of `ask`.
        """
        before = self.undo()
        self._retries += 1
        try:
            answer = self._answer(before[0], emit, self._seed_of_retry())
        except BaseException:
            self.conversation.turns.append(before)
            raise
        if not answer.text and answer.completion is None:
            self.conversation.turns.append(before)
        return replace(answer, same_as_before=answer.text == before[1])

    def undo(self) -> tuple[str, str]:
        """Take back the last question and its answer; returns them.

        Raises:
            RequestError: there is none.
        """
        if not self.conversation.turns:
            raise RequestError("nothing was asked yet")
        return self.conversation.turns.pop()

    def _seed_of_retry(self) -> dict[str, int]:
        from onward.sampling import sample_seed

        seed = self.options.get("seed")
        return {} if seed is None else {"seed": sample_seed(seed, self._retries)}

    def _answer(self, question: str, emit: "Callable[[Piece], None]", changes: Mapping[str, Any]) -> ChatAnswer:
        messages = self.conversation.messages(question)
        prompt = self.lm.chat_prompt(messages, self.variables, self._now)
        room = self.context - len(prompt)
        if room < 1:
            raise ContextOverflowError(
                f"not sent: with this message the chat is {len(prompt):,} tokens long, and the context holds "
                f"{self.context:,}. /reset begins a new chat; a shorter message may fit"
            )
        most = self.options.get("max_new_tokens")
        options = {**self.options, **changes, "max_new_tokens": room if most is None else min(room, most)}
        shown: list[str] = []

        def show(piece: "Piece") -> None:
            shown.append(piece.text)
            self.generated += 1
            emit(piece)

        completion: Completion | None
        try:
            stream = self._session.stream_chat(messages, template=self.variables, now=self._now, **options)
            completion = follow(stream, show)
        except KeyboardInterrupt:
            completion = None
        text = "".join(shown)
        if text or completion is not None:
            self.conversation.turns.append((question, text))
        self.last = completion or self.last
        return ChatAnswer(text, completion)

    def is_full(self, completion: "Completion") -> bool:
        """Whether an answer ended because the context did."""
        used = completion.prompt_tokens + len(completion.token_ids)
        return completion.finish_reason == "length" and used >= self.context
