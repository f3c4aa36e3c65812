"""Lengths of time as PySpark writes them: "5 minutes", "1 hour 30 minutes", a timedelta.

Responsible for: from what a user writes to milliseconds, and the errors about it.
Not responsible for: what the length is used for.
"""

from __future__ import annotations

import re
from datetime import timedelta

from tiercel.errors import UserError

Duration = str | timedelta

US_PER_MS = 1_000
_UNITS_MS = {
    "millisecond": 1,
    "second": 1_000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 604_800_000,
}
_PART = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+?)s?(?=\s|$)")
_EXPECTED = 'something like "5 minutes", or a timedelta'


def milliseconds(given: Duration, what: str) -> int:
    """The length in milliseconds, of any sign. UserError if it is no length, or not whole milliseconds."""
    if isinstance(given, timedelta):
        total = given / timedelta(milliseconds=1)
    elif isinstance(given, str):
        total = _parsed(given, what)
    else:
        raise UserError(f"{what} {given!r} ({type(given).__name__})", expected=_EXPECTED)
    if total != int(total):
        raise UserError(f"{what} {given!r}", expected="whole milliseconds: watermarks have no finer ones")
    return int(total)


def positive_ms(given: Duration, what: str) -> int:
    """As `milliseconds`, but more than nothing."""
    found = milliseconds(given, what)
    if found <= 0:
        raise UserError(f"{what} {given!r}", expected='more than 0, such as "5 minutes"')
    return found


def lateness_ms(given: Duration | None) -> int:
    """An allowed lateness: None is none."""
    found = 0 if given is None else milliseconds(given, "lateness")
    if found < 0:
        raise UserError(f"lateness {given!r}", expected='0 or more, such as "30 seconds"')
    return found


def _parsed(given: str, what: str) -> float:
    text = given.strip().lower().removeprefix("interval ").strip()
    total, at = 0.0, 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part[2] not in _UNITS_MS:
            break
        total += float(part[1]) * _UNITS_MS[part[2]]
        at = part.end()
    if not text or at < len(text):
        hint = f"units are {', '.join(_UNITS_MS)}; a month has no fixed length"
        raise UserError(f"{what} {given!r}", expected=_EXPECTED, hint=hint)
    return total
