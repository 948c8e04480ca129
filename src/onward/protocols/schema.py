"""Bodies of /v1/chat/completions and /v1/completions, checked and made requests of.

A field is served as OpenAI's reference has it, or refused: nothing is accepted and left out. The exceptions are labels,
such as `user`, which never change an answer. Fields that OpenAI does not have are the options of
`LanguageModel.generate` that JSON can say (`top_k`, `min_p`, `repetition_penalty`, `beams` …), and
`chat_template_kwargs`.
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

# What a request is sent to, and the kind of object that answers it.
URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}

# Names of the most tokens to generate.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
# Fields of a chat that `LanguageModel.chat` takes under the same names.
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
# Fields that are read here and are no options of the same name and meaning.
_OWN = {
    *("model", "messages", "prompt", "logprobs", "top_logprobs", "echo", "best_of", "chat_template_kwargs"),
    *("prediction", "response_format", "stream", "stream_options", "return_token_ids"),
}
# Options that JSON cannot say, or that mean something else in OpenAI's format.
_NO_FIELDS = {
    *LENGTHS,
    "logprobs",
    "draft",
    "stop_when",
    "cancel",
    "time_limit",
    "constraint",
    "adapter",
}
# Fields that change no answer.
LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
# Fields of which only these values are served: those that ask for nothing.
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
# How errors call what cannot be compiled.
_GRAMMARS = {"json_schema": "JsonSchema(", "regex": "Regex(", "grammar": "Lark(", "choice": "Choice("}
_OF_KIND: Mapping[Kind, frozenset[str]] = {
    "chat.completion": frozenset(
        {
            *("messages", "top_logprobs", "chat_template_kwargs", "reasoning_effort", "prediction", "response_format"),
            *_OF_TOOLS,
        }
    ),
    "text_completion": frozenset({"prompt", "echo", "best_of"}),
}


@dataclass(frozen=True)
class ParsedBody:
    """What a body asks for.

    kind: of the object that answers. model: the name that the answer gives. requests: one for each prompt; a chat has
    one. echoes: the text that the answer to each prompt begins with. stream: whether the answer comes in chunks.
    include_usage: whether the last of them has the usage. return_token_ids: whether choices have their ids.
    prompt_logprobs: whether the answer has those of the prompt.
    key: of the answer. given: the fields of the body.
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
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def seed(self) -> int | None:
        """What the answer is drawn with; None where none is given yet, or nothing is drawn."""
        return self.requests[0].options.seed if self._draws else None

    @property
    def _draws(self) -> bool:
        options = self.requests[0].options
        return options.temperature > 0 and options.beams == 1

    def seeded(self, seed: int | None = None) -> Self:
        """The same with this seed or the key's, one for all requests, where none is given and tokens are drawn."""
        if self.seed is not None or not self._draws:
            return self
        seed = self.key.seed if seed is None else seed
        return replace(self, requests=tuple(request.replace(seed=seed) for request in self.requests))


