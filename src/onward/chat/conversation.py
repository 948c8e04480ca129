"""Convert a caller's messages to the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onward.chat.message import AssistantMessage, ToolCall
from onward.errors import OptionError, RequestError
from onward.util.text import brief

# The names of reasoning in clients' messages and in templates.
_REASONING = ("reasoning_content", "reasoning", "thinking")


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


def _read_call(call: Any, at: str, arguments_as_text: bool) -> dict[str, Any]:
    """Return a call as {"id", "type", "function": {"name", "arguments"}}, also from a bare function."""
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
