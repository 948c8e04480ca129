"""Items of responses: the messages that they are, their stored form, and reasoning that clients send back."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from onward.protocols.body import BodyError, FieldError, Limits, Validation
from onward.protocols.chat_fields import joined_text
from onward.protocols.protocol import Item, ResponseKey, StoredItems
from onward.util.text import brief

# The types of parts that are texts.
_TEXT_PARTS = ("input_text", "output_text", "text")
# Items of calls: the type of the tool, and the key of its text.
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
# Tools that OpenAI's servers or its models' own environments run. Agents send a search with every request, which the
# model may leave unused.
SEARCH_TOOLS = ("web_search", "web_search_preview")
HOSTED_TOOLS = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"),
    *("local_shell", "mcp", "shell", "tool_search"),
)
NEEDS_STORE = (
    "needs a server that stores responses: send all items of the conversation as input instead (onward deploy stores "
    "responses with --response-store FILE)"
)


def messages_of(before: Sequence[Item], items: Sequence[Item], limits: Limits, field: str) -> list[dict[str, Any]]:
    """Items as the messages of a chat. before: earlier items, which are valid. field: the name of `items`, for errors.
    Raises `BodyError`: an item is invalid."""
    if len(before) + len(items) > limits.messages:
        message = f"{field} and what it continues are {len(before) + len(items)} items; this server allows at most"
        raise BodyError(f"{message} {limits.messages}", field)
    messages = _MessageBuilder(Validation(limits))
    for item in before:
        messages.add(item, "")
    for at, item in enumerate(items):
        try:
            messages.add(item, f"[{at}]")
        except FieldError as error:
            raise BodyError(f"{field}{error.at} {error.problem}", f"{field}{error.at}", error.code) from None
    return messages.messages


def resolved(items: Sequence[Item], stored: StoredItems | None) -> list[Item]:
    """Items, with those that they refer to in place of references. Raises `BodyError`: there is none with that id."""
    resolved = []
    for at, item in enumerate(items):
        is_reference = item.get("type") == "item_reference" or (item.keys() <= {"type", "id"} and "id" in item)
        if not is_reference:
            resolved.append(item)
        elif stored is None:
            raise BodyError(f"input[{at}] {NEEDS_STORE}", f"input[{at}]", "unsupported_value")
        elif not isinstance(id := item.get("id"), str):
            raise BodyError(f"input[{at}] must have an id; got {brief(item)}", f"input[{at}]", "invalid_type")
        else:
            resolved.append(stored.item(id, f"input[{at}].id"))
    return resolved


def full_name(name: Any, namespace: str | None) -> Any:
    """The name by which the model knows a tool."""
    return f"{namespace}.{name}" if namespace else name


def name_fields(name: str | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of a call with a tool's name, from its `full_name`. tools: those of the body."""
    for tool in tools:
        start = f"{tool.get('name')}."
        if tool["type"] == "namespace" and name is not None and name.startswith(start):
            return {"name": name.removeprefix(start), "namespace": tool["name"]}
    return {"name": name}


