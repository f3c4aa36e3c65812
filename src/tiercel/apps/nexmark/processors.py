"""The operators of NEXMark's queries that are not ready-made.

Responsible for: winning bids, the mean of a seller's last ten sales, local items, the highest rows of a
    window, the join in sliding windows.
Not responsible for: how they are connected (queries.py). Each runs under Spark's own transformWithState too.

State holds times as milliseconds since 1970.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.apps.times import from_ms, to_ms

WINNING = "auction bigint, seller bigint, category bigint, price bigint, bidder bigint, closed timestamp"
LOCAL = "name string, city string, state string, id bigint, at timestamp"
SELLER_MEAN = "seller bigint, price bigint, closed timestamp"
HOT_ITEM = "windowEnd timestamp, auction bigint, n bigint"
HIGHEST_BID = "windowEnd timestamp, auction bigint, bidder bigint, price bigint, dateTime timestamp"
NEW_SELLER = "seller bigint, name string, auction bigint, reserve bigint, windowEnd timestamp"


class WinningBids(StatefulProcessor):
    """The winning bid of each auction, when the auction closes. Key: auction; reads auctions and bids.

    It wins who bids most, at least the reserve, before the auction expires; of equal bids the earliest. Bids
    may come before their auction: the ids of auctions run ahead, and the two streams are not in step. Bids of
    an auction that is closed, or never comes, are forgotten `patience_ms` after their time.
    """

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._auction = handle.getValueState(
            "auction", "seller bigint, category bigint, reserve bigint, expires bigint"
        )
        self._best = handle.getValueState("best", "price bigint, at bigint, bidder bigint")
        self._early = handle.getListState("early", "price bigint, at bigint, bidder bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        auction, best = self._auction.get(), self._best.get()
        kept = best
        for row in rows:
            if row.expires is not None:
                expires = to_ms(row.expires)
                auction = (row.seller, row.category, row.reserve, expires)
                self._auction.update(auction)
                self._handle.registerTimer(expires)
                if self._early.exists():
                    for early in self._early.get():
                        best = better(best, tuple(early), auction)
                    self._early.clear()
                continue
            bid = (row.price, to_ms(row.dateTime), row.bidder)
            if auction is not None:
                best = better(best, bid, auction)
            else:
                self._early.appendValue(bid)
                self._handle.registerTimer(bid[1] + self._patience_ms)
        if best is not kept and best is not None:
            self._best.update(tuple(best))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        now, auction, best = expiredTimerInfo.getExpiryTimeInMs(), self._auction.get(), self._best.get()
        if auction is None:
            waiting = [tuple(bid) for bid in self._early.get()] if self._early.exists() else []
            if left := [bid for bid in waiting if bid[1] + self._patience_ms > now]:
                self._early.put(left)
            else:
                self._early.clear()
        elif auction[3] <= now:
            seller, category, _, expires = auction
            self._auction.clear()
            self._best.clear()
            if best is not None:
                yield Row(
                    auction=key[0],
                    seller=seller,
                    category=category,
                    price=best[0],
                    bidder=best[2],
                    closed=from_ms(expires - 1),  # as in Beam: the last moment of the auction
                )

    def close(self) -> None:
        """Nothing to release."""


def better(best: Sequence[int] | None, bid: tuple[int, int, int], auction: Sequence[int]) -> Any:
    """The winning one of two bids: price, time, bidder. An auction is seller, category, reserve, expires."""
    _, _, reserve, expires = auction
    if bid[0] < reserve or bid[1] >= expires:
        return best
    if best is None or (-bid[0], bid[1], bid[2]) < (-best[0], best[1], best[2]):
        return bid
    return best


class SellerMean(StatefulProcessor):
    """The mean price of a seller's last sales, after each sale. Key: seller; reads winning bids.

    Sales of one seller come from several instances. They count in the order of their closing, then of their
    auctions, once the watermark says that no earlier one can come.
    """

    def __init__(self, last: int = 10) -> None:
        self._last = last

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._waiting = handle.getListState("waiting", "closed bigint, auction bigint, price bigint")
        self._prices = handle.getValueState("prices", "prices array<bigint>")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            closed = to_ms(row.closed)
            self._waiting.appendValue((closed, row.auction, row.price))
            self._handle.registerTimer(closed + 1)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        now = expiredTimerInfo.getExpiryTimeInMs()
        waiting = sorted(tuple(sale) for sale in self._waiting.get()) if self._waiting.exists() else []
        due = [sale for sale in waiting if sale[0] < now]
        if not due:
            return
        found = self._prices.get()
        prices = [] if found is None else list(found[0])
        for closed, _, price in due:
            prices = [*prices, price][-self._last :]
            mean = (2 * sum(prices) + len(prices)) // (2 * len(prices))  # rounded half up, as in Beam
            yield Row(seller=key[0], price=mean, closed=from_ms(closed))
        self._prices.update((prices,))
        if len(due) < len(waiting):
            self._waiting.put(waiting[len(due) :])
        else:
            self._waiting.clear()

    def close(self) -> None:
        """Nothing to release."""


class LocalItems(StatefulProcessor):
    """Auctions with the name and place of their seller. Key: seller; reads persons and auctions.

    A seller's row is kept, and auctions wait for it, for ever: an unbounded inner join. `at` is the later
    of the two event times.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._person = handle.getValueState("person", "name string, city string, state string, at bigint")
        self._waiting = handle.getListState("waiting", "id bigint, at bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        person = self._person.get()
        for row in rows:
            at = to_ms(row.dateTime)
            if row.name is not None:
                person = (row.name, row.city, row.state, at)
                self._person.update(person)
                for auction, since in self._waiting.get() if self._waiting.exists() else ():
                    yield self._item(person, auction, since)
                self._waiting.clear()
            elif person is None:
                self._waiting.appendValue((row.id, at))
            else:
                yield self._item(person, row.id, at)

    def _item(self, person: Sequence[Any], auction: int, at: int) -> Row:
        name, city, state, since = person
        return Row(name=name, city=city, state=state, id=auction, at=from_ms(max(at, since)))

    def close(self) -> None:
        """Nothing to release."""


class HighestOfWindow(StatefulProcessor):
    """The rows of a window with the highest value. Key: the last moment of the window, `at`.

    The second stage of Q5 and Q7: the first stage sends one row for each key and window.
    """

    value = "n"
    kept = "auction bigint, n bigint"  # what is stored of a row

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._highest = handle.getValueState("highest", "value bigint")
        self._rows = handle.getListState("rows", self.kept)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        found = self._highest.get()
        before = highest = -1 if found is None else found[0]
        for row in rows:
            value = self.value_of(row)
            if value < highest:
                continue
            if value > highest:
                self._rows.clear()
                highest = value
            for stored in self.stored(row):
                self._rows.appendValue(stored)
        if before < 0:
            self._handle.registerTimer(to_ms(key[0]) + 1)
        if highest > before:
            self._highest.update((highest,))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        end = from_ms(expiredTimerInfo.getExpiryTimeInMs())
        for stored in self._rows.get() if self._rows.exists() else ():
            yield self.shown(end, tuple(stored))
        self._rows.clear()
        self._highest.clear()

    def value_of(self, row: Any) -> int:
        return int(row.n)

    def stored(self, row: Any) -> list[tuple[Any, ...]]:
        return [(row.auction, row.n)]

    def shown(self, end: datetime.datetime, stored: tuple[Any, ...]) -> Row:
        return Row(windowEnd=end, auction=stored[0], n=stored[1])

    def close(self) -> None:
        """Nothing to release."""


class HighestBids(HighestOfWindow):
    """The highest bids of a window, out of the highest bids of each auction."""

    kept = "auction bigint, bidder bigint, price bigint, at bigint"

    def value_of(self, row: Any) -> int:
        return int(row.top["price"])

    def stored(self, row: Any) -> list[tuple[Any, ...]]:
        price = row.top["price"]
        return [(row.auction, bid["bidder"], price, bid["at"]) for bid in row.top["bids"]]

    def shown(self, end: datetime.datetime, stored: tuple[Any, ...]) -> Row:
        auction, bidder, price, at = stored
        return Row(windowEnd=end, auction=auction, bidder=bidder, price=price, dateTime=from_ms(at))


class SlidingJoin(StatefulProcessor):
    """Persons and auctions of one sliding window, a pair for each window that holds both. Key: seller."""

    def __init__(self, size_ms: int, slide_ms: int) -> None:
        self._size_ms, self._slide_ms = size_ms, slide_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._persons = handle.getListState("persons", "at bigint, name string")
        self._auctions = handle.getListState("auctions", "at bigint, auction bigint, reserve bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            at = to_ms(row.dateTime)
            if row.name is not None:
                self._persons.appendValue((at, row.name))
            else:
                self._auctions.appendValue((at, row.id, row.reserve))
            for end in range(
                at - at % self._slide_ms + self._slide_ms, at + self._size_ms + 1, self._slide_ms
            ):
                self._handle.registerTimer(end)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        end = expiredTimerInfo.getExpiryTimeInMs()
        persons, auctions = self._read(self._persons), self._read(self._auctions)
        start = end - self._size_ms
        for at, name in persons:
            for other, auction, reserve in auctions:
                if start <= at < end and start <= other < end:
                    yield Row(
                        seller=key[0], name=name, auction=auction, reserve=reserve, windowEnd=from_ms(end)
                    )
        following = start + self._slide_ms  # what the next window begins with
        self._keep(self._persons, persons, following)
        self._keep(self._auctions, auctions, following)

    def _read(self, state: Any) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in state.get()] if state.exists() else []

    def _keep(self, state: Any, rows: list[tuple[Any, ...]], start: int) -> None:
        """Forget what no later window holds."""
        left = [row for row in rows if row[0] >= start]
        if len(left) < len(rows):
            if left:
                state.put(left)
            else:
                state.clear()

    def close(self) -> None:
        """Nothing to release."""
