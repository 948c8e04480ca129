"""Dates as C's `strftime` writes them in its own locale, whatever the locale and the time zone of the machine."""

import datetime
import re

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
# Directives that stand for others in the C locale.
_LAYOUTS = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}
# A flag, E or O for a locale's own digits and eras, and a directive.
_DIRECTIVE = re.compile("%([-_0^#]?)[EO]?(.)", re.DOTALL)


def strftime(time: datetime.datetime, layout: str) -> str:
    """`time.strftime(layout)`, where names, orders and seconds since 1970 depend on `time` alone.

    A time without a zone counts as UTC.
    """
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    half = "PM" if time.hour >= 12 else "AM"
    names = {"A": _DAYS[time.weekday()], "B": _MONTHS[time.month - 1], "p": half, "P": half.lower()}
    names |= {"a": names["A"][:3], "b": names["B"][:3], "h": names["B"][:3], "s": str(int(time.timestamp()))}

    def replacement(match: re.Match[str]) -> str:
        flag, directive = match.groups()
        if directive in _LAYOUTS:
            return _DIRECTIVE.sub(replacement, _LAYOUTS[directive])
        name = names.get(directive)
        if name is None:
            return f"%{flag}{directive}"
        return name.upper() if flag in ("^", "#") else name

    return time.strftime(_DIRECTIVE.sub(replacement, layout))
