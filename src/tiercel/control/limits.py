"""The limits of one operator's changes: what the governor checks each proposal against.

Responsible for: the limits, their defaults, refusing limits that contradict each other.
Not responsible for: applying them (governor.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from tiercel.control.policies.policy import check_above
from tiercel.core.errors import InvalidRequest

DAY_S = 86_400
ANY_SITE = "*"
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the changes of one operator."""

    instances_min: dict[str, int] = msgspec.field(default_factory=lambda: {ANY_SITE: 1})  # by site
    instances_max: dict[str, int] = msgspec.field(default_factory=lambda: {ANY_SITE: 8})  # `*`: other sites
    cool_down_s: float = 10.0  # after the end of a change, before the next one
    scale_in_after_s: float = 60.0  # a scale-in must be wanted for so long; the largest wanted number counts
    judge_after_s: float = 10.0  # after the end of a change, to see whether it made things worse
    blocked_s: float = 300.0  # no such change again, after one that did not help
    changes_per_hour_max: int = 60
    backlog_s_max: float = 1.0  # with more than that waiting, nothing is scaled in
    latency_ms_max: float = 1_000.0  # a row that waits longer is a harm
    quiet: tuple[tuple[float, float], ...] = ()  # seconds of the day (UTC) without changes
    pins: tuple[str, ...] = ()  # instances that are never retired, and whose keys stay
    dry_run: bool = False  # decide, and change nothing

    def __post_init__(self) -> None:
        for site, low in self.instances_min.items():
            high = self.instances_max.get(site, self.instances_max.get(ANY_SITE, low))
            for name, value in (("min", low), ("max", high)):
                if isinstance(value, bool) or value < (1 if site == ANY_SITE or name == "max" else 0):
                    raise InvalidRequest(f"{name} = {value!r}", "expected a whole number above 0")
            if low > high:
                where = "" if site == ANY_SITE else f" at {site}"
                raise InvalidRequest(f"min = {low} is above max = {high}{where}", "expected min <= max")
        for name in ("scale_in_after_s", "judge_after_s", "blocked_s", "changes_per_hour_max"):
            check_above(name, getattr(self, name))
        for name in ("cool_down_s", "backlog_s_max", "latency_ms_max"):
            check_above(name, getattr(self, name), -1e-9)

    def least(self, site: str) -> int:
        return self.instances_min.get(site, self.instances_min.get(ANY_SITE, 1))

    def most(self, site: str) -> int:
        return self.instances_max.get(site, self.instances_max.get(ANY_SITE, 8))

    def is_quiet(self, at_s: float) -> bool:
        second = at_s % DAY_S
        return any(a <= second < b if a <= b else second >= a or second < b for a, b in self.quiet)


def parse_quiet(windows: Iterable[str]) -> tuple[tuple[float, float], ...]:
    """Times of the day in UTC, as in "22:00-06:00"."""
    found = []
    for window in windows:
        match = _CLOCK.fullmatch(str(window))
        if match is None:
            raise InvalidRequest(f"quiet window {window!r}", "expected times in UTC, as in 22:00-06:00")
        hour, minute, end_hour, end_minute = map(int, match.groups())
        found.append((hour * 3600.0 + minute * 60, end_hour * 3600.0 + end_minute * 60))
    return tuple(found)


def by_site(value: int | Mapping[str, int]) -> dict[str, int]:
    """A number for every site, or one for each named site."""
    return dict(value) if isinstance(value, Mapping) else {ANY_SITE: value}
