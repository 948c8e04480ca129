"""OpenAI's formats: bodies of chats and completions to requests, completions to bodies, and files of batches.

Nothing here runs a model. A body becomes the requests that an engine or a `LanguageModel` serves, and their completions
become the body of the answer, or its chunks. `onward batch` and `onward serve` use it.
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
