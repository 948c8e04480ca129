"""Protocols: bodies to requests, and completions to responses and streams.

Nothing here runs a model or knows a web framework: an engine or a `LanguageModel` serves the requests. `onward serve`,
`onward deploy` and `onward batch` use it.
"""

from onward.protocols.answer_key import ResponseKey
from onward.protocols.errors import BodyError, error_fields, status_of
from onward.protocols.limits import Limits
from onward.protocols.protocol import ParsedBody, Protocol, ResponseEvents
from onward.protocols.reader import PROTOCOLS, BodyReader

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
    "status_of",
]
