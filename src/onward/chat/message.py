"""What an assistant answers in a chat: its parts as they come, and the message that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onward.errors import RequestError
from onward.util.text_input import TextError, parse_json


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model calls.

    id: what the tool's result refers to. The same answer to the same prompt has the same ids.
    name: of the tool. arguments: JSON, exactly as the model wrote it; cut where the text was cut.
    """

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object, as `parsed` reads it."""
        try:
            return isinstance(self.parsed, dict)
        except RequestError:
            return False

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments by name. Strings may hold bare line breaks, which many models write.

        Raises:
            RequestError: they are no JSON object, which a call that was constrained or had strict tools always has.
        """
        try:
            arguments = parse_json(self.arguments, strict=False)
            if isinstance(arguments, str):  # some models write the object as text in JSON
                arguments = parse_json(arguments, strict=False)
        except TextError as error:
            raise RequestError(f"the arguments of {self.name!r} are no JSON ({error}): {self.arguments!r}") from error
        if not isinstance(arguments, dict):
            raise RequestError(f"the arguments of {self.name!r} are no JSON object: {self.arguments!r}")
        return arguments


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What came of one call.

    index: which of the message's calls it is. id, name: with the first delta of a call; None with the others.
    arguments: the next characters.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)  # there is one for every token
class MessageDelta:
    """What came of a message with a token: characters of its content, of its reasoning, and of its calls.

    It is false where nothing came, for example while the text may be the beginning of a call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class AssistantMessage:
    """An answer in its parts. It may be appended to the messages of the next chat as it is.

    content: what is said; None where the message holds reasoning or calls alone.
    reasoning: what was thought before; None where nothing was.
    tool_calls: in order; empty where there are none.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, deltas: Iterable[MessageDelta]) -> "AssistantMessage":
        """What deltas add up to."""
        content, reasoning = [], []
        calls: list[tuple[str, str, list[str]]] = []
        for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            for call in delta.tool_calls:
                if call.id is not None and call.name is not None:
                    calls.append((call.id, call.name, []))
                calls[call.index][2].append(call.arguments)
        thought = "".join(reasoning) or None
        tool_calls = tuple(ToolCall(id, name, "".join(parts)) for id, name, parts in calls)
        said = "".join(content)
        return cls(None if not said and (thought or tool_calls) else said, thought, tool_calls)

    def to_dict(self) -> dict[str, Any]:
        """The message in OpenAI's format, without keys that say nothing."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
