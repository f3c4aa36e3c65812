"""Mobility: hands the keys of sources that travel from site to site over, up to an ancestor and down again.

Responsible for: when a key leaves its site, where it goes, which hand-overs travel together.
Not responsible for: seeing rows (routers do), carrying hand-overs out (controller.py), load (policies/).

    HOME --rows enter elsewhere--> VISITING --mobility threshold--> RISING --> RESTING
      ^                                                                           |
      +----- DESCENDING <-- wait threshold: stayed at one site -------------------+

A key whose rows enter elsewhere beyond the mobility threshold goes up to the lowest common ancestor of both
sites. There it rests until its source has stayed at one site beyond the wait threshold; then it goes down to
that site. So a short visit pulls no state down, and a source that oscillates between sites rests at their
ancestor. A source that vanishes leaves its key where it is. With `direct`, keys skip the ancestor.

With a function that predicts the next site of a source, a copy of its key goes there when the key has come
to where its source is. The copy becomes the owner when the first row enters there. If rows enter elsewhere,
or none within some time, the copy is dropped.

A threshold in rows alone would make slow sources wait; one in seconds alone would send many rows of a fast
source the long way. Whichever is reached first counts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import Key


class Threshold(msgspec.Struct, frozen=True):
    """Reached by so many tuples or after so many seconds, whichever is first; None: does not count."""

    tuples: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.tuples is None and self.seconds is None:
            raise InvalidRequest("a threshold without a limit", "expected tuples=, seconds= or both")
        for name in ("tuples", "seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise InvalidRequest(f"threshold {name} = {value!r}", "expected a number above 0")

    def is_reached(self, tuples: int, seconds: float) -> bool:
        return (self.tuples is not None and tuples >= self.tuples) or (
            self.seconds is not None and seconds >= self.seconds
        )


class Sighting(msgspec.Struct, frozen=True):
    """Rows of a key that a router has sent on to the key's owner at another site."""

    key: Key
    site: str  # at which they entered
    tuples: int
    at_s: float


class HandOver(msgspec.Struct, frozen=True):
    """Keys that go from one site to another in one move."""

    keys: frozenset[Key]
    source: str
    destination: str
    reason: str
    predicted: bool = False  # only a copy, until rows enter at the destination


class Visit(NamedTuple):
    """A site at which the rows of a key entered, from some time on."""

    site: str
    since_s: float


Predict = Callable[[Key, tuple[Visit, ...]], str | None]  # key, where it was -> the site where it will be
OUTDATED_S_MAX = 5.0  # tables that do not show a hand-over for so long are right nevertheless
VISITED_KEYS_MAX = 10_000  # whose visits are remembered
VISITS_MAX = 16


class EndedHandOver(msgspec.Struct, frozen=True):
    """A hand-over that has ended, with what it was for."""

    operator: str
    keys: tuple[Key, ...]
    source: str
    destination: str
    reason: str
    requested_s: float  # seconds since 1970
    phases: dict[str, float]  # phase -> ms after the request at which the last key had reached it
    bytes_moved: int
    undone: str = ""  # why it was undone; empty: it was carried out

    @property
    def duration_ms(self) -> float:
        return max(self.phases.values(), default=0.0)

    def __str__(self) -> str:
        how = f"undone: {self.undone}" if self.undone else f"in {self.duration_ms:.0f} ms"
        what = f"{len(self.keys)} keys, {self.bytes_moved:,} bytes"
        return f"{self.operator}: {self.source} -> {self.destination}, {what}, {how}: {self.reason}"


class MobilityState(enum.Enum):
    """Where a key is on its way."""

    HOME = "home"  # its rows enter where its owner is, or none enter
    VISITING = "visiting"  # they enter elsewhere, below the mobility threshold
    RISING = "rising"  # a hand-over to the ancestor runs
    RESTING = "resting"  # its owner is an ancestor of the site at which its rows enter
    DESCENDING = "descending"  # a hand-over to that site runs


class Journey:
    """One source that was seen elsewhere."""

    __slots__ = ("hand_over", "left_s", "left_tuples", "seen_s", "since_s", "site", "tuples", "waits_until_s")

    def __init__(self, sighting: Sighting) -> None:
        self.left_s = sighting.at_s  # first row that entered elsewhere
        self.left_tuples = 0
        self.site = sighting.site  # where it is
        self.since_s = sighting.at_s
        self.tuples = 0  # at that site
        self.seen_s = sighting.at_s
        self.hand_over: tuple[str, str] | None = None  # source and destination of the one that runs
        self.waits_until_s = 0.0  # after one that was undone

    def see(self, sighting: Sighting) -> None:
        if sighting.site != self.site:
            self.site, self.since_s, self.tuples = sighting.site, sighting.at_s, 0
        self.tuples += sighting.tuples
        self.left_tuples += sighting.tuples
        self.seen_s = max(self.seen_s, sighting.at_s)


