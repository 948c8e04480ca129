"""Bodies of /v1/chat/completions and /v1/completions, checked and made requests of.

A field is served as OpenAI's reference has it, or refused: nothing is accepted and left out. The exceptions are labels,
such as `user`, which never change an answer. Fields that OpenAI does not have are the options of
`LanguageModel.generate` that JSON can say (`top_k`, `min_p`, `repetition_penalty`, `beams` …), and
`chat_template_kwargs`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from onward.errors import ContextOverflowError, RequestError, TokenizerError
from onward.language_model import LanguageModel
from onward.openai.errors import BodyError
from onward.option_names import check_option_names
from onward.requests import Request, split_chat_options
from onward.requests.options import option_names
from onward.sampling import fresh_seed

Kind: TypeAlias = Literal["chat.completion", "text_completion"]

# What a request is sent to, and the kind of object that answers it.
URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}

# Names of the most tokens to generate.
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
# Fields of a chat that `LanguageModel.chat` takes under the same names.
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
# Fields that are read here and are no options of the same name and meaning.
_OWN = {"model", "messages", "prompt", "logprobs", "top_logprobs", "echo", "best_of", "chat_template_kwargs"}
# Options that JSON cannot say, or that mean something else in OpenAI's format.
_NO_FIELDS = {*_LENGTHS, "logprobs", "prompt_logprobs", "draft", "stop_when", "cancel", "time_limit", "constraint"}
# Fields that change no answer.
_LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
# Fields of which only these values are served: those that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
_OF_KIND: Mapping[Kind, frozenset[str]] = {
    "chat.completion": frozenset({"messages", "top_logprobs", "chat_template_kwargs", "reasoning_effort", *_OF_TOOLS}),
    "text_completion": frozenset({"prompt", "echo", "best_of"}),
}


@dataclass(frozen=True)
class Body:
    """What a body asks for.

    kind: of the object that answers. model: the name that the answer gives. requests: one for each prompt; a chat has
    one. echoes: the text that the answer to each prompt begins with.
    """

    kind: Kind
    model: str
    requests: tuple[Request, ...]
    echoes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class BodyReader:
    """Reads bodies for one model.

    model: the name that bodies call it by. options: those that a body does not give; what they leave open are the
    model's own defaults. variables: of the chat template, likewise.
    """

    lm: LanguageModel
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)

    def read(self, url: str, body: object) -> Body:
        """The requests of a body that was sent to one of `URLS`.

        Raises:
            BodyError: a field that is unknown, not served or of a wrong type; another model; no prompt.
            RequestError, TokenizerError: as `LanguageModel.request` raises them, where no field is to blame.
        """
        kind = URLS[url]
        if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
            raise BodyError(f"a body must be a JSON object; got {type(body).__name__}", code="invalid_type")
        fields = {name: value for name, value in body.items() if value is not None}
        self._check_names(fields, kind)
        self._check_model(fields.get("model"))
        for name, served in _NEUTRAL.items():
            if name in fields and fields[name] not in served:
                raise BodyError(_not_served(name, served), name, "unsupported_value")
        options = {**self.options, **_options_of(fields), **_logprobs_of(fields, kind)}
        try:
            if kind == "chat.completion":
                return Body(kind, self.model, (self._chat(fields, options),))
            return self._completion(fields, options)
        except BodyError:
            raise
        except ContextOverflowError as error:
            at = "messages" if kind == "chat.completion" else "prompt"
            raise BodyError(str(error), at, "context_length_exceeded") from error
        except (RequestError, TokenizerError) as error:
            raise _of_field(str(error), fields) from error

    def _check_names(self, fields: Mapping[str, Any], kind: Kind) -> None:
        of_others = {name for other, names in _OF_KIND.items() if other != kind for name in names}
        known = [*_fields_of_options(), *_LENGTHS, *_OWN, *_LABELS, *_NEUTRAL, *_OF_KIND[kind]]
        known = [name for name in dict.fromkeys(known) if name not in of_others]
        for name in fields:
            try:
                check_option_names([name], known)
            except RequestError as error:
                raise BodyError(str(error), name, "unknown_parameter") from error

    def _check_model(self, model: object) -> None:
        if model is not None and model != self.model:
            raise BodyError(f"the model here is {self.model!r}; got {model!r}", "model", "model_not_found", 404)

    def _chat(self, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Request:
        if "messages" not in fields:
            raise BodyError("a chat needs messages", "messages", "missing_required_parameter")
        variables = fields.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise BodyError("chat_template_kwargs must be an object", "chat_template_kwargs", "invalid_type")
        if "reasoning_effort" in fields:
            variables = {"reasoning_effort": fields["reasoning_effort"], **variables}
        # That the template reads them is checked there; they may have the names of options, too.
        split_chat_options(self.lm.chat_template, dict.fromkeys(set(variables) - set(option_names())))
        of_tools = {name: fields[name] for name in _OF_TOOLS if name in fields}
        template = {**self.variables, **variables}
        return self.lm.chat_request(_messages(fields["messages"]), **{**options, **of_tools, "template": template})

    def _completion(self, fields: Mapping[str, Any], options: dict[str, Any]) -> Body:
        if "prompt" not in fields:
            raise BodyError("a completion needs a prompt", "prompt", "missing_required_parameter")
        best_of, echo = fields.get("best_of"), fields.get("echo", False)
        if best_of not in (None, fields.get("n", 1)):
            raise BodyError("best_of is not served, but for that of n: leave it out", "best_of", "unsupported_value")
        if not isinstance(echo, bool):
            raise BodyError(f"echo must be true or false; got {echo!r}", "echo", "invalid_type")
        if echo and "logprobs" in options:
            options["prompt_logprobs"] = options["logprobs"]
        prompts = _prompts(fields["prompt"])
        requests = tuple(self.lm.request(prompt, **options) for prompt in prompts)
        chosen = requests[0].options
        if len(requests) > 1 and chosen.seed is None and chosen.temperature > 0 and chosen.beams == 1:
            seed = fresh_seed()  # one for all prompts, for the answer has one to report
            requests = tuple(request.replace(seed=seed) for request in requests)
        echoes = None
        if echo:
            echoes = tuple(prompt if isinstance(prompt, str) else self.lm.decode(prompt) for prompt in prompts)
        return Body("text_completion", self.model, requests, echoes)


def _fields_of_options() -> list[str]:
    return [name for name in option_names() if name not in _NO_FIELDS]


def _options_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a body gives, logprobs aside."""
    options = {name: fields[name] for name in _fields_of_options() if name in fields}
    lengths = {name: fields[name] for name in _LENGTHS if name in fields}
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


