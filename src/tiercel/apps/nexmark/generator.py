"""NEXMark's persons, auctions and bids, after the rules of Apache Beam's generator.

Responsible for: every column of event n, as a function of the seed and n.
Not responsible for: when an event is sent, and which columns a query reads (queries.py).

    event number n     0        1 2 3        4 ... 49      then the next cycle of 50
    kind               person   auctions     bids

Events are drawn in blocks of `BLOCK` events, each from a generator of its own: the same event comes out
however many are asked for at a time. Differences from Beam: strings are parts of one long drawn text,
and the random numbers are NumPy's.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercel.errors import UserError

PERSON = (
    "id bigint, name string, emailAddress string, creditCard string, city string, state string, "
    "dateTime timestamp, extra string"
)
AUCTION = (
    "id bigint, itemName string, description string, initialBid bigint, reserve bigint, dateTime timestamp, "
    "expires timestamp, seller bigint, category bigint, extra string"
)
BID = "auction bigint, bidder bigint, price bigint, dateTime timestamp, extra string"

BASE = datetime.datetime(2015, 7, 15, tzinfo=datetime.UTC)
FIRST_PERSON, FIRST_AUCTION, FIRST_CATEGORY, CATEGORIES = 1000, 1000, 10, 5
ID_LEAD = 10  # ids of persons and auctions that do not exist yet may be used this far ahead
BLOCK = 5_000  # a multiple of every cycle
RATE_MAX = 1_000_000

STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")

Ints = NDArray[np.int64]
Columns = dict[str, list[Any]]


class Events(NamedTuple):
    """Consecutive events by kind, as columns; `numbers` are their event numbers."""

    persons: Columns
    auctions: Columns
    bids: Columns
    numbers: dict[str, Ints]  # by kind: persons, auctions, bids


@dataclass(frozen=True)
class Mix:
    """How many events of each kind a cycle has, how large they are, and how hot the hot ones."""

    persons: int = 1
    auctions: int = 3
    bids: int = 46
    person_bytes: int = 200
    auction_bytes: int = 500
    bid_bytes: int = 100
    hot_sellers: int = 4  # one auction of so many has a seller that is not hot
    hot_auctions: int = 2
    hot_bidders: int = 4
    active_people: int = 1000
    in_flight_auctions: int = 100

    @property
    def cycle(self) -> int:
        return self.persons + self.auctions + self.bids


BEAM = Mix()


class Nexmark:
    """Events of one seed; event n has the event time `BASE` plus n / rate."""

    def __init__(self, *, seed: int = 42, rate: float = 1_000, mix: Mix = BEAM, lengthen: int = 1) -> None:
        if not 0 < rate <= RATE_MAX:
            raise UserError(f"rate {rate}", expected=f"events per second, above 0, at most {RATE_MAX:,}")
        self._seed, self._rate, self._mix = seed, rate, mix
        self._lengthen = lengthen  # of auctions
        drawn = np.random.default_rng([seed, 1 << 40]).integers(ord("a"), ord("z") + 1, 1 << 16)
        self._text = drawn.astype(np.uint8).tobytes().decode()

    def blocks(self, count: int) -> Iterator[Events]:
        """The first `count` events, a block at a time."""
        for first in range(0, count, BLOCK):
            yield self.block(first // BLOCK, min(BLOCK, count - first))

    def block(self, number: int, count: int = BLOCK) -> Events:
        """The first `count` events of a block."""
        mix = self._mix
        ids = np.arange(number * BLOCK, (number + 1) * BLOCK, dtype=np.int64)
        place = ids % mix.cycle
        kinds = {
            "persons": ids[place < mix.persons],
            "auctions": ids[(place >= mix.persons) & (place < mix.persons + mix.auctions)],
            "bids": ids[place >= mix.persons + mix.auctions],
        }
        made = {}
        for n, (kind, make) in enumerate(
            (("persons", self._persons), ("auctions", self._auctions), ("bids", self._bids))
        ):
            made[kind] = make(np.random.default_rng([self._seed, number, n]), kinds[kind])
        last = number * BLOCK + count
        taken = {kind: int(np.searchsorted(numbers, last)) for kind, numbers in kinds.items()}
        cut = {
            kind: {name: list(values[: taken[kind]]) for name, values in made[kind].items()} for kind in made
        }
        numbers = {kind: kinds[kind][: taken[kind]] for kind in kinds}
        return Events(cut["persons"], cut["auctions"], cut["bids"], numbers)

    # -- ids ----------------------------------------------------------------------------------------

    def last_person(self, ids: Ints) -> Ints:
        """The number of the newest person when these events happen."""
        mix = self._mix
        if not mix.persons:
            return np.full_like(ids, mix.active_people - 1)
        return (ids // mix.cycle) * mix.persons + np.minimum(ids % mix.cycle, mix.persons - 1)

    def last_auction(self, ids: Ints) -> Ints:
        """The number of the newest auction when these events happen; -1 before the first."""
        mix = self._mix
        if not mix.auctions:
            return np.full_like(ids, mix.in_flight_auctions - 1)
        cycle, place = ids // mix.cycle, ids % mix.cycle
        before = place < mix.persons  # then the newest one is of the cycle before
        offset = np.where(before, mix.auctions - 1, np.minimum(place - mix.persons, mix.auctions - 1))
        return np.where(before, cycle - 1, cycle) * mix.auctions + offset

    def _next_person(self, random: np.random.Generator, ids: Ints) -> Ints:
        people = self.last_person(ids) + 1
        active = np.minimum(people, self._mix.active_people)
        drawn: Ints = random.integers(0, active + ID_LEAD)
        return people - active + drawn

    def _next_auction(self, random: np.random.Generator, ids: Ints) -> Ints:
        last = np.maximum(self.last_auction(ids), 0)
        lowest: Ints = np.maximum(last - self._mix.in_flight_auctions, 0)
        drawn: Ints = random.integers(0, last - lowest + 1 + ID_LEAD)
        return lowest + drawn

    # -- kinds --------------------------------------------------------------------------------------

    def _persons(self, random: np.random.Generator, ids: Ints) -> Columns:
        n = len(ids)
        first, last = random.integers(0, len(FIRST_NAMES), n), random.integers(0, len(LAST_NAMES), n)
        names = [f"{FIRST_NAMES[a]} {LAST_NAMES[b]}" for a, b in zip(first, last, strict=True)]
        emails = [
            f"{one}@{other}.com"
            for one, other in zip(self._words(random, n, 7), self._words(random, n, 5), strict=True)
        ]
        digits = random.integers(0, 10_000, (n, 4)).tolist()
        cards = [" ".join(f"{part:04d}" for part in card) for card in digits]
        cities = [CITIES[city] for city in random.integers(0, len(CITIES), n)]
        states = [STATES[state] for state in random.integers(0, len(STATES), n)]
        columns: Columns = {
            "id": (self.last_person(ids) + FIRST_PERSON).tolist(),
            "name": names,
            "emailAddress": emails,
            "creditCard": cards,
            "city": cities,
            "state": states,
            "dateTime": self.times(ids),
        }
        return self._padded(random, columns, self._mix.person_bytes)

    def _auctions(self, random: np.random.Generator, ids: Ints) -> Columns:
        n, mix = len(ids), self._mix
        initial = _prices(random, n)
        hot = random.integers(0, mix.hot_sellers, n) > 0
        sellers = np.where(hot, (self.last_person(ids) // 100) * 100, self._next_person(random, ids))
        columns: Columns = {
            "id": (self.last_auction(ids) + FIRST_AUCTION).tolist(),
            "itemName": self._words(random, n, 20),
            "description": self._words(random, n, 100),
            "initialBid": initial.tolist(),
            "reserve": (initial + _prices(random, n)).tolist(),
            "dateTime": self.times(ids),
            "expires": self._expiries(random, ids),
            "seller": (sellers + FIRST_PERSON).tolist(),
            "category": (FIRST_CATEGORY + random.integers(0, CATEGORIES, n)).tolist(),
        }
        return self._padded(random, columns, mix.auction_bytes)

    def _bids(self, random: np.random.Generator, ids: Ints) -> Columns:
        n, mix = len(ids), self._mix
        hot = random.integers(0, mix.hot_auctions, n) > 0
        auctions = np.where(hot, (self.last_auction(ids) // 100) * 100, self._next_auction(random, ids))
        hot = random.integers(0, mix.hot_bidders, n) > 0
        bidders = np.where(hot, (self.last_person(ids) // 100) * 100 + 1, self._next_person(random, ids))
        columns: Columns = {
            "auction": (auctions + FIRST_AUCTION).tolist(),
            "bidder": (bidders + FIRST_PERSON).tolist(),
            "price": _prices(random, n).tolist(),
            "dateTime": self.times(ids),
        }
        return self._padded(random, columns, mix.bid_bytes)

    # -- times --------------------------------------------------------------------------------------

    def ms(self, ids: Ints) -> Ints:
        """Milliseconds after `BASE`."""
        return (ids * round(1_000_000 / self._rate)) // 1000

    def moment(self, n: int) -> int:
        """Milliseconds after `BASE` of one event."""
        return n * round(1_000_000 / self._rate) // 1000

    def times(self, ids: Ints) -> list[datetime.datetime]:
        return [BASE + datetime.timedelta(milliseconds=ms) for ms in self.ms(ids).tolist()]

    def _expiries(self, random: np.random.Generator, ids: Ints) -> list[datetime.datetime]:
        """An auction lasts up to twice as long as it takes until the next hundred auctions have begun."""
        mix = self._mix
        ahead = ids + (mix.in_flight_auctions * mix.cycle) // max(mix.auctions, 1)
        horizon = np.maximum(self.ms(ahead) - self.ms(ids), 1) * self._lengthen
        ends = self.ms(ids) + 1 + random.integers(0, 2 * horizon)
        return [BASE + datetime.timedelta(milliseconds=ms) for ms in ends.tolist()]

    # -- text ---------------------------------------------------------------------------------------

    def _words(self, random: np.random.Generator, n: int, longest: int) -> list[str]:
        return self._slices(random, random.integers(3, longest, n))

    def _slices(self, random: np.random.Generator, lengths: Ints) -> list[str]:
        text = self._text
        starts = random.integers(0, len(text) - int(lengths.max(initial=0)), len(lengths))
        return [
            text[start : start + length]
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]

    def _padded(self, random: np.random.Generator, columns: Columns, average: int) -> Columns:
        """With a column `extra`, so that rows have this size on average, give or take a fifth."""
        sizes = np.zeros(len(columns["dateTime"]), np.int64)
        for values in columns.values():
            text = bool(values) and isinstance(values[0], str)
            sizes += np.array([len(value) for value in values], np.int64) if text else 8
        missing = np.maximum(average - sizes, 0)
        delta = np.rint(missing * 0.2).astype(np.int64)
        lengths = missing - delta + random.integers(0, np.maximum(2 * delta, 1))
        columns["extra"] = self._slices(random, np.where(missing > 0, lengths, 0))
        return columns


def _prices(random: np.random.Generator, n: int) -> Ints:
    """In cents, 100 to 100,000,000, most of them small."""
    return np.rint(100 * 10 ** (6 * random.random(n))).astype(np.int64)
