"""The interface of a protocol: an endpoint's bodies, responses and streams.

A protocol is one file with a subclass of `Protocol`, and one line in `onward.protocols`. The server, the ingress
and `onward batch` serve all of them alike.
"""

import datetime
import hashlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self
from typing import Protocol as Interface

from pydantic import BaseModel

from onward.errors import ContextOverflowError, OnwardError, OptionError, RequestError, TokenizerError
from onward.language_model import Completion, LanguageModel, Piece, Receipt, Request
from onward.protocols.body import Body, BodyError, Limits, error_fields
from onward.tokenizer import Tokenizer


class GenerateBody(Body):
    """The fields that every protocol has. null means the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None

    def field_of(self, option: str) -> str:
        """The field that sets an option."""
        return option

    def place_of(self, path: str) -> str:
        """A path such as "tools[0].name", with the field's name in place of the option's."""
        option = re.split(r"[.\[]", path, maxsplit=1)[0]
        return self.field_of(option) + path[len(option) :]


def named_error(error: OnwardError, body: GenerateBody) -> BodyError:
    """An error of the model's options, with the field's name in place of the option's."""
    if isinstance(error, BodyError):
        return error
    path = error.option if isinstance(error, RequestError) else None
    place = "" if path is None else body.place_of(path)
    message = f"{place} {error.problem}" if isinstance(error, OptionError) else str(error)
    field = re.split(r"[.\[]", place, maxsplit=1)[0] or None
    if isinstance(error, ContextOverflowError):
        return BodyError(message, field or body.field_of("prompt"), "context_length_exceeded")
    return BodyError(message, field)


_KEY = re.compile("[0-9a-f]{32}")
_MILLISECOND_DIGITS = 12  # of 32; the others are random
LAST_SECOND = int(datetime.datetime.max.replace(microsecond=0, tzinfo=datetime.UTC).timestamp())