def _messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates read them: a content is a text, and who develops is the system."""
    if not isinstance(messages, list) or not messages:
        raise BodyError(f"messages must be a list of objects, one at least; got {messages!r}", "messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BodyError(f"{at} must be an object with a role; got {message!r}", at, "invalid_type")
    content = message.get("content")
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise BodyError("parts of a content must be texts", f"{at}.content[{place}]", "unsupported_value")
        content = "".join(part["text"] for part in content)
    elif not (content is None or isinstance(content, str)):
        raise BodyError(f"a content must be a text; got {content!r}", f"{at}.content", "invalid_type")
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content}


def _prompts(prompt: object) -> list[str | list[int]]:
    """A text, ids, or a list of either, as a list."""
    items: list[Any] = [prompt] if not isinstance(prompt, list) or _is_ids(prompt) else prompt
    if not items or not all(isinstance(item, str) or _is_ids(item) for item in items):
        raise BodyError(f"prompt must be a text, ids, or a list of either; got {prompt!r}", "prompt", "invalid_type")
    return items


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _not_served(name: str, served: Sequence[Any]) -> str:
    others = f"; served is {' or '.join(map(repr, served))}" if served else ""
    return f"{name} is not served: leave it out{others}"


def _of_field(message: str, fields: Mapping[str, Any]) -> BodyError:
    """An error of an option under the name of the field that gave it."""
    names = {"logprobs": "top_logprobs"} if "top_logprobs" in fields else {}
    for name in (names.get(name, name) for name in fields):
        option = "max_new_tokens" if name in _LENGTHS else "logprobs" if name == "top_logprobs" else name
        if re.match(rf"{re.escape(option)}\b", message):
            return BodyError(name + message.removeprefix(option), name)
    return BodyError(message)
