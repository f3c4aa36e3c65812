"""Event time over sites: what each site may promise, and what a log may conclude.

Responsible for: a site's promise for an operator's input, the minimum of all sites' promises.
Not responsible for: what a watermark does to keys (instance.py), or lateness at a source.

A site promises only what is true whichever way rows travel: a row that was taken in here and is not
yet in the log of its owner holds the promise back (its lane frame remembers what was promised when
it was made). So a watermark can never overtake a row, however often the row is forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable

FOREVER = 1 << 62  # no source here: nothing to wait for


def is_news(watermark_ms: int, known_ms: int) -> bool:
    """Promises only grow; but a site that had nothing to wait for may get its first source."""
    return watermark_ms > known_ms or watermark_ms < known_ms == FOREVER


class Promises:
    """One operator's watermark as this site hears and tells it."""

    def __init__(self, sites: Iterable[str]) -> None:
        self.heard: dict[str, int] = dict.fromkeys(sites, -1)
        self.told = -1
        self.sources: dict[str, int] = {}  # fixed producers of this site -> their watermark

    def hear(self, site: str, watermark_ms: int) -> None:
        if is_news(watermark_ms, self.heard.get(site, -1)):
            self.heard[site] = watermark_ms

    def conclusion(self) -> int:
        """No row at or below this will come any more, from anywhere. -1 while nobody has a source."""
        low = min(self.heard.values(), default=-1)
        return -1 if low >= FOREVER else low
