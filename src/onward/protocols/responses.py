"""Bodies of /v1/responses, which are read as the equivalent chats. Nothing is stored."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.protocols.answer_key import ResponseKey
from onward.protocols.errors import BodyError
from onward.protocols.schema import BodyReader, ParsedBody, check_neutral, read_text

# Fields that are supported only with these values, which have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "truncation": ("disabled",),
}
# Fields of a chat that responses do not have.
_CHAT_ONLY = {
    *("messages", "n", "logprobs", "response_format", "prediction", "stop", "max_tokens", "max_new_tokens"),
    *("prompt_logprobs", "max_completion_tokens", "reasoning_effort", "return_token_ids", "functions", "function_call"),
    "beams",
}
_LOGPROBS = "message.output_text.logprobs"  # the only supported value of `include`
_TEXT_PARTS = ("input_text", "output_text", "text")
_REASONING = {"effort", "summary", "generate_summary"}


def read_response(reader: BodyReader, body: Mapping[str, Any], key: ResponseKey | None = None) -> ParsedBody:
    """Read a body of /v1/responses. key: of the response; a new one by default. Raises `BodyError`: as
    `BodyReader.read`, with the field names of this endpoint."""
    fields = {name: value for name, value in body.items() if value is not None}
    check_neutral(fields, _NEUTRAL)
    if unknown := [name for name in fields if name in _CHAT_ONLY]:
        raise BodyError(f"{unknown[0]} is not a field of responses", unknown[0], "unknown_parameter")
    try:
        read = reader.read("/v1/chat/completions", _chat(fields), key)
    except BodyError as error:
        raise _renamed(error) from error
    return replace(read, fields=fields)


def _renamed(error: BodyError) -> BodyError:
    names = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning"}
    names |= {"max_completion_tokens": "max_output_tokens"}
    param, message = error.param, str(error)
    for old, new in names.items():
        if param is not None and (param == old or param.startswith((f"{old}[", f"{old}."))):
            param, message = param.replace(old, new, 1), message.replace(old, new)
    message = re.sub(r"^(tools\[\d+\])\.function\b", r"\1", message)  # tools are not nested here
    return BodyError(message, param, error.code, error.status)


def _chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent body of a chat."""
    own = {"input", "instructions", "text", "reasoning", "tools", "tool_choice", "include", "top_logprobs", *_NEUTRAL}
    own.add("max_output_tokens")
    chat = {name: value for name, value in fields.items() if name not in own}
    if "input" not in fields:
        raise BodyError("input is required", "input", "missing_required_parameter")
    chat["messages"] = _messages(fields["input"], fields.get("instructions"))
    chat |= _logprobs(fields.get("include", []), fields.get("top_logprobs", 0))
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if "text" in fields:
        chat |= _format(fields["text"])
    if "reasoning" in fields:
        chat |= _reasoning(fields["reasoning"])
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    if "tool_choice" in fields:
        choice = chat["tool_choice"] = fields["tool_choice"]
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    return chat


def _messages(items: object, instructions: object) -> list[dict[str, Any]]:
    if instructions is not None and not isinstance(instructions, str):
        raise BodyError(f"instructions must be a string; got {instructions!r}", "instructions", "invalid_type")
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BodyError(f"input must be a string or a list of items; got {items!r}", "input", "invalid_type")
    for at, item in enumerate(items):
        _add_item(messages, item, f"input[{at}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: object, at: str) -> None:
    """Add an item to the messages. Consecutive reasoning, text and calls of the assistant are one message."""
    if not isinstance(item, dict):
        raise BodyError(f"{at} must be an object; got {item!r}", at, "invalid_type")
    kind = item.get("type", "message")
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"), f"{at}.content")}
        if not isinstance(message["role"], str):
            raise BodyError(f"{at} must have a role; got {item!r}", at, "invalid_type")
        _join(messages, message) if message["role"] == "assistant" else messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not all(isinstance(value, str) for value in (call["id"], *function.values())):
            raise BodyError(f"{at} must have a call_id, a name and arguments; got {item!r}", at, "invalid_type")
        _join(messages, {"tool_calls": [call]})
    elif kind == "function_call_output":
        output, call_id = item.get("output"), item.get("call_id")
        if not isinstance(call_id, str):
            raise BodyError(f"{at} must have a call_id; got {item!r}", at, "invalid_type")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(output, f"{at}.output")})
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise BodyError(f"{at}.content must be a list of parts; got {parts!r}", f"{at}.content", "invalid_type")
        text = "".join(str(part.get("text", "")) for part in parts)
        _join(messages, {"reasoning": text} if text else {})
    else:
        raise BodyError(f"items of type {kind!r} are not supported", at, "unsupported_value")


def _join(messages: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Merge a part into the last message if that is the assistant's and lacks it; otherwise start a message."""
    last = messages[-1] if messages else {}
    present = {name for name, value in last.items() if value is not None}
    if last.get("role") != "assistant" or (set(part) - {"role", "tool_calls"}) & present:
        last = {"role": "assistant", "content": None}
        messages.append(last)
    calls = [*last.get("tool_calls", ()), *part.get("tool_calls", ())]
    last |= {**part, **({"tool_calls": calls} if calls else {})}


def _content(content: object, at: str) -> str:
    if isinstance(content, list):
        content = [
            part | {"type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
            for part in content
        ]
    return read_text(content, at)


def _logprobs(include: object, top: object) -> dict[str, Any]:
    if not isinstance(include, list) or any(each != _LOGPROBS for each in include):
        raise BodyError(f"include supports only {_LOGPROBS!r}; got {include!r}", "include")
    if not include and top != 0:
        raise BodyError(f"top_logprobs requires include: [{_LOGPROBS!r}]", "top_logprobs")
    return {"logprobs": True, "top_logprobs": top} if include else {}


def _format(text: object) -> dict[str, Any]:
    if not isinstance(text, dict) or not set(text) <= {"format", "verbosity"}:
        raise BodyError(f'text must be {{"format": {{…}}}}; got {text!r}', "text", "invalid_type")
    if text.get("verbosity") not in (None, "medium"):
        raise BodyError("text.verbosity is not supported: remove it", "text.verbosity", "unsupported_value")
    format = text.get("format")
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return {} if format is None else {"response_format": format}
    schema = {name: value for name, value in format.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _reasoning(reasoning: object) -> dict[str, Any]:
    if not isinstance(reasoning, dict) or not set(reasoning) <= _REASONING:
        raise BodyError(f'reasoning must be {{"effort": …}}; got {reasoning!r}', "reasoning", "invalid_type")
    if any(reasoning.get(name) is not None for name in ("summary", "generate_summary")):
        raise BodyError("reasoning summaries are not supported", "reasoning.summary", "unsupported_value")
    return {} if reasoning.get("effort") is None else {"reasoning_effort": reasoning["effort"]}


def _tools(tools: object) -> list[Any]:
    if not isinstance(tools, list):
        raise BodyError(f"tools must be a list; got {tools!r}", "tools", "invalid_type")
    nested = []
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BodyError(f"tools[{at}] must be a function; got {tool!r}", f"tools[{at}]", "unsupported_value")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        nested.append({"type": "function", "function": function})
    return nested


def tools_of(body: ParsedBody) -> Sequence[Any]:
    """The tools as the response repeats them."""
    return [{"parameters": None, "strict": None} | tool for tool in body.fields.get("tools", ())]
