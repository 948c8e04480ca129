"""Calls that are JSON objects with a name and arguments, as most families write them."""

from onward.messages.json_text import read_string, read_value
from onward.messages.source import Reading, Source
from onward.messages.written import Written

# Llama calls them parameters.
_ARGUMENTS = ("arguments", "parameters")


def read_call_object(source: Source, written: Written, *, known: bool = False) -> Reading[bool]:
    """Read {"name": …, "arguments": …}, its keys in any order; others are passed over.

    The call begins as soon as its name was read. From there on the text is its own, and the source never goes back.

    known: the name must be that of a tool that was given.

    Returns:
        Whether there was a name. If not, the source stands anywhere.
    """
    if not (yield from source.skip("{")):
        return False
    name: str | None = None
    early: list[str] = []  # arguments that stand before the name
    has_arguments = False
    while True:
        yield from source.skip_space()
        key = yield from read_string(source)
        yield from source.skip_space()
        if key is None or not (yield from source.skip(":")):
            return name is not None
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(source)
            if not name or (known and not written.knows(name)):
                return False
            source.forget()
            written.call(name)
            written.arguments("".join(early))
            whole = True
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            whole = yield from read_value(source, early.append if name is None else written.arguments)
        else:
            whole = yield from read_value(source, len)
        if not whole:
            return name is not None
        yield from source.skip_space()
        if (yield from source.skip("}")):
            if name is not None and not has_arguments:
                written.arguments("{}")
            return name is not None
        if not (yield from source.skip(",")):
            return name is not None


def read_call_objects(source: Source, written: Written, separator: str = "", *, known: bool = False) -> Reading[bool]:
    """Read one call after another, with spaces and a separator between them. known: as in `read_call_object`.

    Returns:
        Whether there was one. What comes after the last whole call is unread, and so is what breaks a call off.
    """
    found = False
    while True:
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            return found
        if found:
            source.mark()
        if not (yield from read_call_object(source, written, known=known)):
            if found:
                source.rewind()
            return found
        found = True
        yield from source.skip_space()
        if separator and not (yield from source.skip(separator)):
            return True
