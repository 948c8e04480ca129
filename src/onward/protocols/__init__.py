"""Protocols: bodies to requests, and completions to responses and streams.

Nothing here runs a model or knows a web framework: an engine or a `LanguageModel` serves the requests. `onward serve`,
`onward deploy` and `onward batch` use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onward.errors import RequestError
from onward.language_model import GenerateOptions, LanguageModel
from onward.language_model.fingerprint import bits_fingerprint
from onward.language_model.receipt import check_request
from onward.language_model.request import Request, needed_tokenizer
from onward.protocols.body import BodyError, Limits, Validation, error_fields, status_of, validated
from onward.protocols.chat import ChatCompletions
from onward.protocols.completions import Completions
from onward.protocols.embeddings import EmbeddingsProtocol, RerankProtocol
from onward.protocols.messages import Messages
from onward.protocols.options import field_options
from onward.protocols.protocol import (
    NAMED_ERRORS,
    ModelContext,
    ParsedBody,
    Protocol,
    ResponseEvents,
    ResponseKey,
    StoredItems,
    named_error,
)
from onward.protocols.responses import Responses
from onward.util.options import options_of

__all__ = [
    "PROTOCOLS",
    "BodyError",
    "BodyReader",
    "Limits",
    "ParsedBody",
    "Protocol",
    "ResponseEvents",
    "ResponseKey",
    "error_fields",
    "protocol_of",
    "status_of",
]

# A protocol is one line here.
PROTOCOLS: Mapping[str, Protocol] = {
    each.path: each
    for each in (ChatCompletions(), Completions(), Responses(), Messages(), EmbeddingsProtocol(), RerankProtocol())
}


def protocol_of(url: str) -> Protocol:
    """The protocol whose errors a URL has: its own and those below it, with or without "/v1". Other URLs have OpenAI's
    errors."""
    whole = url if url.startswith("/v1/") else f"/v1{url}"
    found = (each for path, each in PROTOCOLS.items() if whole == path or whole.startswith(f"{path}/"))
    return next(found, PROTOCOLS[ChatCompletions.path])


@dataclass(frozen=True)
class BodyReader:
    """Reads bodies for one model.

    model: its name in bodies; the name of a loaded adapter calls the model with that adapter. options: defaults for
    bodies; otherwise the model's own apply. variables: of the chat template, likewise. streams: whether responses may
    be streams. limits: of a body. ignore_unsupported: drop unsupported hints that constrain no output, instead of
    refusing them.
    """

    lm: LanguageModel
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = False
    limits: Limits = field(default_factory=Limits)
    ignore_unsupported: bool = False

    @property
    def default_options(self) -> dict[str, float | None]:
        """The numbers that apply where a body leaves them out. max_new_tokens None: up to the context length."""
        defaults, options = self.lm.defaults.replace(**self.options), options_of(GenerateOptions)
        names = [name for name in field_options() if options[name].kind in (int, float) and not options[name].is_list]
        numbers = {name: getattr(defaults, name) for name in names if getattr(defaults, name) is not None}
        return {**numbers, "max_new_tokens": defaults.max_new_tokens}

    def read(
        self,
        path: str,
        body: object,
        key: ResponseKey | None = None,
        seed: int | None = None,
        stored: StoredItems | None = None,
    ) -> ParsedBody:
        """Parse a body sent to the path of one of `PROTOCOLS`.

        key: of the response; a new one by default. seed: if the body has none; by default the key's. stored: items of
        earlier responses, from a server that stores them.

        Raises:
            BodyError: a field is unknown, unsupported or invalid, with its name.
            TokenizerError: the model has no tokenizer.
        """
        protocol, key = PROTOCOLS[path], key or ResponseKey.new()
        tokenizer = needed_tokenizer(self.lm.tokenizer, "a body")
        validation = Validation(self.limits, self.ignore_unsupported, stores=stored is not None)
        valid = validated(protocol.body, body, validation)
        if valid.stream and not self.streams:
            raise BodyError("stream is not supported: remove it, or use false", "stream", "unsupported_value")
        name, adapter = self._resolve_model(valid.model)
        options = {**self.options, "adapter": adapter}
        try:
            context = ModelContext(self.lm, options, self.variables, key.time, stored, self.limits)
            prompts = protocol.prompts(valid, context)
        except NAMED_ERRORS as error:
            raise named_error(error, valid) from error
        fields = {field: value for field, value in dict(body).items() if value is not None}  # type: ignore[call-overload]
        ignored = tuple(validation.ignored)
        bits = self._bits(prompts.requests, adapter) if getattr(valid, "receipt", None) else None
        of_prompts = prompts.requests, valid, tokenizer, prompts.echoes
        parsed = ParsedBody(protocol, name, *of_prompts, key, fields, ignored, prompts.storage, bits)
        needs_seed = len(parsed.requests) > 1  # the response reports one seed for all requests
        return parsed.seeded(seed) if needs_seed or seed is not None else parsed

    def _bits(self, requests: Sequence[Request], adapter: str | None) -> tuple[int, str]:
        """`ParsedBody.bits`. Raises `BodyError`: the requests have no receipts."""
        try:
            for request in requests:
                check_request(request)
        except RequestError as error:
            raise BodyError(f"receipt is not available for this request: {error}", "receipt") from error
        version = -1
        while version != (version := self.lm.weights_version):  # the weights may change meanwhile
            fingerprint = bits_fingerprint(self.lm.model, self.lm.adapters.find(adapter))
        return version, fingerprint

    def _resolve_model(self, model: str | None) -> tuple[str, str | None]:
        """The model name for the response, and the adapter of that name."""
        if model is None or model == self.model:
            return self.model, None
        if model in self.lm.adapters:
            return model, model
        adapters = "".join(f", with the adapter {name!r}" for name in self.lm.adapters)
        raise BodyError(f"the model is {self.model!r}{adapters}; got {model!r}", "model", "model_not_found", 404)
