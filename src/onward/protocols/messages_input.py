"""The input of /v1/messages, Anthropic's content blocks and tools, as the messages and tools of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationInfo

from onward.protocols.body import FieldError, JsonSchema, Validation, validation_of
from onward.util.text import brief


class _Block(NamedTuple):
    """The fields of a content block: those that it must have, with their types, and others."""

    required: Mapping[str, type]
    others: tuple[str, ...] = ()


# `cache_control` has no effect: prompts are always cached. Signatures are not checked.
_BLOCKS: Mapping[str, _Block] = {
    "text": _Block({"text": str}, ("cache_control", "citations")),
    "tool_use": _Block({"id": str, "name": str, "input": dict}, ("cache_control", "caller", "toolset_name")),
    "tool_result": _Block({"tool_use_id": str}, ("content", "is_error", "cache_control", "toolset_name")),
    "thinking": _Block({"thinking": str}, ("signature",)),
    "redacted_thinking": _Block({"data": str}),
}
# The blocks of a message, by its role.
_ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_NAMES: Mapping[type, str] = {str: "a string", dict: "an object"}
_TOOL_KEYS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
# Keys of tools that change nothing here, with the values for which that is so; None for any.
_TOOL_HINTS: Mapping[str, tuple[Any, ...] | None] = {
    "eager_input_streaming": None,  # arguments are always streamed as they are generated
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}


def _schema_of(*kinds: str) -> JsonSchema:
    """The JSON Schema of a string or blocks of these types, for the document."""
    types: Mapping[type, JsonSchema] = {str: {"type": "string"}, dict: {"type": "object"}}
    blocks = []
    for kind in kinds:
        required, others = _BLOCKS[kind]
        fields = {name: types[of] for name, of in required.items()}
        known = {"content": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "is_error": {"type": "boolean"}}
        more = {name: known.get(name, {"description": "Without effect."}) for name in others}
        properties = {"type": {"const": kind}, **fields, **more}
        required_names = ["type", *required]
        blocks.append(
            {"type": "object", "properties": properties, "required": required_names, "additionalProperties": False}
        )
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": blocks}}]}


# The JSON Schemas of texts and messages, for the document.
TEXT_SCHEMA = _schema_of("text")
MESSAGE_SCHEMA: JsonSchema = {
    "type": "object",
    "properties": {"role": {"enum": [*_ROLES]}, "content": _schema_of(*_BLOCKS)},
    "required": ["role", "content"],
    "additionalProperties": False,
}
TOOL_SCHEMA: JsonSchema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"type": "string"},
        "input_schema": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name", "input_schema"],
}


def text_of(value: Any, validation: Validation, at: str = "") -> str:
    """The text of a string or of text blocks. Raises `FieldError` for other values. at: its place."""
    return "".join([block["text"] for block in _blocks(value, ("text",), validation, at)])


def chat_messages(value: Any, info: ValidationInfo) -> list[dict[str, Any]]:
    """Messages of a chat from those of a body. Raises `FieldError`: they are invalid."""
    if not isinstance(value, list) or not value:
        raise FieldError(f"must be a list of at least one message; got {brief(value)}", "invalid_type")
    validation = validation_of(info)
    return joined([part for at, message in enumerate(value) for part in _parts(message, validation, f"[{at}]")])


def joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with consecutive ones of a role as one, except results of tools. Their texts are separated by a
    blank line."""
    result: list[dict[str, Any]] = []
    for message in messages:
        last = result[-1] if result else {}
        if message["role"] == "tool" or message["role"] != last.get("role"):
            result.append({**message})
            continue
        for name in ("content", "reasoning"):
            if message.get(name):
                last[name] = f"{last[name]}\n\n{message[name]}" if last.get(name) else message[name]
        if message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return result


