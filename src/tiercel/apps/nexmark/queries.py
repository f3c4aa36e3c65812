"""NEXMark's queries on streams: which streams each reads, under which key, and its operators.

Responsible for: Q1 to Q8 with Beam's meaning, and the variants of Q7 and Q8 that DRRS measured.
Not responsible for: what the operators do (processors.py, tiercel.operators), the expected rows (oracle.py).

Q5 and Q7 have two stages. The first works by auction, the second by window end, so that no single key sees
every bid.
"""

from __future__ import annotations

import builtins
import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiercel import LiveStream
from tiercel.apps.app import Output, Values
from tiercel.apps.nexmark.generator import AUCTION, BASE, BEAM, BID, PERSON, Mix
from tiercel.apps.nexmark.processors import (
    HIGHEST_BID,
    HOT_ITEM,
    LOCAL,
    NEW_SELLER,
    SELLER_MEAN,
    WINNING,
    HighestBids,
    HighestOfWindow,
    LocalItems,
    SellerMean,
    SlidingJoin,
    WinningBids,
)
from tiercel.apps.times import to_ms
from tiercel.operators import count, fold, max, mean, sliding, tumbling

DELAY_MS = 100  # of watermarks: rows of a stream come in order
PATIENCE_MS = 60_000  # for which a bid waits for its auction; ids run ahead by a few hundred events
SCHEMAS = {"persons": PERSON, "auctions": AUCTION, "bids": BID}

Streams = Mapping[str, LiveStream]
Instances = Mapping[str, int]


@dataclass(frozen=True)
class Source:
    """How a query reads one kind of event: the column by which it is keyed, and what `id` is called."""

    key: str
    id: str = "id"

    def schema(self, kind: str) -> str:
        return (
            SCHEMAS[kind].replace("id bigint", f"{self.id} bigint", 1) if self.id != "id" else SCHEMAS[kind]
        )


@dataclass(frozen=True)
class Query:
    """One query: what it reads, its operators, and how its rows are compared."""

    about: str
    sources: Mapping[str, Source]
    build: Callable[[Streams, Instances], tuple[LiveStream, str]]  # its output, and the operator to change
    output: Output
    mix: Mix = BEAM
    timed: bool = True  # whether it waits for event time to pass


def moment_of(time: datetime.datetime) -> int:
    """Milliseconds since the first event."""
    return to_ms(time) - to_ms(BASE)


def _closing(at: int) -> int:
    """The event that moves the watermark to a moment."""
    return at + DELAY_MS


def window_end(window: Any) -> datetime.datetime:
    end: datetime.datetime = window["end"] if isinstance(window, Mapping) else window[1]
    return end


# -- stateless -----------------------------------------------------------------------------------

CONVERTED = "auction bigint, price bigint, bidder bigint, dateTime timestamp"
SELECTED = "auction bigint, price bigint"


