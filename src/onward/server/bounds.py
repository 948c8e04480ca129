"""What one request may ask for where others wait beside it. In code there are no such bounds."""

from onward.openai import Body, BodyError
from onward.server.settings import Settings

# The engine looks at all of these with every token.
_MOST_STOPS, _LONGEST_STOP = 64, 1024
_MOST_BAD_WORDS = 1024


def check_bounds(body: Body, settings: Settings) -> None:
    """Raise `BodyError` for a body that asks for more than a server gives one client."""
    if len(body.requests) > settings.max_prompts:
        raise _too_many("prompts", settings.max_prompts, len(body.requests), "prompt")
    options = body.requests[0].options
    if options.logprobs is not None and options.logprobs > settings.max_logprobs:
        field = "top_logprobs" if body.kind == "chat.completion" else "logprobs"
        raise _too_many("likeliest ids", settings.max_logprobs, options.logprobs, field)
    if options.prompt_logprobs is not None and options.prompt_logprobs > settings.max_logprobs:
        raise _too_many("likeliest ids", settings.max_logprobs, options.prompt_logprobs, "prompt_logprobs")
    if len(options.stop) > _MOST_STOPS:
        raise _too_many("stop strings", _MOST_STOPS, len(options.stop), "stop")
    longest = max(map(len, options.stop), default=0)
    if longest > _LONGEST_STOP:
        raise _too_many("characters in a stop string", _LONGEST_STOP, longest, "stop")
    if len(options.bad_words) > _MOST_BAD_WORDS:
        raise _too_many("bad words", _MOST_BAD_WORDS, len(options.bad_words), "bad_words")


def _too_many(what: str, most: int, count: int, field: str) -> BodyError:
    return BodyError(f"this server serves {most} {what} at most; got {count}", field)
