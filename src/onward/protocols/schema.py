"""Read the bodies of /v1/chat/completions and /v1/completions, and make requests of them.

A field works as in OpenAI's reference, or is refused: none is silently ignored. The exceptions are labels, such as
`user`, which never change a response. Extensions are the options of `LanguageModel.generate` that JSON can express
(`top_k`, `min_p`, `repetition_penalty`, `beams` …), and `chat_template_kwargs`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeAlias

from onward.decoding.speculation import PredictedOutput, Speculator
from onward.errors import ContextOverflowError, RequestError, TokenizerError
from onward.language_model import LanguageModel, Request, split_chat_options
from onward.language_model.options import option_names
from onward.protocols.answer_key import ResponseKey
from onward.protocols.errors import BodyError
from onward.util.option_names import check_option_names

Kind: TypeAlias = Literal["chat.completion", "text_completion"]

# The endpoints, and the type of object that each returns.
URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}

# Names of the maximum number of new tokens.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
# Fields of a chat that `LanguageModel.chat` takes under the same names.
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
# Fields that are not options of the same name and meaning.
_BODY_FIELDS = {
    *("model", "messages", "prompt", "logprobs", "top_logprobs", "echo", "best_of", "chat_template_kwargs"),
    *("prediction", "response_format", "stream", "stream_options", "return_token_ids"),
}
# Options that JSON cannot express, or that mean something else in OpenAI's format.
_EXCLUDED_OPTIONS = {*LENGTHS, "logprobs", "draft", "stop_when", "cancel", "time_limit", "constraint", "adapter"}
# Fields that never change a response.
LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
# Fields that are supported only with these values, which have no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
# How errors name a grammar that cannot be compiled.
_GRAMMARS = {"json_schema": "JsonSchema(", "regex": "Regex(", "grammar": "Lark(", "choice": "Choice("}
_CHAT_FIELDS = ("messages", "top_logprobs", "chat_template_kwargs", "reasoning_effort", "prediction", "response_format")
_KIND_FIELDS: Mapping[Kind, frozenset[str]] = {
    "chat.completion": frozenset({*_CHAT_FIELDS, *_TOOL_FIELDS}),
    "text_completion": frozenset({"prompt", "echo", "best_of"}),
}


@dataclass(frozen=True)
class ParsedBody:
    """A body, parsed into requests.

    kind: type of the response object. model: name for the response. requests: one for each prompt; a chat has one.
    echoes: the prompts' texts, to be echoed. stream: respond with chunks. include_usage: in the last chunk.
    return_token_ids: in each choice. prompt_logprobs: in the response.
    key: of the response. fields: of the body.
    """

    kind: Kind
    model: str
    requests: tuple[Request, ...]
    echoes: tuple[str, ...] | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    prompt_logprobs: bool = False
    key: ResponseKey = field(default_factory=ResponseKey.new, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def seed(self) -> int | None:
        """The seed; None if it is still unset, or nothing is sampled."""
        return self.requests[0].options.seed if self._samples else None

    @property
    def _samples(self) -> bool:
        options = self.requests[0].options
        return options.temperature > 0 and options.beams == 1

    def seeded(self, seed: int | None = None) -> Self:
        """A copy with this seed or the key's for all requests, if the seed is unset and tokens are sampled."""
        if self.seed is not None or not self._samples:
            return self
        seed = self.key.seed if seed is None else seed
        return replace(self, requests=tuple(request.replace(seed=seed) for request in self.requests))


