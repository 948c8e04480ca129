"""Exact numbers of schemas: which of them llguidance would round, and ranges of integers as regular expressions."""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from onward.errors import OptionError, RequestError
from onward.schemas.references import listed_values, reachable

# llguidance computes with doubles, which represent all integers up to here.
LARGEST_EXACT = 2**53
# Of a multipleOf, in llguidance.
LARGEST_FACTOR = 2**32 - 1
# 10^308 is the largest power of ten that is a double. The expression of a range grows with the square of its digits.
_MAX_DIGITS = 320
_MAX_MULTIPLES = 1_000
# Significant digits, and digits after the point, up to which llguidance's ranges of decimals are exact.
_EXACT_DIGITS = 15

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMERIC = frozenset({*BOUNDS, "multipleOf"})


def is_large(value: Any) -> bool:
    """Whether a value is a number that llguidance rounds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGEST_EXACT


def bound_within(keyword: str, bound: int | float) -> int | float:
    """An exactly representable bound that allows no more than `bound`.

    A float is rounded to at most 15 digits. One beyond 2^53 becomes the integer that is within both of its readings:
    the double, and the decimal in the schema.
    """
    if isinstance(bound, int) or (bound.is_integer() and not is_large(bound)):
        return bound
    number, is_least = Decimal(repr(bound)), "inimum" in keyword
    if is_large(bound):
        return (max if is_least else min)(int(bound), int(number))
    quantum = Decimal(1).scaleb(-min(_EXACT_DIGITS, _EXACT_DIGITS - 1 - number.adjusted()))
    return float(number.quantize(quantum, ROUND_CEILING if is_least else ROUND_FLOOR))


class Document:
    """A schema, and which of its subschemas lead to numbers that llguidance rounds."""

    def __init__(self, root: Any) -> None:
        self.root = root
        parents: dict[int, list[int]] = {}
        large: list[int] = []
        for one, inner in reachable(root, root):
            for each in inner:
                parents.setdefault(id(each), []).append(id(one))
            if is_large_itself(one):
                large.append(id(one))
        self._large: set[int] = set()
        while large:
            one_id = large.pop()
            if one_id not in self._large:
                self._large.add(one_id)
                large += parents.get(one_id, ())

    def has_large(self, schema: Any) -> bool:
        return isinstance(schema, Mapping) and id(schema) in self._large

    def add_large(self, schema: Mapping[str, Any]) -> None:
        """Treat a schema that was derived from one of the document's as one with such numbers."""
        self._large.add(id(schema))

    def definitions(self, schema: Any) -> dict[str, Any]:
        """The definitions that a subschema refers to, and the draft."""
        root = self.root
        definitions: dict[str, Any] = {"$schema": root["$schema"]} if "$schema" in root else {}
        for one, _ in reachable(schema, root):
            if not isinstance(one.get("$ref"), str):
                continue
            place = re.fullmatch(r"#/(\$defs|definitions)/([^/%~]+)", one["$ref"])
            if place is None or place[2] not in root.get(place[1], {}):
                raise RequestError(
                    f"a schema with integers beyond 2^53 has the reference {one['$ref']!r}: refer to '#/$defs/…'"
                )
            definitions.setdefault(place[1], {})[place[2]] = root[place[1]][place[2]]
        return definitions


def is_large_itself(schema: Mapping[str, Any]) -> bool:
    if any(is_large(schema.get(bound)) for bound in BOUNDS) or schema.get("multipleOf", 0) > LARGEST_FACTOR:
        return True
    return any(has_large_value(value) for value in listed_values(schema) or ())


def has_large_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(has_large_value, value.values()))
    return any(map(has_large_value, value)) if isinstance(value, list) else is_large(value)


