"""Requests: what users ask for. They are checked and then run through the one loop to completions."""

from onward.requests.chats import ChatReader
from onward.requests.generation_config import generation_defaults, within_vocabulary
from onward.requests.options import (
    ChatOptionsDict,
    Draft,
    GenerateOptions,
    GenerateOptionsDict,
    split_chat_options,
)
from onward.requests.request import Ids, Prompt, Request, RequestReader, Speculators
from onward.requests.runner import Runner, drained
from onward.requests.scoring import Score, score_continuations, score_texts
from onward.speculation import LOOKUPS

__all__ = [
    "LOOKUPS",
    "ChatOptionsDict",
    "ChatReader",
    "Draft",
    "GenerateOptions",
    "GenerateOptionsDict",
    "Ids",
    "Prompt",
    "Request",
    "RequestReader",
    "Runner",
    "Score",
    "Speculators",
    "drained",
    "generation_defaults",
    "score_continuations",
    "score_texts",
    "split_chat_options",
    "within_vocabulary",
]
