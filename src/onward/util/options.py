"""Declarations of options: the one place for an option's type, bounds, help text and group.

An option is a field of a dataclass, declared with `option`. The validation of Python arguments, the fields of HTTP
bodies with their OpenAPI schema, the command line's flags, the keywords that type checkers know and the table in the
documentation are all made from it.

    @dataclass(frozen=True, kw_only=True)
    class TopK(Filter):
        top_k: int = option(0, low=0, help="Sample from the N most likely tokens; 0: all.", group=SAMPLING)
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from onward.errors import OptionError
from onward.util.checks import as_tuple, plain
from onward.util.text_input import check_value

# The groups of options, in the order of the command line's help.
LENGTH = "Length and stopping"
SAMPLING = "Sampling"
REPETITION = "Repetition and banned words"
STRUCTURE = "Structured output"
TEXTS = "Multiple texts"
OUTPUT = "Output"

FLOAT32_MAX = 3.4028234663852886e38
_KEY = "onward.option"
_NOUNS = {int: "a whole number", float: "a number", bool: "True or False"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """A declared option.

    name, default: of the field. takes: the type of its arguments, None included where it is one.
    kind: int, float, bool or str, which are validated by their bounds; None for other values, which their own code
        validates. is_list: whether the value is a tuple of such items, given as one item or several.
    low, high: inclusive bounds. above, below: exclusive bounds. For a str low is its minimum length, 0 or 1.
    unit: of a number. hint: what to do instead, at the end of an error.
    help: one line for the command line and the documentation. group: one of the groups above.
    flag: a name on the command line in place of the option's own, such as "--samples"; or a short one in addition, such
        as "-n"; "" for an option that the command line doesn't have. metavar: the placeholder for its value there;
        FILE: a file that holds the value.
    show_default: the default in words, where its value tells little.
    """

    name: str
    default: Any
    takes: Any
    kind: type[int] | type[float] | type[bool] | type[str] | None
    is_list: bool
    low: float | None
    high: float | None
    above: float | None
    below: float | None
    unit: str
    hint: str
    help: str
    group: str
    flag: str | None
    metavar: str | None
    show_default: str | None

    @functools.cached_property
    def is_optional(self) -> bool:
        """Whether the value may be None."""
        return NoneType in get_args(self.takes)

    @functools.cached_property
    def expected(self) -> str:
        """The valid values, or items, for errors: "a whole number of 0 or more"."""
        if self.kind is str:
            return "a non-empty string" if self.low else "a string"
        noun = _NOUNS[self.kind or float] + (f" of {self.unit}" if self.unit else "")
        bounds = self.bounds
        return f"{noun} {bounds}" if bounds else noun

    @functools.cached_property
    def bounds(self) -> str:
        """The bounds of a number: "of 0 or more", "in [0, 1]"; "" without any."""
        low = self.low if self.above is None else self.above
        high = self.high if self.below is None else self.below
        if low is not None and high is not None and FLOAT32_MAX not in (-low, high):
            left, right = "[("[self.above is not None], "])"[self.below is not None]
            return f"in {left}{_number(low)}, {_number(high)}{right}"
        if low is not None and low != -FLOAT32_MAX:
            return f"above {_number(low)}" if self.above is not None else f"of {_number(low)} or more"
        return "in float32's range" if high == FLOAT32_MAX else ""

    def normalized(self, value: Any) -> Any:
        """An argument in the form in which it is stored: numbers and lists of Python, a tuple for a list.

        Raises:
            OptionError: a value, or an item, is of the wrong type or out of the bounds.
            TextError: as `onward.util.text_input.check_value`.
        """
        value = plain(value)
        if value is None and self.is_optional:
            return None
        if self.is_list and self.kind is not None:
            value = as_tuple(self.name, value, self.kind)
        check_value(value, self.name)
        for item in value if self.is_list else (value,):
            self.check(item)
        return value

    def check(self, value: Any) -> None:
        """Raise `OptionError` unless a value, or an item, has the right type and is within the bounds."""
        if not self.admits(value):
            raise OptionError(self.name, f"must be {self.expected}; got {value!r}{self.hint}")

    def admits(self, value: Any) -> bool:
        """Whether a value, or an item, has the right type and is within the bounds."""
        kind = self.kind
        if kind is None:
            return True
        if kind is str:
            return isinstance(value, str) and len(value) >= (self.low or 0)
        if isinstance(value, bool) or kind is bool:
            return isinstance(value, bool) and kind is bool
        if not isinstance(value, int if kind is int else int | float):
            return False
        if kind is float and not abs(value) <= sys.float_info.max:
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def option(
    default: Any,
    *,
    takes: Any = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    hint: str = "",
    help: str = "",
    group: str = "",
    flag: str | None = None,
    metavar: str | None = None,
    show_default: str | None = None,
) -> Any:
    """Declare a field of a dataclass as an option; see `Option`.

    takes: the type of its arguments. By default it is the field's own, and `X | Sequence[X]` for a field of
        `tuple[X, ...]`. An option that declares it is validated by its own code.
    """
    declared = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata={_KEY: declared})


_UNDECLARED = option(None).metadata[_KEY]


@functools.cache
def options_of(kind: type[Any]) -> Mapping[str, Option]:
    """The options of a dataclass by name: its fields, those without a declaration too."""
    hints = get_type_hints(kind)
    return {each.name: _option_of(each, hints[each.name]) for each in dataclasses.fields(kind)}


def _option_of(field: "dataclasses.Field[Any]", hint: Any) -> Option:
    declared = field.metadata.get(_KEY, _UNDECLARED)
    kind, is_list, takes = None, False, declared["takes"]
    if takes is None:
        alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        (only, *others) = [each for each in alternatives if each is not NoneType]
        if get_origin(only) is tuple and get_args(only)[1:] == (...,):
            is_list, only = True, get_args(only)[0]
        if not others and only in (int, float, bool, str):
            kind = only
        takes = hint
        if is_list and kind is not None:
            takes = kind | Sequence[kind]  # type: ignore[valid-type]
            takes = takes | None if NoneType in alternatives else takes
        is_list = is_list and kind is not None
    return Option(name=field.name, default=field.default, kind=kind, is_list=is_list, **declared | {"takes": takes})


def _number(value: float) -> str:
    return f"2^{int(value).bit_length() - 1}" if value in (2**53, 2**64) else f"{value:g}"