class Mobility:
    """The mobility of one operator's keys. Keys that are at home take no memory."""

    def __init__(
        self,
        parents: Mapping[str, str | None],
        mobility: Threshold,
        wait: Threshold,
        *,
        direct: bool = False,
        forget_s: float = 10.0,
        retry_s: float = 1.0,
        keys_max: int = 400,
        at_once_max: int = 1,
        predict: Predict | None = None,
    ) -> None:
        """`parents` are the sites. A source without a sighting for `forget_s` is home again, or vanished.

        A hand-over has at most `keys_max` keys, and `at_once_max` run between the same two sites.
        """
        self._parents = dict(parents)
        self._mobility, self._wait, self._direct = mobility, wait, direct
        self._forget_s, self._retry_s = forget_s, retry_s
        self._keys_max, self._at_once_max = keys_max, at_once_max
        self._journeys: dict[Key, Journey] = {}
        self._due: dict[Key, None] = {}  # keys to look at: seen, handed over, or waiting since the last call
        self._running: dict[tuple[str, str], int] = {}  # hand-overs between two sites
        self._moved: dict[Key, tuple[str, float]] = {}  # handed over shortly before -> where, until when
        self._predict = predict
        self._visits: dict[Key, tuple[Visit, ...]] = {}  # those seen last are at the end
        self._arrived: dict[Key, str] = {}  # keys that have come to where their source is
        self._copied: dict[Key, str] = {}  # keys of which a copy is at the predicted site

    def __len__(self) -> int:
        """Keys that are not at home."""
        return len(self._journeys)

    def state(self, key: Key, owner: str) -> MobilityState:
        """The state of a key whose owner is at this site."""
        journey = self._journeys.get(key)
        if journey is None or (journey.site == owner and journey.hand_over is None):
            return MobilityState.HOME
        if journey.hand_over is not None:
            down = journey.hand_over[1] == journey.site
            return MobilityState.DESCENDING if down else MobilityState.RISING
        return MobilityState.RESTING if self._is_ancestor(owner, journey.site) else MobilityState.VISITING

    # -- events ------------------------------------------------------------------------------

    def decide(
        self, sightings: Iterable[Sighting], owner_of: Callable[[Key], str], now_s: float
    ) -> list[HandOver]:
        """Take what routers have seen, and say what to hand over now. `owner_of` gives a key's site."""
        for sighting in sightings:
            if sighting.site not in self._parents:
                raise InvalidRequest.unknown("site", sighting.site, sorted(self._parents))
            seen = self._journeys.pop(sighting.key, None) or Journey(sighting)
            self._journeys[sighting.key] = seen  # those seen last are at the end
            seen.see(sighting)
            self._due[sighting.key] = None
            if self._predict is not None:
                self._visit(sighting)
        self._forget(now_s)
        wanted: dict[tuple[str, str], list[tuple[Key, str]]] = {}
        due, self._due = self._due, {}
        for key in due:
            journey = self._journeys.get(key)
            if journey is None or journey.hand_over is not None:
                continue
            if now_s < journey.waits_until_s:
                self._due[key] = None
                continue
            if self._copied.get(key) == journey.site:  # its rows decide the move
                self._due[key] = None
                continue
            owner = owner_of(key)
            if self._is_outdated(key, owner):
                self._due[key] = None
                continue
            if journey.site == owner:  # a late report of rows that went on before the key came here
                del self._journeys[key]
                continue
            found = self._destination(journey, owner)
            if found is not None:
                wanted.setdefault((owner, found[0]), []).append((key, found[1]))
        found_together = [
            hand_over for pair, keys in sorted(wanted.items()) for hand_over in self._together(pair, keys)
        ]
        return found_together + self._predictions(owner_of)

    # -- predictions ---------------------------------------------------------------------------

    def _visit(self, sighting: Sighting) -> None:
        visits = self._visits.pop(sighting.key, ())
        if not visits or visits[-1].site != sighting.site:
            visits = (*visits, Visit(sighting.site, sighting.at_s))[-VISITS_MAX:]
        self._visits[sighting.key] = visits
        if len(self._visits) > VISITED_KEYS_MAX:
            del self._visits[next(iter(self._visits))]

    def _predictions(self, owner_of: Callable[[Key], str]) -> list[HandOver]:
        """Copies of keys that have come to where their sources are, for where these will go."""
        arrived, self._arrived = self._arrived, {}
        found = []
        for key, site in arrived.items():
            visits = self._visits.get(key)
            journey = self._journeys.get(key)
            if self._predict is None or not visits or key in self._copied:
                continue
            if owner_of(key) != site:
                self._arrived[key] = site  # the tables do not say so yet
                continue
            if journey is not None and journey.site != site:
                continue  # it has left already
            then = self._predict(key, visits)
            if then is None or then == site or then not in self._parents:
                continue
            self._copied[key] = then
            reason = f"predicted at {then} behind {', '.join(visit.site for visit in visits[-3:])}"
            found.append(HandOver(frozenset((key,)), site, then, reason, predicted=True))
        return found

    def _copy_ended(self, hand_over: HandOver, *, undone: bool) -> None:
        for key in hand_over.keys:
            self._copied.pop(key, None)
            if not undone:
                self._journeys.pop(key, None)
                self._arrived[key] = hand_over.destination

    def _is_outdated(self, key: Key, owner: str) -> bool:
        """Whether a hand-over of the key has ended, and the tables do not say so yet."""
        moved = self._moved.get(key)
        return moved is not None and moved[0] != owner

    def _forget(self, now_s: float) -> None:
        """Drop sources that were not seen elsewhere for long: they are home again, or vanished."""
        while self._moved and next(iter(self._moved.values()))[1] < now_s:
            del self._moved[next(iter(self._moved))]
        running = []
        while self._journeys:
            key, journey = next(iter(self._journeys.items()))
            if now_s - journey.seen_s <= self._forget_s:
                break
            del self._journeys[key]
            if journey.hand_over is not None:
                running.append((key, journey))
        for key, journey in running:  # until the hand-over has ended
            journey.seen_s = now_s
            self._journeys[key] = journey

    def ended(self, hand_over: HandOver, now_s: float, *, undone: bool = False) -> None:
        """A hand-over has ended. Its keys are at the destination, or where they were."""
        if hand_over.predicted:
            self._copy_ended(hand_over, undone=undone)
            return
        pair = (hand_over.source, hand_over.destination)
        self._running[pair] = self._running.get(pair, 0) - 1
        if self._running[pair] <= 0:
            del self._running[pair]
        for key in hand_over.keys:
            if not undone:
                self._moved.pop(key, None)
                self._moved[key] = (hand_over.destination, now_s + OUTDATED_S_MAX)
            journey = self._journeys.get(key)
            if journey is None or journey.hand_over != pair:
                continue
            journey.hand_over = None
            self._due[key] = None
            if undone:
                journey.waits_until_s = now_s + self._retry_s
            elif journey.site == hand_over.destination:
                del self._journeys[key]
                if self._predict is not None:
                    self._arrived[key] = hand_over.destination
            else:
                journey.left_s, journey.left_tuples = journey.since_s, journey.tuples

    # -- rules -------------------------------------------------------------------------------

    def _destination(self, journey: Journey, owner: str) -> tuple[str, str] | None:
        """Where the key of a journey should be now, and why; None: where it is."""
        if journey.site == owner:
            return None
        stayed = self.has_stayed(journey)
        if self._is_ancestor(owner, journey.site):
            if stayed or self._direct:
                return self._found(
                    journey.site, journey.tuples, journey.seen_s - journey.since_s, "stayed at"
                )
            return None
        if not self.has_left(journey):
            return None
        to = journey.site if self._direct else self._common_ancestor(owner, journey.site)
        return self._found(
            to, journey.left_tuples, journey.seen_s - journey.left_s, f"left {owner}, now at", journey
        )

    def has_left(self, journey: Journey) -> bool:
        """Whether the source has been elsewhere beyond the mobility threshold."""
        return self._mobility.is_reached(journey.left_tuples, journey.seen_s - journey.left_s)

    def has_stayed(self, journey: Journey) -> bool:
        """Whether the source has been at one site beyond the wait threshold."""
        return self._wait.is_reached(journey.tuples, journey.seen_s - journey.since_s)

    @staticmethod
    def _found(
        to: str, tuples: int, seconds: float, what: str, journey: Journey | None = None
    ) -> tuple[str, str]:
        where = to if journey is None else journey.site
        return to, f"{what} {where}: {tuples} tuples in {seconds:.1f} s"

    def _together(self, pair: tuple[str, str], keys: list[tuple[Key, str]]) -> list[HandOver]:
        """Hand-overs of one pair of sites travel together, within the limits; the others wait."""
        found = []
        waiting = list(keys)
        while waiting and self._running.get(pair, 0) < self._at_once_max:
            some, waiting = waiting[: self._keys_max], waiting[self._keys_max :]
            for key, _ in some:
                self._journeys[key].hand_over = pair
            self._running[pair] = self._running.get(pair, 0) + 1
            more = f", and {len(some) - 1} more" if len(some) > 1 else ""
            found.append(HandOver(frozenset(key for key, _ in some), *pair, some[0][1] + more))
        self._due.update(dict.fromkeys(key for key, _ in waiting))
        return found

    def _path(self, site: str) -> list[str]:
        """A site and all of its ancestors."""
        path = [site]
        while (parent := self._parents.get(path[-1])) is not None:
            path.append(parent)
        return path

    def _is_ancestor(self, site: str, other: str) -> bool:
        return site in self._path(other)[1:]

    def _common_ancestor(self, a: str, b: str) -> str:
        """The lowest site above both, or one of them; without one, where the source is."""
        above = set(self._path(a))
        return next((site for site in self._path(b) if site in above), b)
