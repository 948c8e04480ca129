"""OpenAI's formats: request bodies to requests, and completions to response bodies and streams.

Nothing here runs a model: an engine or a `LanguageModel` serves the requests. `onward batch` and `onward serve` use it.
"""

from onward.protocols.answer_key import ResponseKey
from onward.protocols.chat import answer_body, delta_body, finish_reason
from onward.protocols.chat_events import ChunkStream
from onward.protocols.errors import BodyError, error_fields, status_of
from onward.protocols.responses import read_response
from onward.protocols.responses_events import ResponseStream, response_body
from onward.protocols.schema import URLS, BodyReader, ParsedBody

__all__ = [
    "URLS",
    "BodyError",
    "BodyReader",
    "ChunkStream",
    "ParsedBody",
    "ResponseKey",
    "ResponseStream",
    "answer_body",
    "delta_body",
    "error_fields",
    "finish_reason",
    "read_response",
    "response_body",
    "status_of",
]
