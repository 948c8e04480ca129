"""The formats that there are, and which of them a model writes."""

from typing import final

from onward.chat.format import MessageFormat
from onward.chat.formats.glm import Glm, LaterGlm
from onward.chat.formats.harmony import Harmony
from onward.chat.formats.hermes import Hermes
from onward.chat.formats.llama3 import Llama3
from onward.chat.formats.mistral import LaterMistral, Mistral
from onward.chat.formats.qwen3_coder import Qwen3Coder
from onward.errors import RequestError


@final
class Plain(MessageFormat):
    name = "plain"

    def is_of(self, template: str) -> bool:
        return True


# By name. A model's is the first that its chat template is of.
FORMATS: dict[str, MessageFormat] = {
    format.name: format
    for format in (Hermes(), Qwen3Coder(), Glm(), LaterGlm(), Harmony(), LaterMistral(), Mistral(), Llama3(), Plain())
}


def checked_format(given: str | MessageFormat | None) -> MessageFormat | None:
    """The format of that name.

    Raises:
        RequestError: there is none.
    """
    if given is None or isinstance(given, MessageFormat):
        return given
    if not isinstance(given, str) or given not in FORMATS:
        raise RequestError(f"message_format must be one of {', '.join(FORMATS)}, or a MessageFormat; got {given!r}")
    return FORMATS[given]


def format_of(template: str) -> MessageFormat:
    """The format that a chat template's text is of."""
    return next(format for format in FORMATS.values() if format.is_of(template))