@dataclass(frozen=True)
class BodyReader:
    """Reads bodies for one model.

    model: its name in bodies; the name of a loaded adapter calls the model with that adapter. options: defaults for
    bodies; otherwise the model's own apply. variables: of the chat template, likewise. streams: whether responses may
    be streams.
    """

    lm: LanguageModel
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = False

    def read(self, url: str, body: object, key: ResponseKey | None = None, seed: int | None = None) -> ParsedBody:
        """Parse a body sent to one of `URLS`. Raises `BodyError`: a field is unknown, unsupported or of a wrong type;
        another model; no prompt. Raises `RequestError` or `TokenizerError`: as `LanguageModel.request`, if no field is
        to blame. key: of the response; a new one by default. seed: if the body has none; by default the key's."""
        kind = URLS[url]
        if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
            raise BodyError(f"the body must be a JSON object; got {type(body).__name__}", code="invalid_type")
        fields = {name: value for name, value in body.items() if value is not None}
        self._check_names(fields, kind)
        model, adapter = self._resolve_model(fields.get("model"))
        check_neutral(fields, NEUTRAL)
        options = {**self.options, **_options_of(fields), **_logprobs_of(fields, kind), "adapter": adapter}
        key = key or ResponseKey.new()
        response = {"model": model, "key": key, "fields": fields, **self._response_fields(fields)}
        try:
            if kind == "chat.completion":
                parsed = ParsedBody(kind, requests=(self._chat(fields, {**options, "now": key.time}),), **response)
            else:
                parsed = replace(self._completion(fields, options), **response)
        except BodyError:
            raise
        except ContextOverflowError as error:
            at = "messages" if kind == "chat.completion" else "prompt"
            raise BodyError(str(error), at, "context_length_exceeded") from error
        except (RequestError, TokenizerError) as error:
            raise _field_error(str(error), fields) from error
        needs_seed = len(parsed.requests) > 1  # the response reports one seed for all requests
        return parsed.seeded(seed) if needs_seed or seed is not None else parsed

    def _check_names(self, fields: Mapping[str, Any], kind: Kind) -> None:
        foreign = {name for other, names in _KIND_FIELDS.items() if other != kind for name in names}
        known = [
            *field_options(),
            *LENGTHS,
            *sorted(_BODY_FIELDS),
            *sorted(LABELS),
            *NEUTRAL,
            *sorted(_KIND_FIELDS[kind]),
        ]
        known = [name for name in dict.fromkeys(known) if name not in foreign]
        for name in fields:
            try:
                check_option_names([name], known)
            except RequestError as error:
                raise BodyError(str(error), name, "unknown_parameter") from error

    def _resolve_model(self, model: object) -> tuple[str, str | None]:
        """The model name for the response, and the adapter of that name."""
        if model is None or model == self.model:
            return self.model, None
        if isinstance(model, str) and model in self.lm.adapters:
            return model, model
        adapters = "".join(f", with the adapter {name!r}" for name in self.lm.adapters)
        raise BodyError(f"the model is {self.model!r}{adapters}; got {model!r}", "model", "model_not_found", 404)

    def _response_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `ParsedBody` for the format of the response."""
        stream = _boolean(fields, "stream")
        if stream and not self.streams:
            raise BodyError(_unsupported("stream", (False,)), "stream", "unsupported_value")
        if stream and fields.get("echo") and fields.get("logprobs") is not None:
            raise BodyError("echo with logprobs is not supported in a stream: remove one of the three", "echo")
        if stream and fields.get("prompt_logprobs") is not None:
            raise BodyError("prompt_logprobs is not supported in a stream: remove one of the two", "prompt_logprobs")
        options = fields.get("stream_options", {})
        if not isinstance(options, dict):
            raise BodyError(f"stream_options must be an object; got {options!r}", "stream_options", "invalid_type")
        if options and not stream:
            raise BodyError("stream_options requires stream: true", "stream_options")
        for name in options:
            if name not in ("include_usage", "include_obfuscation"):
                raise BodyError(f"unknown option {name!r} in stream_options", "stream_options", "unknown_parameter")
        if _boolean(options, "include_obfuscation", "stream_options."):
            raise BodyError("include_obfuscation is not supported: remove it", "stream_options", "unsupported_value")
        return {
            "stream": stream,
            "include_usage": _boolean(options, "include_usage", "stream_options."),
            "return_token_ids": _boolean(fields, "return_token_ids"),
            "prompt_logprobs": fields.get("prompt_logprobs") is not None,
        }

    def _chat(self, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Request:
        if "messages" not in fields:
            raise BodyError("messages is required", "messages", "missing_required_parameter")
        template = {**self.variables, **read_template_variables(self.lm, fields)}
        messages = read_messages(fields["messages"])
        if "prediction" in fields:
            predicted = self.lm.encode(_predicted(fields["prediction"]), add_special_tokens=False)
            options = {**options, "draft": Speculator(PredictedOutput(predicted))}
        if (schema := _schema_of(fields.get("response_format"))) is not None:
            options = {**options, "json_schema": schema}
        tools = {name: fields[name] for name in _TOOL_FIELDS if name in fields}
        return self.lm.chat_request(messages, **{**options, **tools, "template": template})

    def _completion(self, fields: Mapping[str, Any], options: dict[str, Any]) -> ParsedBody:
        if "prompt" not in fields:
            raise BodyError("prompt is required", "prompt", "missing_required_parameter")
        best_of, echo = fields.get("best_of"), _boolean(fields, "echo")
        if best_of not in (None, fields.get("n", 1)):
            raise BodyError("best_of is not supported unless it equals n: remove it", "best_of", "unsupported_value")
        logprobs = options.get("logprobs")
        if echo and logprobs is not None and options.setdefault("prompt_logprobs", logprobs) != logprobs:
            message = "prompt_logprobs differs from logprobs, which echo applies to the prompt too: use one number"
            raise BodyError(message, "prompt_logprobs")
        prompts = _prompts(fields["prompt"])
        requests = tuple(self.lm.request(prompt, **options) for prompt in prompts)
        echoes = None
        if echo:
            echoes = tuple(prompt if isinstance(prompt, str) else self.lm.decode(prompt) for prompt in prompts)
        return ParsedBody("text_completion", self.model, requests, echoes)


def field_options() -> list[str]:
    """The options of `generate` that are fields of bodies."""
    return [name for name in option_names() if name not in _EXCLUDED_OPTIONS]


def _options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a body, except logprobs."""
    options = {name: fields[name] for name in field_options() if name in fields}
    lengths = {name: fields[name] for name in LENGTHS if name in fields}
    if len(set(map(repr, lengths.values()))) > 1:
        raise BodyError(f"{' and '.join(lengths)} mean the same, but differ: use one", next(iter(lengths)))
    if lengths:
        options["max_new_tokens"] = next(iter(lengths.values()))
    if "logit_bias" in options:
        options["logit_bias"] = _logit_bias(options["logit_bias"])
    return options


