"""Event time over sites: what each site may promise, and what a log may conclude.

Responsible for: a site's promise for an operator's input, the minimum of all sites' promises.
Not responsible for: what a watermark does to keys (instance.py), which rows are late (event_time.py).

A site promises only what is true whichever way rows travel: a row that was taken in here and is not
yet in the log of its owner holds the promise back (its lane frame remembers what was promised when
it was made). So a watermark can never overtake a row, however often the row is forwarded.

A stream that makes its own watermark may be written at any site, at any time. A site where it never was,
or where it is idle, holds nobody back; when it is written there the site's promise falls to what that
stream is worth. Rows that are behind what a log has concluded by then are late. Like in Spark, there is no
watermark before every such input of an operator has been written somewhere (or has been idle).

What one log has concluded every other may conclude: a promise speaks of rows on their way to any log.
So logs that heard of such a site at different times agree again; where all are idle, who knows most says so.
"""

from __future__ import annotations

from collections.abc import Iterable

FOREVER = 1 << 62  # no source here: nothing to wait for


class Promises:
    """One operator's watermark as this site hears and tells it."""

    def __init__(self, sites: Iterable[str], timed: Iterable[str] = ()) -> None:
        self.heard: dict[str, int] = dict.fromkeys(sites, -1)
        self.told = -1
        self.news = True  # there is somebody to wait for whom others do not know of
        self.sources: dict[str, int] = {}  # fixed producers, and streams written at this site -> watermark
        self.idle: set[str] = set()  # streams that are not waited for at this site
        self.unwritten = set(timed)  # inputs with a watermark of their own that no site has seen a row of
        self._concluded = -1  # by any log we heard of
        self.known = -1  # what everyone was told that a log has concluded

    def worth(self) -> int:
        """What this site's sources allow to promise."""
        low = min([mark for source, mark in self.sources.items() if source not in self.idle], default=FOREVER)
        return min(low, -1) if self.unwritten and low < FOREVER else low

    def to_tell(self, low: int) -> bool:
        """Whether others do not know this yet: it has grown, or there is somebody new to wait for."""
        return low > self.told or (self.news and bool(self.sources))

    def tell(self, site: str, low: int) -> None:
        """This is what we, this site, say."""
        self.told, self.news = low, False
        self.heard[site] = low

    def hear(self, site: str, watermark_ms: int, sources: Iterable[str] = (), concluded_ms: int = -1) -> None:
        """A site's last word counts: it may take back what it has not yet been held to."""
        self.unwritten.difference_update(sources)
        self.heard[site] = watermark_ms
        self._concluded = max(self._concluded, concluded_ms)
        self.known = max(self.known, concluded_ms)  # who tells us tells everyone

    @property
    def all_idle(self) -> bool:
        """Whether no site has a source that is waited for: none of them will say anything."""
        return min(self.heard.values(), default=-1) >= FOREVER

    def conclusion(self) -> int:
        """No row at or below this will come any more, from anywhere. -1 while nobody has a source."""
        low = min(self.heard.values(), default=-1)
        return max(self._concluded, -1 if low >= FOREVER else low)
