"""OpenAI's formats: bodies of chats and completions to requests, completions to bodies, and files of batches.

Nothing here runs a model. A body becomes the requests that an engine or a `LanguageModel` serves, and their completions
become the body of the answer, or its chunks. `onward batch` and `onward serve` use it.
"""

from onward.openai.answer import answer_body, delta_body, finish_reason
from onward.openai.answer_key import AnswerKey
from onward.openai.batch import BatchInput, BatchLine
from onward.openai.body import URLS, Body, BodyReader
from onward.openai.errors import BodyError, error_fields, status_of
from onward.openai.response_stream import ResponseStream, response_body
from onward.openai.responses import read_response
from onward.openai.stream import AnswerStream

__all__ = [
    "URLS",
    "AnswerKey",
    "AnswerStream",
    "BatchInput",
    "BatchLine",
    "Body",
    "BodyError",
    "BodyReader",
    "ResponseStream",
    "answer_body",
    "delta_body",
    "error_fields",
    "finish_reason",
    "read_response",
    "response_body",
    "status_of",
]
