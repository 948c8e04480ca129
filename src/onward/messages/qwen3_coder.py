"""The format of Qwen3-Coder, which Qwen 3.5 and later write, too.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

import re
from typing import final

from onward.messages.call_parameters import Arguments
from onward.messages.format import CallSyntax, MessageFormat
from onward.messages.source import Reading, Source
from onward.messages.written import Written

_NAME = re.compile(r"[^\s<>]*")
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_CLOSING = "</function>"


@final
class Qwen3Coder(MessageFormat):
    name = "qwen3-coder"
    openers = ("<tool_call>",)
    marks = ("</tool_call>",)
    syntax = CallSyntax(
        "",
        "\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        "\n<tool_call>",
        "",
        "<parameter=NAME>\nVALUE\n</parameter>\n",
    )

    def is_of(self, template: str) -> bool:
        return "<tool_call>" in template and _FUNCTION in template

    def read_calls(self, opener: str, source: Source, written: Written) -> Reading[bool]:
        yield from source.skip_space()
        if not (yield from source.skip(_FUNCTION)):
            return False
        name = yield from _read_name(source)
        if not name:
            return False
        source.forget()
        written.call(name)
        arguments = Arguments(written, written.schema(name))
        yield from source.skip_space()
        while (yield from source.skip(_PARAMETER)):
            parameter = yield from _read_name(source)
            yield from source.skip("\n")
            if not (yield from arguments.read(parameter, source, ["\n</parameter>", "</parameter>"])):
                return True
            yield from source.skip_space()
        whole = yield from source.skip(_CLOSING)
        if not whole and source.is_cut([_PARAMETER, _CLOSING]):
            yield from source.until([], len)
            return True
        arguments.end()
        yield from source.skip_space()
        yield from source.skip(self.marks[0])
        return True


def _read_name(source: Source) -> Reading[str]:
    """Read a name and what closes its mark. Empty where there is none."""
    name: list[str] = []
    yield from source.take(_NAME, name.append)
    return "".join(name) if (yield from source.skip(">")) else ""
