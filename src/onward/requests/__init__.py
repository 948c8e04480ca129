"""Requests: what users ask for, checked; and run, through the one loop, to completions."""

from onward.requests.drafts import LOOKUPS, Speculators
from onward.requests.options import GenerateOptions
from onward.requests.request import Ids, Prompt, Request, RequestReader
from onward.requests.runner import Runner, drained, only
from onward.requests.scoring import Score, score_texts

__all__ = [
    "LOOKUPS",
    "GenerateOptions",
    "Ids",
    "Prompt",
    "Request",
    "RequestReader",
    "Runner",
    "Score",
    "Speculators",
    "drained",
    "only",
    "score_texts",
]