class _MessageBuilder:
    """Makes messages of items. Consecutive reasoning, text and calls of the assistant are one message."""

    def __init__(self, validation: Validation) -> None:
        self.messages: list[dict[str, Any]] = []
        self._validation = validation

    def add(self, item: Any, at: str) -> None:
        """Add an item. Raises `FieldError`: it is invalid. at: its place."""
        kind = item.get("type") or "message"
        id = item.get("id") or ""
        for name, value in (("type", kind), ("id", id)):
            if not isinstance(value, str):
                raise FieldError(f"must be a string; got {brief(value)}", "invalid_type", f"{at}.{name}")
        if kind == "message":
            role, content = item.get("role"), self._text(item.get("content"), f"{at}.content")
            if not isinstance(role, str):
                raise FieldError(f"must have a role; got {brief(item)}", "invalid_type", at)
            message = {"role": "system" if role == "developer" else role, "content": content}
            self._join(message) if role == "assistant" else self.messages.append(message)
        elif kind in _CALLS:
            type, key = _CALLS[kind]
            name, namespace = item.get("name"), item.get("namespace")
            if not isinstance(namespace, str | None):
                raise FieldError(f"must be a string; got {brief(namespace)}", "invalid_type", f"{at}.namespace")
            called = {"name": full_name(name, namespace), key: item.get(key) or ""}
            call = {"id": item.get("call_id"), "type": type, type: called}
            if not all(isinstance(value, str) for value in (call["id"], *called.values())):
                problem = f"must have a call_id, a name and {key}; got {brief(item)}"
                raise FieldError(problem, "invalid_type", at)
            self._join({"tool_calls": [call]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if not isinstance(call_id := item.get("call_id"), str):
                raise FieldError(f"must have a call_id; got {brief(item)}", "invalid_type", at)
            output = self._text(item.get("output"), f"{at}.output")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            parts = item.get("content") or []
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                problem = f"must be a list of parts; got {brief(parts)}"
                raise FieldError(problem, "invalid_type", f"{at}.content")
            text = "".join([str(part.get("text", "")) for part in parts])
            if (encrypted := item.get("encrypted_content")) is not None:
                try:
                    text = decoded_reasoning(encrypted)
                except FieldError as problem:
                    raise FieldError(problem.problem, problem.code, f"{at}.encrypted_content") from None
            self._join({"reasoning": text} if text else {})
        else:
            raise FieldError(f"is of the type {brief(kind)}, which is not supported", "unsupported_value", at)

    def _join(self, part: Mapping[str, Any]) -> None:
        """Merge a part into the last message if that is the assistant's and lacks it; otherwise start a message."""
        last = self.messages[-1] if self.messages else {}
        overlaps = any(last.get(name) is not None for name in part if name not in ("role", "tool_calls"))
        if last.get("role") != "assistant" or overlaps:
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        if "tool_calls" in part:
            last.setdefault("tool_calls", []).extend(part["tool_calls"])
        last |= {name: value for name, value in part.items() if name != "tool_calls"}

    def _text(self, content: Any, at: str) -> str:
        if content is None:
            raise FieldError("must be a string or a list of text parts; got null", "invalid_type", at)
        try:
            return joined_text(content, self._validation, _TEXT_PARTS)  # type: ignore[no-any-return]
        except FieldError as problem:
            raise FieldError(problem.problem, problem.code, f"{at}{problem.at}") from None


# The prefix of an item's id, by its type.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def with_ids(items: Sequence[Item], key: ResponseKey) -> list[Item]:
    """Items of an input as OpenAI's API returns them: each with a type, an id and a status, and texts as parts. Those
    that have an id keep it."""
    complete = []
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        id = f"{_PREFIXES.get(kind, 'item')}_{key.derived(f'input {at}')}"
        full = {"id": id, "type": kind, "status": "completed"}
        full |= {name: value for name, value in item.items() if value is not None}
        if kind == "message":
            full["content"] = _parts(item.get("role"), item["content"])
        elif kind == "reasoning":
            full.setdefault("summary", [])
        complete.append(full)
    return complete


def _parts(role: Any, content: Any) -> list[Any]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    of_output = {"type": "output_text", "annotations": [], "logprobs": []}
    start = of_output if role == "assistant" else {"type": "input_text"}
    return [start | {name: value for name, value in part.items() if name != "type"} for part in parts]


_MARK = "onward-reasoning-1."
_DIGEST_BYTES = 16


def encoded_reasoning(text: str) -> str:
    """The `encrypted_content` of reasoning: an encoding with a digest. It hides nothing, since the reasoning is also
    the item's `content`, and any Onward server can read it."""
    content = text.encode("utf-8", "replace")
    return _MARK + base64.b64encode(_digest(content) + content).decode()


def decoded_reasoning(value: Any) -> str:
    """The reasoning in an `encrypted_content`. Raises `FieldError`: it is of another API, or was altered."""
    if not isinstance(value, str) or not value.startswith(_MARK):
        raise FieldError(f"is not of this API: remove it; got {brief(value)}", "invalid_encrypted_content")
    try:
        content = base64.b64decode(value.removeprefix(_MARK), validate=True)
        digest, text = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:].decode()
    except ValueError:
        digest, text = b"", ""
    if digest != _digest(text.encode()):
        raise FieldError("was altered: send it as it was received, or remove it", "invalid_encrypted_content")
    return text


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512  # OpenAI's


def _checked(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > _MAX_PAIRS:
        raise FieldError(f"has {len(metadata)} entries; at most {_MAX_PAIRS} are allowed")
    for name, value in metadata.items():
        if len(name) > _MAX_NAME or len(value) > _MAX_VALUE:
            problem = f"has names of at most {_MAX_NAME} characters, and values of at most {_MAX_VALUE}"
            raise FieldError(f"{problem}; got {brief(name)}: {brief(value)}")
    return metadata


_OBJECT = {"type": "object", "maxProperties": _MAX_PAIRS, "additionalProperties": {"type": "string"}}
_SCHEMA = {"anyOf": [_OBJECT, {"type": "null"}]}
# Labels that are stored and returned, and have no other effect.
Metadata = Annotated[
    dict[str, str] | None, AfterValidator(lambda value: value and _checked(value)), WithJsonSchema(_SCHEMA)
]