@dataclass(frozen=True)
class BodyReader:
    """Reads bodies for one model.

    model: the name that bodies call it by; the name of a loaded adapter calls the model with it. options: those that a
    body does not give; what they leave open are the model's own defaults. variables: of the chat template, likewise.
    streams: whether answers may be streams.
    """

    lm: LanguageModel
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = False

    def read(self, url: str, body: object, key: ResponseKey | None = None, seed: int | None = None) -> ParsedBody:
        """The requests of a body that was sent to one of `URLS`.

        key: of the answer; a new one by default. seed: what it is drawn with if it does not say; else the key's.

        Raises:
            BodyError: a field that is unknown, not served or of a wrong type; another model; no prompt.
            RequestError, TokenizerError: as `LanguageModel.request` raises them, where no field is to blame.
        """
        kind = URLS[url]
        if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
            raise BodyError(f"a body must be a JSON object; got {type(body).__name__}", code="invalid_type")
        fields = {name: value for name, value in body.items() if value is not None}
        self._check_names(fields, kind)
        model, adapter = self._called(fields.get("model"))
        check_neutral(fields, NEUTRAL)
        options = {**self.options, **_options_of(fields), **_logprobs_of(fields, kind), "adapter": adapter}
        key = key or ResponseKey.new()
        answer = {"model": model, "key": key, "given": fields, **self._answer_fields(fields)}
        try:
            if kind == "chat.completion":
                read = ParsedBody(kind, requests=(self._chat(fields, {**options, "now": key.time}),), **answer)
            else:
                read = replace(self._completion(fields, options), **answer)
        except BodyError:
            raise
        except ContextOverflowError as error:
            at = "messages" if kind == "chat.completion" else "prompt"
            raise BodyError(str(error), at, "context_length_exceeded") from error
        except (RequestError, TokenizerError) as error:
            raise _of_field(str(error), fields) from error
        has_to_have_one = len(read.requests) > 1  # the answer has one seed to report
        return read.seeded(seed) if has_to_have_one or seed is not None else read

    def _check_names(self, fields: Mapping[str, Any], kind: Kind) -> None:
        of_others = {name for other, names in _OF_KIND.items() if other != kind for name in names}
        known = [*field_options(), *LENGTHS, *sorted(_OWN), *sorted(LABELS), *NEUTRAL, *sorted(_OF_KIND[kind])]
        known = [name for name in dict.fromkeys(known) if name not in of_others]
        for name in fields:
            try:
                check_option_names([name], known)
            except RequestError as error:
                raise BodyError(str(error), name, "unknown_parameter") from error

    def _called(self, model: object) -> tuple[str, str | None]:
        """The name that the answer gives, and the adapter that was called by it."""
        if model is None or model == self.model:
            return self.model, None
        if isinstance(model, str) and model in self.lm.adapters:
            return model, model
        adapters = "".join(f", with the adapter {name!r}" for name in self.lm.adapters)
        raise BodyError(f"the model here is {self.model!r}{adapters}; got {model!r}", "model", "model_not_found", 404)

    def _answer_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """How the answer is to come: fields of `ParsedBody`."""
        stream = _boolean(fields, "stream")
        if stream and not self.streams:
            raise BodyError(_not_served("stream", (False,)), "stream", "unsupported_value")
        if stream and fields.get("echo") and fields.get("logprobs") is not None:
            raise BodyError("echo with logprobs is not served in a stream: leave out one of the three", "echo")
        if stream and fields.get("prompt_logprobs") is not None:
            raise BodyError("prompt_logprobs are not served in a stream: leave out one of the two", "prompt_logprobs")
        options = fields.get("stream_options", {})
        if not isinstance(options, dict):
            raise BodyError(f"stream_options must be an object; got {options!r}", "stream_options", "invalid_type")
        if options and not stream:
            raise BodyError("stream_options are for stream: true", "stream_options")
        for name in options:
            if name not in ("include_usage", "include_obfuscation"):
                raise BodyError(f"unknown option {name!r} of stream_options", "stream_options", "unknown_parameter")
        if _boolean(options, "include_obfuscation", "stream_options."):
            raise BodyError("include_obfuscation is not served: leave it out", "stream_options", "unsupported_value")
        usage = _boolean(options, "include_usage", "stream_options.")
        return_token_ids = _boolean(fields, "return_token_ids")
        of_prompt = fields.get("prompt_logprobs") is not None
        reports = {"return_token_ids": return_token_ids, "prompt_logprobs": of_prompt}
        return {"stream": stream, "include_usage": usage, **reports}

    def _chat(self, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Request:
        if "messages" not in fields:
            raise BodyError("a chat needs messages", "messages", "missing_required_parameter")
        variables = read_template_variables(self.lm, fields)
        messages = read_messages(fields["messages"])
        if "prediction" in fields:
            predicted = self.lm.encode(_predicted(fields["prediction"]), add_special_tokens=False)
            options = {**options, "draft": Speculator(PredictedOutput(predicted))}
        schema = _schema_of(fields.get("response_format"))
        if schema is not None:
            options = {**options, "json_schema": schema}
        of_tools = {name: fields[name] for name in _OF_TOOLS if name in fields}
        template = {**self.variables, **variables}
        return self.lm.chat_request(messages, **{**options, **of_tools, "template": template})

    def _completion(self, fields: Mapping[str, Any], options: dict[str, Any]) -> ParsedBody:
        if "prompt" not in fields:
            raise BodyError("a completion needs a prompt", "prompt", "missing_required_parameter")
        best_of, echo = fields.get("best_of"), fields.get("echo", False)
        if best_of not in (None, fields.get("n", 1)):
            raise BodyError("best_of is not served, but for that of n: leave it out", "best_of", "unsupported_value")
        if not isinstance(echo, bool):
            raise BodyError(f"echo must be true or false; got {echo!r}", "echo", "invalid_type")
        logprobs = options.get("logprobs")
        if echo and logprobs is not None and options.setdefault("prompt_logprobs", logprobs) != logprobs:
            message = "prompt_logprobs differs from logprobs, which echo reports of the prompt too: give one number"
            raise BodyError(message, "prompt_logprobs")
        prompts = _prompts(fields["prompt"])
        requests = tuple(self.lm.request(prompt, **options) for prompt in prompts)
        echoes = None
        if echo:
            echoes = tuple(prompt if isinstance(prompt, str) else self.lm.decode(prompt) for prompt in prompts)
        return ParsedBody("text_completion", self.model, requests, echoes)


def field_options() -> list[str]:
    """The options of `generate` that are fields of bodies."""
    return [name for name in option_names() if name not in _NO_FIELDS]


def _options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a body gives, logprobs aside."""
    options = {name: fields[name] for name in field_options() if name in fields}
    lengths = {name: fields[name] for name in LENGTHS if name in fields}
    if len(set(map(repr, lengths.values()))) > 1:
        raise BodyError(f"{' and '.join(lengths)} differ, and mean the same: give one", next(iter(lengths)))
    if lengths:
        options["max_new_tokens"] = next(iter(lengths.values()))
    if "logit_bias" in options:
        options["logit_bias"] = _logit_bias(options["logit_bias"])
    return options


def _logit_bias(bias: object) -> dict[int, Any]:
    """JSON's names are texts, so ids are."""
    if not isinstance(bias, dict) or not all(re.fullmatch(r"[0-9]{1,18}", token) for token in bias):
        raise BodyError(f"logit_bias must be an object of ids with numbers; got {bias!r}", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _logprobs_of(fields: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """A chat asks with a boolean and a number beside it, a completion with a number."""
    logprobs, top = fields.get("logprobs"), fields.get("top_logprobs")
    if kind == "text_completion":
        return {} if logprobs is None else {"logprobs": logprobs}
    if logprobs is not None and not isinstance(logprobs, bool):
        raise BodyError(f"logprobs of a chat must be true or false; got {logprobs!r}", "logprobs", "invalid_type")
    if top is not None and not logprobs:
        raise BodyError("top_logprobs needs logprobs: true beside it", "top_logprobs")
    return {"logprobs": 0 if top is None else top} if logprobs else {}


def _boolean(fields: Mapping[str, Any], name: str, within: str = "") -> bool:
    """A field that is true or false; not given is false."""
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise BodyError(f"{within}{name} must be true or false; got {value!r}", f"{within}{name}", "invalid_type")
    return bool(value)


def _predicted(prediction: object) -> str:
    """The text that the answer probably is, or begins with."""
    if not isinstance(prediction, dict) or prediction.get("type") != "content" or len(prediction) > 2:
        message = f'prediction must be {{"type": "content", "content": a text}}; got {prediction!r}'
        raise BodyError(message, "prediction", "invalid_type")
    return read_text(prediction.get("content"), "prediction.content")


def _schema_of(response_format: object) -> dict[str, Any] | None:
    """The JSON Schema that the answer has to meet; None for any text."""
    at = "response_format"
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return {"type": "object"}
    if not isinstance(response_format, dict) or response_format.get("type") != "json_schema":
        message = f"response_format must be of the type text, json_object or json_schema; got {response_format!r}"
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
    """The variables of the chat template that a body gives."""
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise BodyError("chat_template_kwargs must be an object", "chat_template_kwargs", "invalid_type")
    if "reasoning_effort" in fields:
        variables = {"reasoning_effort": fields["reasoning_effort"], **variables}
    # That the template reads them is checked there; they may have the names of options, too.
    split_chat_options(lm.chat_template, dict.fromkeys(set(variables) - set(option_names())))
    return variables


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates read them: a content is a text, and who develops is the system."""
    if not isinstance(messages, list) or not messages:
        raise BodyError(f"messages must be a list of objects, one at least; got {messages!r}", "messages")
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
    """A content: a text, or parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BodyError(f"a content must be a text; got {content!r}", at, "invalid_type")
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BodyError("parts of a content must be texts", f"{at}[{place}]", "unsupported_value")
    return "".join(part["text"] for part in content)


def _prompts(prompt: object) -> list[str | list[int]]:
    """A text, ids, or a list of either, as a list."""
    items: list[Any] = [prompt] if not isinstance(prompt, list) or _is_ids(prompt) else prompt
    if not items or not all(isinstance(item, str) or _is_ids(item) for item in items):
        raise BodyError(f"prompt must be a text, ids, or a list of either; got {prompt!r}", "prompt", "invalid_type")
    return items


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def check_neutral(fields: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raise `BodyError` for a field that has another value than those of `neutral`."""
    for name, served in neutral.items():
        if name in fields and fields[name] not in served:
            raise BodyError(_not_served(name, served), name, "unsupported_value")


def _not_served(name: str, served: Sequence[Any]) -> str:
    others = f"; served is {' or '.join(map(repr, served))}" if served else ""
    return f"{name} is not served: leave it out{others}"


def _of_field(message: str, fields: Mapping[str, Any]) -> BodyError:
    """An error of an option under the name of the field that gave it."""
    options = dict.fromkeys(LENGTHS, "max_new_tokens") | {"response_format": "json_schema"}
    if "top_logprobs" in fields:
        options |= {"top_logprobs": "logprobs", "logprobs": ""}
    for name in fields:
        option = options.get(name, name)
        if not option:
            continue
        if re.match(rf"{re.escape(option)}\b", message):
            return BodyError(name + message.removeprefix(option), name)
        if option in _GRAMMARS and message.startswith(_GRAMMARS[option]):
            return BodyError(message, name)
    return BodyError(message)
