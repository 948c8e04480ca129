"""The conversation of `onward chat` and its model; an `onward.Session` caches the processed tokens between turns."""

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

# The session note that stores the conversation.
_NOTE = "conversation"


@dataclass
class Conversation:
    """The messages of a chat: a system message, then turns of (question, answer)."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Return the messages for the chat template, with a new question at the end."""
        messages = [("system", self.system)] if self.system is not None else []
        for request, answer in self.turns:
            messages += [("user", request), ("assistant", answer)]
        if question is not None:
            messages.append(("user", question))
        return [{"role": role, "content": content} for role, content in messages]

    def to_json(self) -> str:
        return json.dumps({"system": self.system, "turns": self.turns}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Conversation":
        content = parse_request_json(text)
        if not isinstance(content, dict) or content.keys() != {"system", "turns"}:
            raise RequestError("a conversation must be an object with 'system' and 'turns'")
        system, turns = content["system"], content["turns"]
        if not (system is None or isinstance(system, str)):
            raise RequestError("the system message of a conversation must be a string or null")
        pairs = turns if isinstance(turns, list) else [None]
        if not all(isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in pairs):
            raise RequestError("the turns of a conversation must be a list of pairs of strings")
        return cls(system, [(request, answer) for request, answer in turns])


@dataclass(frozen=True)
class ChatAnswer:
    """The emitted text, and the completion, or None after an interrupt. same_as_before: a retry gave the same text."""

    text: str
    completion: "Completion | None"
    same_as_before: bool = False


class ChatSession:
    """The state of `onward chat`.

    lm: a model with a chat template. model: its display name. options: of all answers; without max_new_tokens, an
    answer may use the rest of the context. variables: of the chat template. last: the last answer that was not
    interrupted. generated: number of tokens so far.
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
        self._now = datetime.datetime.now(datetime.UTC)  # fixed, so that the prompt stays the same past midnight
        self._session = onward.Session(lm)
        self._file: Path | None = None
        self._saved: tuple[str, int] | None = None

    def open(self, file: Path) -> None:
        """Resume the chat in `file`, if it exists, and `save` to it from now on."""
        if file.exists():
            session = onward.Session.load(file, self.lm)
            if _NOTE not in session.notes:
                raise SessionError(f"{str(file)!r} is a session without a chat: load it with `onward.Session.load`")
            try:
                conversation = Conversation.from_json(session.notes[_NOTE])
            except RequestError as error:
                raise SessionError(f"{str(file)!r} is a session with a damaged chat: {error}") from error
            self.set_conversation(conversation)
            self._session = session
        self._file = file
        self.save()

    def save(self) -> None:
        """Write the chat to its file, if it has one and the chat has changed; an error leaves the file unchanged."""
        state = (self.conversation.to_json(), len(self._session.tokens))
        if self._file is not None and state != self._saved:
            self._session.notes[_NOTE] = state[0]
            self._session.save(self._file)
            self._saved = state

    @property
    def context(self) -> int:
        length = self.lm.model.max_seq_len
        assert length is not None, "checkpoints have a context length"
        return length

    def tokens(self) -> int:
        """Return the conversation's length in tokens: the prompt of an empty next message."""
        messages = self.conversation.messages("")
        return len(self.lm.chat_prompt(messages, self.variables, self._now)) if len(messages) > 1 else 0

    def reset(self) -> None:
        """Begin a new chat with the same system message. The next `save` drops the old one."""
        self.conversation = Conversation(self.conversation.system)
        self._now = datetime.datetime.now(datetime.UTC)
        self._session.truncate()

    def set_conversation(self, conversation: Conversation) -> None:
        """Replace the conversation, unless the chat template cannot render the new one."""
        before, self.conversation = self.conversation, conversation
        try:
            self.tokens()
        except OnwardError:
            self.conversation = before
            raise

    def ask(self, question: str, emit: "Callable[[Piece], None]") -> ChatAnswer:
        """Stream the answer to a question, and add both to the conversation.

        After an interrupt, the conversation gets the text so far. If there is none, or no room for an answer, it is
        unchanged.
        """
        self._retries = 0
        return self._answer(question, emit, {})

    def retry(self, emit: "Callable[[Piece], None]") -> ChatAnswer:
        """Replace the last answer, with a seed derived from the session's, if any.

        After an interrupt before the first token, the old answer stays.
        """
        from onward.sampling import sample_seed

        before = self.undo()
        self._retries += 1
        seed = self.options.get("seed")
        try:
            answer = self._answer(before[0], emit, {} if seed is None else {"seed": sample_seed(seed, self._retries)})
        except BaseException:
            self.conversation.turns.append(before)
            raise
        if not answer.text and answer.completion is None:
            self.conversation.turns.append(before)
        return replace(answer, same_as_before=answer.text == before[1])

    def undo(self) -> tuple[str, str]:
        """Remove and return the last question and answer; raise `RequestError` if there is none."""
        if not self.conversation.turns:
            raise RequestError("nothing was asked yet")
        return self.conversation.turns.pop()

    def _answer(self, question: str, emit: "Callable[[Piece], None]", changes: Mapping[str, Any]) -> ChatAnswer:
        messages = self.conversation.messages(question)
        prompt = self.lm.chat_prompt(messages, self.variables, self._now)
        room = self.context - len(prompt)
        if room < 1:
            raise ContextOverflowError(
                f"not sent: with this message the chat is {len(prompt):,} tokens long, and the context holds "
                f"{self.context:,}. /reset begins a new chat; a shorter message may fit"
            )
        limit = self.options.get("max_new_tokens")
        options = {**self.options, **changes, "max_new_tokens": room if limit is None else min(room, limit)}
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
