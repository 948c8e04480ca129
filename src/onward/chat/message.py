"""The answer of a chat: a message, and its deltas while it is streamed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onward.errors import RequestError
from onward.util.text_input import TextError, parse_json


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    id: to refer to from the tool's result; the same answer to the same prompt has the same ids.
    name: of the tool. arguments: JSON, exactly as the model wrote it; incomplete if the text is.
    """

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a complete JSON object."""
        try:
            return isinstance(self.parsed, dict)
        except RequestError:
            return False

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments by name. Strings may contain bare line breaks, which many models write.

        Raises:
            RequestError: the arguments are not a JSON object; those of constrained calls and strict tools always are.
        """
        try:
            arguments = parse_json(self.arguments, strict=False)
            if isinstance(arguments, str):  # some models write the object as a JSON string
                arguments = parse_json(arguments, strict=False)
        except TextError as error:
            raise RequestError(f"the arguments of {self.name!r} are not JSON ({error}): {self.arguments!r}") from error
        if not isinstance(arguments, dict):
            raise RequestError(f"the arguments of {self.name!r} are not a JSON object: {self.arguments!r}")
        return arguments


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call.

    index: of the call in the message. id, name: set in the first delta of a call, None in the others.
    arguments: the next characters.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)  # one per token
class MessageDelta:
    """A part of a message, from one token: characters of its content, its reasoning and its calls.

    It is false if it is empty, for example while the text may be the beginning of a call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class AssistantMessage:
    """An answer. It can be appended to the messages of the next chat.

    content: the text; None if the message has only reasoning or calls.
    reasoning: the text of the reasoning, or None. tool_calls: in order.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, deltas: Iterable[MessageDelta]) -> "AssistantMessage":
        """Return the message that deltas add up to."""
        content, reasoning = [], []
        calls: list[tuple[str, str, list[str]]] = []
        for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            for call in delta.tool_calls:
                if call.id is not None and call.name is not None:
                    calls.append((call.id, call.name, []))
                calls[call.index][2].append(call.arguments)
        thoughts = "".join(reasoning) or None
        tool_calls = tuple(ToolCall(id, name, "".join(parts)) for id, name, parts in calls)
        text = "".join(content)
        return cls(None if not text and (thoughts or tool_calls) else text, thoughts, tool_calls)

    def to_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's format, without empty keys."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