def _logit_bias(bias: object) -> dict[int, Any]:
    if not isinstance(bias, dict) or not all(re.fullmatch(r"[0-9]{1,18}", token) for token in bias):
        raise BodyError(f"logit_bias must be an object that maps token ids to numbers; got {bias!r}", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _logprobs_of(fields: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """A chat has a boolean and a number, a completion only a number."""
    logprobs, top = fields.get("logprobs"), fields.get("top_logprobs")
    if kind == "text_completion":
        return {} if logprobs is None else {"logprobs": logprobs}
    if logprobs is not None and not isinstance(logprobs, bool):
        raise BodyError(f"logprobs of a chat must be true or false; got {logprobs!r}", "logprobs", "invalid_type")
    if top is not None and not logprobs:
        raise BodyError("top_logprobs requires logprobs: true", "top_logprobs")
    return {"logprobs": 0 if top is None else top} if logprobs else {}


def _boolean(fields: Mapping[str, Any], name: str, within: str = "") -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise BodyError(f"{within}{name} must be true or false; got {value!r}", f"{within}{name}", "invalid_type")
    return bool(value)


def _predicted(prediction: object) -> str:
    if not isinstance(prediction, dict) or prediction.get("type") != "content" or len(prediction) > 2:
        message = f'prediction must be {{"type": "content", "content": "…"}}; got {prediction!r}'
        raise BodyError(message, "prediction", "invalid_type")
    return read_text(prediction.get("content"), "prediction.content")


def _schema_of(response_format: object) -> dict[str, Any] | None:
    """The JSON Schema for the text; None for any text."""
    at = "response_format"
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return {"type": "object"}
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        message = f"response_format must have the type text, json_object or json_schema; got {response_format!r}"
        raise BodyError(message, at, "unsupported_value")
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict) or set(response_format) != {"type", "json_schema"}:
        message = 'response_format must be {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
        raise BodyError(f"{message}; got {response_format!r}", at, "invalid_type")
    assert isinstance(named, dict)
    if unknown := set(named) - {"name", "description", "schema", "strict"}:
        raise BodyError(f"unknown {min(unknown)!r} in response_format.json_schema", at, "unknown_parameter")
    return schema


def read_template_variables(lm: LanguageModel, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's variables in a body."""
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise BodyError("chat_template_kwargs must be an object", "chat_template_kwargs", "invalid_type")
    if "reasoning_effort" in fields:
        variables = {"reasoning_effort": fields["reasoning_effort"], **variables}
    # This raises for names that the template doesn't read. They may coincide with names of options.
    split_chat_options(lm.chat_template, dict.fromkeys(set(variables) - set(option_names())))
    return variables


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Messages for the chat template: each content is a string, and the role developer becomes system."""
    if not isinstance(messages, list) or not messages:
        raise BodyError(f"messages must be a non-empty list of objects; got {messages!r}", "messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BodyError(f"{at} must be an object with a role; got {message!r}", at, "invalid_type")
    content = message.get("content")
    if content is not None:
        content = read_text(content, f"{at}.content")
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content}


def read_text(content: object, at: str) -> str:
    """Content: a string, or text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BodyError(f"content must be a string; got {content!r}", at, "invalid_type")
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BodyError("parts of content must be text", f"{at}[{place}]", "unsupported_value")
    return "".join(part["text"] for part in content)


def _prompts(prompt: object) -> list[str | list[int]]:
    items: list[Any] = [prompt] if not isinstance(prompt, list) or _is_ids(prompt) else prompt
    if not items or not all(isinstance(item, str) or _is_ids(item) for item in items):
        raise BodyError(
            f"prompt must be a string, token ids, or a list of either; got {prompt!r}", "prompt", "invalid_type"
        )
    return items


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def check_neutral(fields: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raise `BodyError` for a field whose value is not among those in `neutral`."""
    for name, supported in neutral.items():
        if name in fields and fields[name] not in supported:
            raise BodyError(_unsupported(name, supported), name, "unsupported_value")


def _unsupported(name: str, supported: Sequence[Any]) -> str:
    others = f", or use {' or '.join(map(repr, supported))}" if supported else ""
    return f"{name} is not supported: remove it{others}"


def _field_error(message: str, fields: Mapping[str, Any]) -> BodyError:
    """An option's error, under the name of the field that set it."""
    options = dict.fromkeys(LENGTHS, "max_new_tokens") | {"response_format": "json_schema"}
    if "top_logprobs" in fields:
        options |= {"top_logprobs": "logprobs", "logprobs": ""}
    for name in fields:
        option = options.get(name, name)
        if option and re.match(rf"{re.escape(option)}\b", message):
            return BodyError(name + message.removeprefix(option), name)
        if option in _GRAMMARS and message.startswith(_GRAMMARS[option]):
            return BodyError(message, name)
    return BodyError(message)