def _parts(message: Any, validation: Validation, at: str) -> list[dict[str, Any]]:
    """A message as those of a chat: a result of a tool is one of its own."""
    if not isinstance(message, dict):
        raise FieldError(f"must be an object; got {brief(message)}", "invalid_type", at)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        problem = f"must be {', '.join(map(repr, _ROLES))}; got {brief(role)}"
        raise FieldError(problem, "invalid_value", f"{at}.role")
    _check_keys(message, ("role", "content"), at)
    blocks = _blocks(message.get("content"), _ROLES[role], validation, f"{at}.content")
    if role == "assistant":
        return [_assistant(blocks)]
    parts: list[dict[str, Any]] = []
    texts: list[str] = []
    for place, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            parts.append({"role": role, "content": "".join(texts)})
            texts = []
        parts.append(_tool_result(block, validation, f"{at}.content[{place}]"))
    if texts or not parts:
        parts.append({"role": role, "content": "".join(texts)})
    return parts


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A message of the assistant. Redacted reasoning cannot be read, so it is left out."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    reasoning = "".join([block["thinking"] for block in blocks if block["type"] == "thinking"])
    calls = [
        {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if reasoning:
        message["reasoning"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _tool_result(block: Mapping[str, Any], validation: Validation, at: str) -> dict[str, Any]:
    """The message of a tool. Chats have no flag for errors, so the text says that it is one."""
    content, is_error = block.get("content"), block.get("is_error")
    if is_error not in (None, True, False):
        raise FieldError(f"must be true or false; got {brief(is_error)}", "invalid_type", f"{at}.is_error")
    text = "" if content is None else text_of(content, validation, f"{at}.content")
    return {
        "role": "tool",
        "tool_call_id": block["tool_use_id"],
        "content": f"Error: {text}" if is_error else text,
    }


def _blocks(value: Any, kinds: Sequence[str], validation: Validation, at: str) -> list[dict[str, Any]]:
    """The content blocks of a value; a string is one. kinds: those that are allowed. Raises `FieldError`."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise FieldError(f"must be a string or a list of content blocks; got {brief(value)}", "invalid_type", at)
    if len(value) > validation.limits.parts:
        raise FieldError(f"has {len(value)} blocks; this server allows at most {validation.limits.parts}", at=at)
    for place, block in enumerate(value):
        _check_block(block, kinds, f"{at}[{place}]")
    return value


def _check_block(block: Any, kinds: Sequence[str], at: str) -> None:
    if not isinstance(block, dict):
        raise FieldError(f"must be a content block; got {brief(block)}", "invalid_type", at)
    kind: Any = block.get("type")
    if kind not in kinds:
        problem = f"is of the type {brief(kind)}, which is not supported here: use {' or '.join(kinds)}"
        raise FieldError(problem, "unsupported_value", at)
    required, others = _BLOCKS[kind]
    for name, expected in required.items():
        if not isinstance(block.get(name), expected):
            problem = f"must be {_NAMES[expected]}; got {brief(block.get(name))}"
            raise FieldError(problem, "invalid_type", f"{at}.{name}")
    _check_keys(block, ("type", *required, *others), at)


def _check_keys(value: Mapping[str, Any], known: Sequence[str], at: str) -> None:
    if (unknown := next((name for name in value if name not in known), None)) is not None:
        raise FieldError("is not a field: remove it", "unknown_parameter", f"{at}.{unknown[:60]}")


def chat_tools(value: Any) -> list[dict[str, Any]]:
    """Tools of a chat from those of a body. Raises `FieldError`: one is invalid, or runs on Anthropic's servers."""
    if not isinstance(value, list):
        raise FieldError(f"must be a list of tools; got {brief(value)}", "invalid_type")
    return [_chat_tool(tool, f"[{at}]") for at, tool in enumerate(value)]


def _chat_tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise FieldError(f"must be an object; got {brief(tool)}", "invalid_type", at)
    if (kind := tool.get("type")) not in (None, "custom"):
        problem = f"is of the type {brief(kind)}, which is not supported: use tools with an input_schema"
        raise FieldError(problem, "unsupported_value", at)
    _check_keys(tool, (*_TOOL_KEYS, *_TOOL_HINTS), at)
    for name, harmless in _TOOL_HINTS.items():
        if tool.get(name) is not None and harmless is not None and tool[name] not in harmless:
            raise FieldError("is not supported: remove it", "unsupported_value", f"{at}.{name}")
    if not isinstance(schema := tool.get("input_schema"), dict):
        raise FieldError(f"must be a JSON schema; got {brief(schema)}", "invalid_type", f"{at}.input_schema")
    function = {name: tool.get(name) for name in ("name", "description", "strict")} | {"parameters": schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
