"""OpenAI's formats: bodies of chats and completions to requests, completions to bodies, and files of batches.

Nothing here runs a model. A body becomes the requests that an engine or a `LanguageModel` serves, and their completions
become the body of the answer, or its chunks. `onward batch` and `onward serve` use it.
"""

from onward.openai.answer import answer_body, delta_body, finish_reason
from onward.openai.batch import BatchInput, BatchLine, BatchOutput
from onward.openai.body import URLS, Body, BodyReader
from onward.openai.errors import BodyError, error_fields, status_of
from onward.openai.stream import AnswerStream

__all__ = [
    "URLS",
    "AnswerStream",
    "BatchInput",
    "BatchLine",
    "BatchOutput",
    "Body",
    "BodyError",
    "BodyReader",
    "answer_body",
    "delta_body",
    "error_fields",
    "finish_reason",
    "status_of",
]
