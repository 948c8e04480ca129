"""A format without calls, for templates that are of no family known here: all but the reasoning is content."""

from typing import final

from onward.messages.format import MessageFormat


@final
class Plain(MessageFormat):
    name = "plain"

    def is_of(self, template: str) -> bool:
        return True
