"""A conversation and its file: a JSON object with the messages as chat templates take them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.errors import RequestError
from onward.files import write_whole
from onward.text_input import TextError, parse_request_json, read_text_file


@dataclass
class Conversation:
    """What was said. `turns` holds the pairs of question and answer; the system message stands before them."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """As the chat template takes them, with a question yet unanswered at the end."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for asked, answered in self.turns:
            messages += [_message("user", asked), _message("assistant", answered)]
        return messages if question is None else [*messages, _message("user", question)]


def to_json(conversation: Conversation, model: str) -> str:
    """What a file of it holds. model: its name, for people."""
    return json.dumps({"model": model, "messages": conversation.messages()}, ensure_ascii=False, indent=2) + "\n"


def save(conversation: Conversation, file: Path, model: str) -> None:
    """Write the file whole or not at all.

    A file that stands there already is replaced if it is a saved conversation too.

    Raises:
        RequestError: it cannot be written, or is something else.
    """
    if file.exists():
        try:
            load(file)
        except RequestError as error:
            raise RequestError(f"{str(file)!r} exists and is no saved chat: choose another name") from error
    content = to_json(conversation, model)
    try:
        write_whole(file, lambda neighbour: neighbour.write_text(content, encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise RequestError(f"{str(file)!r} cannot be written: {error}") from error


def load(file: Path) -> Conversation:
    """Read and check a saved conversation.

    Raises:
        RequestError: it cannot be read, or is not what `save` writes.
    """
    try:
        text = read_text_file(file)
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # also a NUL in the name
        raise RequestError(f"{str(file)!r} is no JSON text: {error}") from error
    return from_json(text, file)


def from_json(text: str, file: Path) -> Conversation:
    """What `to_json` wrote, checked; `file` is where it was found.

    Raises:
        RequestError: it is something else.
    """
    try:
        content = parse_request_json(text)
    except TextError as error:
        raise RequestError(f"{str(file)!r} is no JSON text: {error}") from error
    messages = content.get("messages") if isinstance(content, Mapping) else None
    if not isinstance(messages, list):
        raise RequestError(f"{str(file)!r} is no saved chat: it wants an object with a list of 'messages'")
    for number, message in enumerate(messages, 1):
        _check_message(file, number, message)
    return _conversation(file, messages)


def _conversation(file: Path, messages: list[dict[str, str]]) -> Conversation:
    has_system = bool(messages) and messages[0]["role"] == "system"
    said = messages[has_system:]
    for place, message in enumerate(said):
        expected = "assistant" if place % 2 else "user"
        if message["role"] != expected:
            raise RequestError(
                f"{str(file)!r}: message {place + 1 + has_system} is of role {message['role']!r} where "
                f"{expected!r} was expected: a chat is user and assistant in turn, after one system message at most"
            )
    if len(said) % 2:
        raise RequestError(f"{str(file)!r}: the last message has no answer")
    texts = [message["content"] for message in said]
    return Conversation(messages[0]["content"] if has_system else None, list(zip(texts[::2], texts[1::2], strict=True)))


def _check_message(file: Path, number: int, message: Any) -> None:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        got = sorted(message) if isinstance(message, Mapping) else type(message).__name__
        raise RequestError(f"{str(file)!r}: message {number} must have a 'role' and a 'content' alone; got {got}")
    if not all(isinstance(value, str) for value in message.values()):
        raise RequestError(f"{str(file)!r}: role and content of message {number} must be strings")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