def in_euros(bid: Any) -> tuple[Any, ...]:
    return (bid.auction, bid.price * 89 // 100, bid.bidder, bid.dateTime)


def _q1(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    return streams["bids"].map(in_euros, CONVERTED).key_by(
        "auction", name="euros", instances=instances
    ), "euros"


def _q2(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    chosen = streams["bids"].filter(is_chosen).map(chosen_columns, SELECTED)
    return chosen.key_by("auction", name="chosen", event_time="", instances=instances), "chosen"


def is_chosen(bid: Any) -> bool:
    return bool(bid.auction % 123 == 0)


def chosen_columns(bid: Any) -> tuple[Any, ...]:
    return (bid.auction, bid.price)


# -- joins ---------------------------------------------------------------------------------------

PERSON_SIDE = "seller bigint, name string, city string, state string, dateTime timestamp"
AUCTION_SIDE = "seller bigint, id bigint, dateTime timestamp"
NEW_PERSON = "seller bigint, name string, dateTime timestamp"
NEW_AUCTION = "seller bigint, auction bigint, reserve bigint, dateTime timestamp"
SOLD_AUCTION = "seller bigint, id bigint, reserve bigint, dateTime timestamp"


def is_local(person: Any) -> bool:
    return person.state in ("OR", "ID", "CA")


def is_in_category(auction: Any) -> bool:
    return bool(auction.category == 10)


def person_side(person: Any) -> tuple[Any, ...]:
    return (person.seller, person.name, person.city, person.state, person.dateTime)


def auction_side(auction: Any) -> tuple[Any, ...]:
    return (auction.seller, auction.id, auction.dateTime)


def new_person(person: Any) -> tuple[Any, ...]:
    return (person.seller, person.name, person.dateTime)


def new_auction(auction: Any) -> tuple[Any, ...]:
    return (auction.seller, auction.id, auction.reserve, auction.dateTime)


def _q3(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    persons = streams["persons"].filter(is_local).map(person_side, PERSON_SIDE)
    auctions = streams["auctions"].filter(is_in_category).map(auction_side, AUCTION_SIDE)
    found = persons.union(auctions).transform_with_state(
        LocalItems(), LOCAL, name="local-items", instances=instances
    )
    return found, "local-items"


def _q8(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    persons = streams["persons"].map(new_person, NEW_PERSON)
    auctions = streams["auctions"].map(new_auction, NEW_AUCTION)
    window = tumbling("10 seconds")
    return persons.join(auctions, window=window, name="new-sellers", instances=instances), "new-sellers"


def _q8_drrs(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    persons = streams["persons"].map(new_person, NEW_PERSON)
    auctions = streams["auctions"].map(new_auction, SOLD_AUCTION)
    found = persons.union(auctions).transform_with_state(
        SlidingJoin(40_000, 5_000),
        NEW_SELLER,
        name="sliding-join",
        time_mode="eventTime",
        instances=instances,
    )
    return found, "sliding-join"


# -- winning bids --------------------------------------------------------------------------------

BID_SIDE = "auction bigint, price bigint, bidder bigint, dateTime timestamp"
OFFER_SIDE = (
    "auction bigint, seller bigint, category bigint, reserve bigint, expires timestamp, dateTime timestamp"
)


def bid_side(bid: Any) -> tuple[Any, ...]:
    return (bid.auction, bid.price, bid.bidder, bid.dateTime)


def offer_side(auction: Any) -> tuple[Any, ...]:
    return (
        auction.auction,
        auction.seller,
        auction.category,
        auction.reserve,
        auction.expires,
        auction.dateTime,
    )


def _winning(streams: Streams, instances: Instances, key: str) -> LiveStream:
    offers = streams["auctions"].map(offer_side, OFFER_SIDE)
    bids = streams["bids"].map(bid_side, BID_SIDE)
    return offers.union(bids).transform_with_state(
        WinningBids(PATIENCE_MS),
        WINNING,
        name="winning-bids",
        time_mode="eventTime",
        instances=instances,
        output_key=key,
        output_event_time="closed",
    )


def _q4(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    windows = _winning(streams, instances, "category").window(sliding("10 seconds", "5 seconds"))
    return windows.agg(mean("price").alias("price"), name="category-mean"), "winning-bids"


def _q6(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    sales = _winning(streams, instances, "seller")
    means = sales.transform_with_state(SellerMean(), SELLER_MEAN, name="seller-mean", time_mode="eventTime")
    return means, "winning-bids"


# -- windows -------------------------------------------------------------------------------------

TOP = "price bigint, bids array<struct<bidder: bigint, at: bigint>>"


def keep_highest(top: Any, bid: Any) -> tuple[Any, ...]:
    """The highest price so far, and every bid of that price."""
    price, bids = top
    if bid.price < price:
        return (price, bids)
    one = {"bidder": bid.bidder, "at": to_ms(bid.dateTime)}
    return (price, [*bids, one]) if bid.price == price else (bid.price, [one])


def _q5(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    windows = streams["bids"].window(sliding("10 seconds", "5 seconds"))
    counts = windows.agg(
        count().alias("n"), window_time="at", name="bid-counts", instances=instances, output_key="at"
    )
    hot = counts.transform_with_state(HighestOfWindow(), HOT_ITEM, name="hot-items", time_mode="eventTime")
    return hot, "bid-counts"


def _q7(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    windows = streams["bids"].window(tumbling("10 seconds"))
    tops = windows.agg(
        fold(keep_highest, (-1, []), TOP, name="top"),
        window_time="at",
        name="top-bids",
        instances=instances,
        output_key="at",
    )
    highest = tops.transform_with_state(
        HighestBids(), HIGHEST_BID, name="highest-bids", time_mode="eventTime"
    )
    return highest, "top-bids"


def _q7_drrs(streams: Streams, instances: Instances) -> tuple[LiveStream, str]:
    windows = streams["bids"].window(sliding("10 seconds", "500 milliseconds"))
    return windows.agg(max("price").alias("price"), name="max-window", instances=instances), "max-window"


# -- all -----------------------------------------------------------------------------------------


def _at(column: int) -> Callable[[Values], int]:
    return lambda values: moment_of(values[column])


def _closing_at(column: int) -> Callable[[Values], int]:
    return lambda values: _closing(moment_of(values[column]))


def _closing_window(column: int) -> Callable[[Values], int]:
    return lambda values: _closing(moment_of(window_end(values[column])))


_BIDS = {"bids": Source("auction")}
_SALES = {"auctions": Source("auction", id="auction"), **_BIDS}
_SELLERS = {"persons": Source("seller", id="seller"), "auctions": Source("seller")}

QUERIES: dict[str, Query] = {
    "q1": Query(
        "prices in another currency",
        _BIDS,
        _q1,
        Output(("auction", "price", "bidder", "dateTime"), _at(3), order="dateTime"),
        timed=False,
    ),
    "q2": Query("bids for every 123rd auction", _BIDS, _q2, Output(("auction", "price")), timed=False),
    "q3": Query(
        "auctions of a category by sellers of three states",
        _SELLERS,
        _q3,
        Output(("id",), _at(4), finding=lambda row: f"{row[0]} of {row[1]} sells {row[3]}"),
        timed=False,
    ),
    "q4": Query(
        "mean winning price of each category, 10 s every 5 s",
        _SALES,
        _q4,
        Output(("category", "window"), _closing_window(1)),
    ),
    "q5": Query(
        "auctions with the most bids, 10 s every 5 s",
        _BIDS,
        _q5,
        Output(
            ("windowEnd", "auction"),
            _closing_at(0),
            finding=lambda row: f"auction {row[1]} has {row[2]} bids",
        ),
    ),
    "q6": Query(
        "mean price of each seller's last ten sales",
        _SALES,
        _q6,
        Output(("seller", "closed", "price"), _closing_at(2), order="closed"),
    ),
    "q7": Query(
        "highest bids of each 10 s",
        _BIDS,
        _q7,
        Output(
            ("windowEnd", "auction", "bidder", "dateTime"),
            _closing_at(0),
            finding=lambda row: f"{row[3] / 100:,.2f} for auction {row[1]}",
        ),
    ),
    "q8": Query(
        "persons who sell within 10 s of their first sight",
        _SELLERS,
        _q8,
        Output(("seller", "auction"), lambda row: builtins.max(moment_of(row[3]), moment_of(row[6]))),
    ),
    "q7-drrs": Query(
        "highest bid of each bidder, 10 s every 0.5 s, as DRRS measured it",
        {"bids": Source("bidder")},
        _q7_drrs,
        Output(("bidder", "window"), _closing_window(1)),
        Mix(0, 0, 50, bid_bytes=2048, hot_auctions=4, hot_bidders=8, active_people=300),
    ),
    "q8-drrs": Query(
        "persons and auctions in one window of 40 s every 5 s, as DRRS measured it",
        _SELLERS,
        _q8_drrs,
        Output(("seller", "auction", "windowEnd"), _closing_at(4)),
        Mix(20, 30, 0, person_bytes=6000, auction_bytes=8000, hot_sellers=5),
    ),
}
