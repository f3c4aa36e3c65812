"""Windows as users declare them: tumbling, sliding and session windows of time, and windows of a row count.

Responsible for: sizes, and the errors about them.
Not responsible for: what happens in a window (time_windows.py, session_windows.py, count_windows.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiercel.errors import UserError
from tiercel.operators.durations import US_PER_MS, Duration, milliseconds, positive_ms


@dataclass(frozen=True)
class TimeWindow:
    """Windows of one length that begin at regular times. All times are in microseconds since 1970."""

    size: int
    slide: int
    offset: int = 0  # where one of them begins

    @property
    def pane(self) -> int:
        """The length of the parts that windows are made of: each row is kept in one, not in each window."""
        return math.gcd(self.size, self.slide)

    def pane_of(self, time: int) -> int:
        """The start of the pane that holds this time."""
        return time - (time - self.offset) % self.pane

    def last_end(self, time: int) -> int:
        """The end of the last window that holds this time."""
        return time - (time - self.offset) % self.slide + self.size

    def first_end(self, time: int) -> int:
        """The end of the first window that holds this time."""
        return self.next_end(time)

    def next_end(self, time: int) -> int:
        """The first end of a window behind this time."""
        return time + self.slide - (time - self.offset - self.size) % self.slide


@dataclass(frozen=True)
class SessionWindow:
    """Rows with less than `gap` microseconds between them are one window."""

    gap: int


@dataclass(frozen=True)
class CountWindow:
    """The last `size` rows of a key, after every `slide` of them."""

    size: int
    slide: int

    @property
    def pane(self) -> int:
        return math.gcd(self.size, self.slide)


Window = TimeWindow | SessionWindow | CountWindow


def tumbling(size: Duration, *, offset: Duration = "0 seconds") -> TimeWindow:
    """Windows of event time that follow each other; `offset` is Spark's startTime."""
    return sliding(size, size, offset=offset)


def sliding(size: Duration, slide: Duration, *, offset: Duration = "0 seconds") -> TimeWindow:
    """Windows of event time that begin every `slide`; `offset` is Spark's startTime."""
    size_ms, slide_ms = positive_ms(size, "window size"), positive_ms(slide, "slide")
    if slide_ms > size_ms:
        raise UserError(
            f"slide {slide!r} is longer than the window, {size!r}",
            expected="a slide of at most the size",
            hint="rows between two windows would be in none; tumbling(size) has windows without a gap",
        )
    offset_ms = milliseconds(offset, "offset")
    if abs(offset_ms) >= slide_ms:
        raise UserError(f"offset {offset!r}", expected=f"less than the slide, {slide!r}")
    return TimeWindow(size_ms * US_PER_MS, slide_ms * US_PER_MS, offset_ms * US_PER_MS)


def session(gap: Duration) -> SessionWindow:
    """Windows of event time that end when a key has no row for `gap`."""
    return SessionWindow(positive_ms(gap, "session gap") * US_PER_MS)


def tumbling_count(size: int) -> CountWindow:
    """Windows of so many rows of a key, in the order of their arrival."""
    return sliding_count(size, size)


def sliding_count(size: int, slide: int) -> CountWindow:
    """The last `size` rows of a key, after every `slide` rows; the first when there are `size`."""
    for what, given in (("window size", size), ("slide", slide)):
        if type(given) is not int or given < 1:
            raise UserError(f"{what} {given!r}", expected="a whole number of rows, 1 or more")
    if slide > size:
        what = f"slide {slide} is more than the window, {size} rows"
        raise UserError(what, expected="a slide of at most the size")
    return CountWindow(size, slide)


def check_window(given: object) -> None:
    if not isinstance(given, Window):
        expected = "tumbling(...), sliding(...), session(...), tumbling_count(...) or sliding_count(...)"
        raise UserError(f"window({given!r:.80})", expected=expected)
