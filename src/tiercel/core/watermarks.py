"""Event time over sites: what each site may promise, and what a log may conclude.

Responsible for: a site's promise for an operator's input, the minimum of all sites' promises.
Not responsible for: what a watermark does to keys (instance.py), or lateness at a source.

A site promises only what is true whichever way rows travel: a row that was taken in here and is not
yet in the log of its owner holds the promise back (its lane frame remembers what was promised when
it was made). So a watermark can never overtake a row, however often the row is forwarded.

A stream that makes its own watermark may be written at any site, at any time. A site where it never was
holds nobody back; when it first is written there, the site's promise falls from FOREVER to what it is
worth: the one time that a promise falls. Like in Spark, there is no watermark before every such input of
an operator has been written somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercel.core.records import ABSENT_WATERMARK

FOREVER = 1 << 62  # no source here: nothing to wait for


class Promises:
    """One operator's watermark as this site hears and tells it."""

    def __init__(self, sites: Iterable[str], timed: Iterable[str] = ()) -> None:
        self.heard: dict[str, int] = dict.fromkeys(sites, -1)
        self.told = -1
        self.told_sources = 0  # how many there were
        self.sources: dict[str, int] = {}  # fixed producers, and streams written at this site -> watermark
        self.unwritten = set(timed)  # inputs with a watermark of their own that no site has seen a row of

    def worth(self) -> int:
        """What this site's sources allow to promise."""
        low = min(self.sources.values(), default=FOREVER)
        return min(low, ABSENT_WATERMARK) if self.unwritten and low < FOREVER else low

    def to_tell(self, low: int) -> bool:
        """Whether others do not know this yet."""
        fell = low < FOREVER <= self.told
        return low > self.told or fell or len(self.sources) > self.told_sources

    def hear(self, site: str, watermark_ms: int, sources: Iterable[str] = ()) -> None:
        self.unwritten.difference_update(sources)
        known = self.heard.get(site, ABSENT_WATERMARK)
        if watermark_ms > known or known >= FOREVER:
            self.heard[site] = watermark_ms

    def conclusion(self) -> int:
        """No row at or below this will come any more, from anywhere. -1 while nobody has a source."""
        low = min(self.heard.values(), default=-1)
        return -1 if low >= FOREVER else low
