"""The message formats, by name and by chat template."""

from functools import lru_cache
from typing import final

from onward.chat.format import MessageFormat
from onward.chat.formats.harmony import Harmony
from onward.chat.formats.json_calls import Hermes, LaterMistral, Llama3, Mistral
from onward.chat.formats.tagged_calls import Glm, LaterGlm, Qwen3Coder
from onward.errors import RequestError


@final
class Plain(MessageFormat):
    name = "plain"

    def is_of(self, template: str) -> bool:
        return True


# By name. A model uses the first that matches its chat template.
FORMATS: dict[str, MessageFormat] = {
    format.name: format
    for format in (Hermes(), Qwen3Coder(), Glm(), LaterGlm(), Harmony(), LaterMistral(), Mistral(), Llama3(), Plain())
}


def checked_format(format: str | MessageFormat | None) -> MessageFormat | None:
    """Return the format of a name; raise `RequestError` if there is none."""
    if format is None or isinstance(format, MessageFormat):
        return format
    if not isinstance(format, str) or format not in FORMATS:
        raise RequestError(f"message_format must be one of {', '.join(FORMATS)}, or a MessageFormat; got {format!r}")
    return FORMATS[format]


@lru_cache(maxsize=64)
def format_of(template: str) -> MessageFormat:
    """Return the format of a chat template, from its text."""
    return next(format for format in FORMATS.values() if format.is_of(template))
