"""Messages as callers have them, made what chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onward.chat.message import AssistantMessage, ToolCall
from onward.errors import RequestError

# Under any of these names clients send reasoning back, and templates read it.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def template_messages(messages: Any, *, arguments_as_text: bool) -> Any:
    """The same messages; those with calls or reasoning as templates read them.

    An `AssistantMessage` becomes a mapping. Keys of an assistant's message that say nothing are left out, for clients
    send them all and templates look whether they are there. The arguments of calls become objects, since most templates
    write them as JSON themselves, or stay the text that the model wrote where a template takes that; none at all, or
    an empty text, is an empty object. Reasoning goes by both its names. The result of a tool gets the tool's name. A
    value that is not a list of messages is left to the template's check.

    Raises:
        RequestError: a call that is none, or whose arguments are no object in JSON, with its place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    names: dict[str, str] = {}  # of the tools, by the ids of the calls
    read = []
    for at, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            message = message.to_dict()
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            message = _read_assistant(message, f"messages[{at}]", arguments_as_text)
            for call in message.get("tool_calls") or ():
                if call.get("id") is not None:
                    names[call["id"]] = call["function"]["name"]
        elif isinstance(message, Mapping) and message.get("role") == "tool":
            name = names.get(message.get("tool_call_id", ""))
            if name is not None:
                message = {"name": name, **message}
        read.append(message)
    return read


def _read_assistant(message: Mapping[str, Any], at: str, arguments_as_text: bool) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    calls = message.get("tool_calls")
    read = {name: value for name, value in message.items() if value is not None and (name != "tool_calls" or calls)}
    if reasoning is not None:
        read |= dict.fromkeys(_REASONING, reasoning)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise RequestError(f"{at}.tool_calls must be a list of calls; got {calls!r}")
        read["tool_calls"] = [
            _read_call(call, f"{at}.tool_calls[{place}]", arguments_as_text) for place, call in enumerate(calls)
        ]
    if len(read) > 1 or "content" in message:
        read.setdefault("content", "")  # templates add texts to it
    return read


def _read_call(call: Any, at: str, arguments_as_text: bool) -> dict[str, Any]:
    """A call as {"id", "type", "function": {"name", "arguments"}}; one without its outer object gets it."""
    if isinstance(call, Mapping) and "function" not in call and "name" in call:
        call = {"function": {key: call[key] for key in ("name", "arguments") if key in call}} | (
            {"id": call["id"]} if "id" in call else {}
        )
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{at} must be {{'id': …, 'function': {{'name': …, 'arguments': …}}}}; got {call!r}")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # as clients send it for tools without parameters
    if not isinstance(arguments, str | Mapping):
        raise RequestError(f"{at}.function.arguments must be a text in JSON or an object; got {arguments!r}")
    if arguments_as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not arguments_as_text and isinstance(arguments, str):
        arguments = _as_object(arguments, f"{at}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _as_object(arguments: str, at: str) -> dict[str, Any]:
    """The object that a text is in JSON; a template would write anything else as text inside of JSON."""
    try:
        return ToolCall("", "", arguments).parsed
    except RequestError as error:
        text = arguments if len(arguments) <= 100 else arguments[:99] + "…"
        raise RequestError(f"{at} must be an object in JSON; got {text!r}") from error