class Range(NamedTuple):
    """The numbers that a schema's numeric keywords allow. low, high: a bound and whether it is exclusive; None for no
    bound. factor: the numbers are multiples of it; None for all numbers."""

    low: tuple[Fraction, bool] | None
    high: tuple[Fraction, bool] | None
    factor: Fraction | None

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "Range":
        def bounds(keyword: str) -> Iterator[tuple[Fraction, bool]]:
            exclusive = schema.get(f"exclusive{keyword.capitalize()}")
            if keyword in schema:
                yield exactly(schema[keyword]), exclusive is True  # draft 4 has true beside the bound
            if exclusive is not None and not isinstance(exclusive, bool):
                yield exactly(exclusive), True

        low = max(bounds("minimum"), default=None)
        high = min(bounds("maximum"), key=lambda bound: (bound[0], not bound[1]), default=None)
        return cls(low, high, exactly(schema["multipleOf"]) if "multipleOf" in schema else None)

    def has(self, value: int | float) -> bool:
        number = exactly(value)
        if self.low is not None and (number < self.low[0] or (self.low[1] and number == self.low[0])):
            return False
        if self.high is not None and (number > self.high[0] or (self.high[1] and number == self.high[0])):
            return False
        return self.factor is None or number % self.factor == 0

    def integers(self) -> tuple[int | None, int | None]:
        """The least and the greatest integer within the bounds; None for no bound."""
        low, high = self.low, self.high
        return (
            None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0]),
            None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0]),
        )


def exactly(value: int | float) -> Fraction:
    """The decimal value of a number: 0.1 is a tenth. A whole float is the integer that compares equal."""
    if isinstance(value, int) or value.is_integer():
        return Fraction(int(value))
    return Fraction(Decimal(repr(value)))


def integer_pattern(low: int | None, high: int | None, factor: Fraction | None, at: str) -> str | None:
    """A regular expression, in slashes, of the multiples of a factor from low to high; None if there are none.

    Raises:
        RequestError: too many digits or multiples for an expression. at: the schema's place.
    """
    if low is not None and high is not None and low > high:
        return None
    step = 1 if factor is None else factor.numerator  # the least integer multiple
    if step == 1:
        return f"/{integers_between(low, high, at)}/"
    if low is None or high is None or (high // step - (low - 1) // step) > _MAX_MULTIPLES:
        raise OptionError(
            at,
            f"has multipleOf together with integers beyond 2^53: give bounds between which there are at most "
            f"{_MAX_MULTIPLES} multiples",
        )
    multiples = range(-(-low // step) * step, high + 1, step)
    for bound in (low, high):
        _check_digits(bound, at)
    return f"/{'|'.join(map(str, multiples))}/" if multiples else None


def integers_between(low: int | None, high: int | None, at: str = "a schema") -> str:
    """A regular expression of the integers from low to high, inclusive, in JSON's notation; None: no bound.

    Raises:
        RequestError: a bound with too many digits for an expression. at: the schema's place.
    """
    for bound in (low, high):
        if bound is not None:
            _check_digits(bound, at)
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(f"-({'|'.join(_naturals(least, None if low is None else -low))})")
    if high is None or high >= 0:
        parts += _naturals(0 if low is None or low < 0 else low, high)
    return "|".join(parts)


def _check_digits(bound: int, at: str) -> None:
    if abs(bound) >= 10**_MAX_DIGITS:
        raise OptionError(at, f"has a number of more than {_MAX_DIGITS} digits: make it smaller")


def _naturals(low: int, high: int | None) -> Iterator[str]:
    """Expressions of the integers from low ≥ 0 to high, by number of digits."""
    if high is None:
        digits = len(str(low))
        yield from _naturals(low, 10**digits - 1)
        yield f"[1-9][0-9]{{{digits},}}"
        return
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        yield from _of_one_length(str(low), str(end))
        low = end + 1


def _of_one_length(low: str, high: str) -> Iterator[str]:
    """Expressions of the integers between two with the same number of digits."""
    shared = next((at for at in range(len(low)) if low[at] != high[at]), len(low))
    if shared == len(low):
        yield low
        return
    first, last = int(low[shared]), int(high[shared])
    if low[shared + 1 :].strip("0"):  # from low up to where its digit at `shared` changes
        yield low
        for at in range(len(low) - 1, shared, -1):
            if low[at] != "9":
                yield f"{low[:at]}[{int(low[at]) + 1}-9]{_digits(len(low) - at - 1)}"
        first += 1
    if high[shared + 1 :].strip("9"):  # and likewise down from high
        yield high
        for at in range(len(high) - 1, shared, -1):
            if high[at] != "0":
                yield f"{high[:at]}[0-{int(high[at]) - 1}]{_digits(len(high) - at - 1)}"
        last -= 1
    if first <= last:
        yield f"{low[:shared]}[{first}-{last}]{_digits(len(low) - shared - 1)}"


def _digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""
