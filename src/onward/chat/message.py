"""The messages of chats: answers, their deltas while they are streamed, and the form that chat templates read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from onward.errors import OptionError, RequestError
from onward.util.text import brief
from onward.util.text_input import TextError, parse_json

# The argument that is the input of a custom tool.
INPUT = "input"
# The key of a call's text, by the type of its tool.
TEXT_KEYS = {"function": "arguments", "custom": INPUT}
# The names of reasoning in clients' messages and in templates.
_REASONING = ("reasoning_content", "reasoning", "thinking")


ToolKind: TypeAlias = Literal["function", "custom"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    id: to refer to from the tool's result; the same answer to the same prompt has the same ids.
    name: of the tool. arguments: JSON, exactly as the model wrote it; incomplete if the text is. Of a custom tool: its
    input, a text. type: of the tool.
    """

    id: str
    name: str
    arguments: str
    type: ToolKind = "function"

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a complete JSON object. The input of a custom tool may be any text."""
        try:
            return isinstance(self.parsed, dict)
        except RequestError:
            return False

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments by name; those of a custom tool are its "input". Strings may contain bare line breaks, which
        many models write.

        Raises:
            RequestError: the arguments are not a JSON object; those of constrained calls and strict tools always are.
        """
        if self.type == "custom":
            return {INPUT: self.arguments}
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
    arguments: the next characters. type: of the tool.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    type: ToolKind = "function"


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
        calls: list[tuple[str, str, list[str], ToolKind]] = []
        for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            for call in delta.tool_calls:
                if call.id is not None and call.name is not None:
                    calls.append((call.id, call.name, [], call.type))
                calls[call.index][2].append(call.arguments)
        thoughts = "".join(reasoning) or None
        tool_calls = tuple(ToolCall(id, name, "".join(parts), type) for id, name, parts, type in calls)
        text = "".join(content)
        return cls(None if not text and (thoughts or tool_calls) else text, thoughts, tool_calls)

    def as_delta(self) -> MessageDelta:
        """Return the whole message as one delta."""
        calls = [
            ToolCallDelta(at, call.id, call.name, call.arguments, call.type) for at, call in enumerate(self.tool_calls)
        ]
        return MessageDelta(self.content or "", self.reasoning or "", tuple(calls))

    def to_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's format, without empty keys."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, call.type: {"name": call.name, TEXT_KEYS[call.type]: call.arguments}}
                for call in self.tool_calls
            ]
        return message


def template_messages(messages: Any, *, arguments_as_text: bool) -> Any:
    """Return the messages in the form that chat templates read.

    - An `AssistantMessage` becomes a mapping, without empty keys: clients send them, and templates test for keys.
    - The arguments of calls become objects, or text if `arguments_as_text`; missing or empty ones are an empty object.
    - Reasoning gets all of its names, and the result of a tool gets the tool's name.

    A value that is not a list of messages is returned as it is; the template checks it. An invalid call, or arguments
    that are not a JSON object, raise `RequestError` with their place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    names: dict[str, str] = {}  # of the tools, by the ids of the calls
    result = []
    for at, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            message = message.to_dict()
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant":
            message = _read_assistant(message, f"messages[{at}]", arguments_as_text)
            calls = message.get("tool_calls") or ()
            names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id") is not None}
        elif role == "tool" and (name := names.get(message.get("tool_call_id", ""))) is not None:
            message = {"name": name, **message}
        result.append(message)
    return result


def _read_assistant(message: Mapping[str, Any], at: str, arguments_as_text: bool) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    calls = message.get("tool_calls")
    result = {name: value for name, value in message.items() if value is not None and (name != "tool_calls" or calls)}
    if reasoning is not None:
        result |= dict.fromkeys(_REASONING, reasoning)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise OptionError(f"{at}.tool_calls", f"must be a list of calls; got {brief(calls)}")
        result["tool_calls"] = [
            _read_call(call, f"{at}.tool_calls[{place}]", arguments_as_text) for place, call in enumerate(calls)
        ]
    if len(result) > 1 or "content" in message:
        result.setdefault("content", "")  # templates concatenate it
    return result


def _as_function(custom: Any, at: str) -> dict[str, Any]:
    """The call of a custom tool as that of the function that the model sees."""
    if not isinstance(custom, Mapping) or not all(isinstance(custom.get(key), str) for key in ("name", "input")):
        raise OptionError(at, f"must be {{'name': …, 'input': …}} with texts; got {brief(custom)}")
    return {"name": custom["name"], "arguments": {INPUT: custom["input"]}}


def _read_call(call: Any, at: str, arguments_as_text: bool) -> dict[str, Any]:
    """Return a call as {"id", "type", "function": {"name", "arguments"}}, also from a bare function and a custom tool's
    call."""
    if isinstance(call, Mapping) and call.get("type") == "custom":
        call = {**call, "function": _as_function(call.get("custom"), f"{at}.custom")}
        del call["custom"]
    if isinstance(call, Mapping) and "function" not in call and "name" in call:
        bare = {key: call[key] for key in ("name", "arguments") if key in call}
        call = {"function": bare, "id": call["id"]} if "id" in call else {"function": bare}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise OptionError(at, f"must be {{'id': …, 'function': {{'name': …, 'arguments': …}}}}; got {brief(call)}")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # clients send this for tools without parameters
    if not isinstance(arguments, str | Mapping):
        raise OptionError(f"{at}.function.arguments", f"must be JSON text or an object; got {brief(arguments)}")
    if arguments_as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not arguments_as_text and isinstance(arguments, str):
        text = arguments if len(arguments) <= 100 else arguments[:99] + "…"
        try:
            arguments = ToolCall("", "", arguments).parsed
        except RequestError as error:
            raise OptionError(f"{at}.function.arguments", f"must be a JSON object; got {text!r}") from error
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