@dataclass(frozen=True)
class ResponseKey:
    """Determines a response's id, creation time, item ids, and its seed if the body has none.

    The same body with the same key gives the same response, on any server of the same model.

    text: 32 hexadecimal digits: milliseconds since 1970, then 80 random bits, as in a UUID of version 7 (RFC 9562).
    Raises `RequestError`: any other text.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not _KEY.fullmatch(self.text):
            raise RequestError(f"a response key is 32 hexadecimal digits (ResponseKey.new()); got {self.text!r}")

    @classmethod
    def new(cls, created: int | None = None) -> Self:
        """Return a key of the current time. created: of another time, in seconds since 1970, clamped to 1970 through
        9999."""
        milliseconds = time.time_ns() // 1_000_000 if created is None else min(max(0, created), LAST_SECOND) * 1000
        return cls(f"{milliseconds:0{_MILLISECOND_DIGITS}x}{os.urandom(10).hex()}")

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        return int(self.text[:_MILLISECOND_DIGITS], 16) // 1000

    @property
    def time(self) -> datetime.datetime:
        """The creation time in UTC, which chat templates see as the current time."""
        return datetime.datetime.fromtimestamp(min(self.created, LAST_SECOND), datetime.UTC)

    @property
    def seed(self) -> int:
        """53 bits, so that JavaScript numbers can hold it."""
        return int(self.derived("seed"), 16) >> 75

    def derived(self, part: str) -> str:
        """32 hexadecimal digits that identify a part of the response."""
        return hashlib.blake2b(f"{self.text} {part}".encode(), digest_size=16).hexdigest()


# An item of the input or output of a response.
Item = dict[str, Any]


class StoredItems(Interface):
    """The items that a server has stored for the client of a body. Raises `BodyError`: there are none with that id."""

    def before(self, previous: str | None, conversation: str | None) -> list[Item]:
        """The items of a previous response with all that it continues, or of a conversation."""
        ...

    def item(self, id: str, param: str) -> Item:
        """One item. param: the field to blame."""
        ...


class Storage(NamedTuple):
    """What a server stores with a response. base: the response or the conversation that it continues. items: the new
    items of its input."""

    base: str | None
    items: list[Item]


class Prompts(NamedTuple):
    """The requests of a body. echoes: the prompts' texts, if the response repeats them. storage: if it is to be
    stored."""

    requests: tuple[Request, ...]
    echoes: tuple[str, ...] | None = None
    storage: Storage | None = None


@dataclass(frozen=True)
class ModelContext:
    """The model that serves a body.

    options: the defaults and the adapter. variables: defaults of the chat template's variables. now: the time of the
    response. stored: earlier items; None without a store. limits: of the body.
    """

    lm: LanguageModel
    options: Mapping[str, Any]
    variables: Mapping[str, Any]
    now: datetime.datetime
    stored: StoredItems | None = None
    limits: Limits = field(default_factory=Limits)


class ResponseEvents(Interface):
    """Formats a response as server-sent events.

    The events depend on the pieces alone, not on how these are batched. pieces: formats pieces of one sequence, and
    returns each event with the number of pieces that are complete after it.
    """

    def begin(self, at: int) -> list[str]: ...
    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]: ...
    def end(self, at: int, completion: Completion) -> list[str]: ...
    def finish(self) -> list[str]: ...
    def error(self, error: OnwardError) -> list[str]: ...


class Error(BaseModel):
    """The reason of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The response to a request that failed or was refused."""

    error: Error


def counted_events(pieces: Sequence[Piece], format_piece: Callable[[Piece], list[str]]) -> list[tuple[int, str]]:
    """The events of each piece, each with the number of pieces that are complete after it."""
    events: list[tuple[int, str]] = []
    for done, piece in enumerate(pieces):
        new = format_piece(piece)
        events += [(done + (event is new[-1]), event) for event in new]
    return events


class Protocol(ABC):
    """An endpoint. Instances have no state.

    path: of its URL. summary: for the OpenAPI document. body, response, failure: models of its bodies, responses and
    error responses; the latter two are for the document only. kind: type of the response object. failure_event: the
    lines of a stream before the data of an error. idle: what an idle stream sends.
    """

    path: ClassVar[str]
    summary: ClassVar[str]
    body: ClassVar[type[GenerateBody]]
    response: ClassVar[type[BaseModel]]
    failure: ClassVar[type[BaseModel]] = ErrorBody
    kind: ClassVar[str]
    failure_event: ClassVar[str] = ""
    idle: ClassVar[str] = ": waiting\n\n"

    @abstractmethod
    def prompts(self, body: Any, context: ModelContext) -> Prompts:
        """Make the requests of a valid body. Raises `OnwardError`: options contradict each other or the model."""

    @abstractmethod
    def answer(self, body: "ParsedBody", completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the response. completions: of the requests, in order."""

    @abstractmethod
    def events(self, body: "ParsedBody") -> ResponseEvents:
        """Return a writer for the stream of one response."""

    def error(self, error: OnwardError, request_id: str = "") -> dict[str, Any]:
        """Return the body of an error response."""
        return {"error": error_fields(error)}

    def early_error(self, error: OnwardError) -> str:
        """Return the event for a stream that fails before its body is read: while its model is loaded."""
        return f"{self.failure_event}data: {json.dumps(self.error(error))}\n\n"


# Errors that `named_error` turns into those of a field.
NAMED_ERRORS = (RequestError, TokenizerError)


@dataclass(frozen=True)
class ParsedBody:
    """A body as requests to a model.

    model: name for the response. requests: one for each prompt; a chat has one. values: the valid body. tokenizer: of
    the model. echoes: the prompts' texts, to be repeated. key: of the response. fields: of the body, as received.
    ignored: unsupported hints that were dropped. storage: with the response; None if it is not to be stored. bits: the
    version of the weights and the fingerprint, for receipts; None if the body asks for none.
    """

    protocol: Protocol
    model: str
    requests: tuple[Request, ...]
    values: Any = field(compare=False)
    tokenizer: Tokenizer = field(compare=False)
    echoes: tuple[str, ...] | None = None
    key: ResponseKey = field(default_factory=ResponseKey.new, compare=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    ignored: tuple[str, ...] = ()
    storage: Storage | None = field(default=None, compare=False)
    bits: tuple[int, str] | None = field(default=None, compare=False)

    def receipt(self, text: Completion) -> dict[str, Any]:
        """The field "receipt" of a response, if the body asks for it: null if the weights have changed since the body
        was read."""
        if self.bits is None:
            return {}
        version, fingerprint = self.bits
        is_of_one = all(each == version for _, each in text.weights_versions)
        return {"receipt": Receipt.of(text, fingerprint).to_json() if is_of_one else None}

    @property
    def kind(self) -> str:
        return self.protocol.kind

    @property
    def stream(self) -> bool:
        return bool(self.values.stream)

    @property
    def background(self) -> bool:
        """Whether it is to be generated after the answer to its request."""
        return bool(getattr(self.values, "background", False))

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
        return replace(self, requests=tuple(request.with_seed(seed) for request in self.requests))
