"""Mobility as transcripts: what is seen where, second by second, and what is handed over."""

from __future__ import annotations

import pytest

from tiercel.control.mobility import HandOver, Mobility, MobilityState, Sighting, Threshold, Visit
from tiercel.core.errors import InvalidRequest

SITES = {
    "cloud": None,
    "region-1": "cloud",
    "region-2": "cloud",
    "edge-1": "region-1",
    "edge-2": "region-1",
    "edge-3": "region-2",
}
MOBILITY, WAIT = Threshold(tuples=3, seconds=2), Threshold(seconds=5)
CAR = b"car"


class Script:
    """One key: rows by the second, hand-overs that take `took_s`."""

    def __init__(self, owner: str, took_s: float = 0.5, **options: object) -> None:
        self.mobility = Mobility(SITES, MOBILITY, WAIT, **options)  # type: ignore[arg-type]
        self.owner, self.took_s = owner, took_s
        self.under_way: list[tuple[float, HandOver]] = []
        self.ways: list[str] = []

    def play(self, text: str, until_s: int = 40) -> list[str]:
        """`text`: "SECOND SITE TUPLES" separated by commas; the owner's own rows are not reported."""
        seen: dict[int, list[Sighting]] = {}
        for part in text.split(","):
            second, site, tuples = part.split()
            seen.setdefault(int(second), []).append(Sighting(CAR, site, int(tuples), float(second)))
        for second in range(until_s):
            for end_s, hand_over in [w for w in self.under_way if w[0] <= second]:
                self.under_way.remove((end_s, hand_over))
                self.owner = hand_over.destination
                self.mobility.ended(hand_over, second)
            reported = [s for s in seen.get(second, []) if s.site != self.owner]
            for hand_over in self.mobility.decide(reported, lambda _: self.owner, second):
                self.ways.append(f"{second} {hand_over.source} {hand_over.destination}")
                self.under_way.append((second + self.took_s, hand_over))
        return self.ways


def each_second(site: str, first: int, last: int, tuples: int = 1) -> str:
    return ", ".join(f"{second} {site} {tuples}" for second in range(first, last + 1))


TRANSCRIPTS = {
    "at home nothing is reported and nothing moves": ("edge-1", "0 edge-1 5", []),
    "a short visit pulls no state": ("edge-1", "0 edge-2 1, 1 edge-2 1", []),
    "a fast source reaches the threshold in tuples at once": ("edge-1", "0 edge-2 3", ["0 edge-1 region-1"]),
    "a slow source reaches it in seconds": ("edge-1", "0 edge-2 1, 2 edge-2 1", ["2 edge-1 region-1"]),
    "up to the lowest common ancestor, down where it stays": (
        "edge-1",
        each_second("edge-2", 0, 9),
        ["2 edge-1 region-1", "5 region-1 edge-2"],
    ),
    "between regions the common ancestor is the cloud": (
        "edge-1",
        each_second("edge-3", 0, 9),
        ["2 edge-1 cloud", "5 cloud edge-3"],
    ),
    "a source that oscillates rests at the ancestor": (
        "edge-1",
        ", ".join(f"{n} edge-{2 + n // 2 % 2} 1" for n in range(30)),
        ["2 edge-1 cloud"],
    ),
    "a source that vanishes leaves its key at the ancestor": (
        "edge-1",
        each_second("edge-2", 0, 3),
        ["2 edge-1 region-1"],
    ),
    "a source that moves on while it rests starts to wait again": (
        "edge-1",
        each_second("edge-2", 0, 3) + ", " + each_second("edge-1", 4, 12),
        ["2 edge-1 region-1", "9 region-1 edge-1"],
    ),
    "a key that is in the cloud goes down where its source stays": (
        "cloud",
        each_second("edge-3", 0, 8),
        ["5 cloud edge-3"],
    ),
    "a source that moved up goes to that site at once": (
        "edge-1",
        each_second("region-1", 0, 4),
        ["2 edge-1 region-1"],
    ),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(name: str) -> None:
    owner, text, expected = TRANSCRIPTS[name]
    assert Script(owner).play(text) == expected


def test_the_direct_variant_skips_the_ancestor() -> None:
    assert Script("edge-1", direct=True).play(each_second("edge-3", 0, 9)) == ["2 edge-1 edge-3"]


def test_a_source_that_changes_twice_within_one_move_is_followed_when_it_has_ended() -> None:
    script = Script("edge-1", took_s=6)
    text = ", ".join((each_second("edge-2", 0, 3), each_second("edge-3", 4, 20)))
    assert script.play(text) == ["2 edge-1 region-1", "8 region-1 cloud", "14 cloud edge-3"]
    assert script.owner == "edge-3"


def test_an_undone_hand_over_is_tried_again_after_a_pause() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT, retry_s=2.0)
    (first,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    mobility.ended(first, 0.5, undone=True)
    assert mobility.decide([Sighting(CAR, "edge-2", 1, 1.0)], lambda _: "edge-1", 1.0) == []
    (again,) = mobility.decide([Sighting(CAR, "edge-2", 1, 3.0)], lambda _: "edge-1", 3.0)
    assert again.destination == "region-1"


def test_hand_overs_between_the_same_sites_travel_together_within_limits() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT, keys_max=2)
    keys = [b"car %d" % n for n in range(5)]
    seen = [Sighting(key, "edge-2", 3, 0.0) for key in keys]
    (first,) = mobility.decide(seen, lambda _: "edge-1", 0.0)
    assert len(first.keys) == 2
    assert "and 1 more" in first.reason
    assert mobility.decide([], lambda _: "edge-1", 0.1) == [], "one at a time between two sites"
    mobility.ended(first, 0.2)
    (second,) = mobility.decide([], lambda key: "region-1" if key in first.keys else "edge-1", 0.3)
    assert len(second.keys) == 2
    assert not first.keys & second.keys


def test_the_states_of_a_key_on_its_way() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT)
    assert mobility.state(CAR, "edge-1") is MobilityState.HOME
    mobility.decide([Sighting(CAR, "edge-2", 1, 0.0)], lambda _: "edge-1", 0.0)
    assert mobility.state(CAR, "edge-1") is MobilityState.VISITING
    (up,) = mobility.decide([Sighting(CAR, "edge-2", 2, 1.0)], lambda _: "edge-1", 1.0)
    assert mobility.state(CAR, "edge-1") is MobilityState.RISING
    assert up.reason == "left edge-1, now at edge-2: 3 tuples in 1.0 s"
    mobility.ended(up, 1.5)
    assert mobility.state(CAR, "region-1") is MobilityState.RESTING
    (down,) = mobility.decide([Sighting(CAR, "edge-2", 1, 6.0)], lambda _: "region-1", 6.0)
    assert mobility.state(CAR, "region-1") is MobilityState.DESCENDING
    mobility.ended(down, 6.5)
    assert mobility.state(CAR, "edge-2") is MobilityState.HOME


def test_keys_at_home_and_vanished_sources_take_no_memory() -> None:
    mobility = Mobility(SITES, Threshold(tuples=1_000), WAIT, forget_s=10)
    for n in range(1_000):
        mobility.decide([Sighting(b"car %d" % n, "edge-2", 1, float(n))], lambda _: "edge-1", float(n))
    assert len(mobility) <= 12


def test_a_decision_looks_only_at_keys_that_were_seen() -> None:
    """With many keys under way, one that was seen costs as much as with few."""
    asked: list[bytes] = []

    def owner_of(key: bytes) -> str:
        asked.append(key)
        return "edge-1"

    mobility = Mobility(SITES, Threshold(tuples=1_000), WAIT)
    mobility.decide([Sighting(b"car %d" % n, "edge-2", 1, 0.0) for n in range(5_000)], owner_of, 0.0)
    asked.clear()
    mobility.decide([Sighting(CAR, "edge-2", 1, 1.0)], owner_of, 1.0)
    assert asked == [CAR]


@pytest.mark.parametrize("limits", [{}, {"tuples": 0}, {"seconds": -1.0}, {"tuples": True}])
def test_a_threshold_that_cannot_work_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="threshold"):
        Threshold(**limits)  # type: ignore[arg-type]


def test_a_sighting_at_an_unknown_site_is_refused_by_name() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT)
    with pytest.raises(InvalidRequest, match="unknown site 'mars'"):
        mobility.decide([Sighting(CAR, "mars", 1, 0.0)], lambda _: "edge-1", 0.0)


def following(places: dict[str, str]) -> Mobility:
    return Mobility(
        SITES, MOBILITY, WAIT, direct=True, predict=lambda key, visits: places.get(visits[-1].site)
    )


def test_a_copy_goes_where_a_source_is_predicted_once_its_key_has_come_to_where_it_is() -> None:
    mobility = following({"edge-2": "edge-3"})
    (first,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    assert not first.predicted
    mobility.ended(first, 1.0)
    assert mobility.decide([], lambda _: "edge-1", 1.0) == [], "the tables do not say so yet"
    (copy,) = mobility.decide([], lambda _: "edge-2", 2.0)
    assert copy == HandOver(
        frozenset({CAR}), "edge-2", "edge-3", "predicted at edge-3 behind edge-2", predicted=True
    )
    seen = [Sighting(CAR, "edge-3", 3, 3.0)]
    assert mobility.decide(seen, lambda _: "edge-2", 3.0) == [], "its rows decide the move"
    mobility.ended(copy, 3.5)
    assert mobility.decide([], lambda _: "edge-3", 4.0) == []


def test_a_wrong_prediction_costs_a_copy_and_the_key_follows_its_source() -> None:
    mobility = following({"edge-2": "edge-3"})
    (first,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    mobility.ended(first, 1.0)
    (copy,) = mobility.decide([], lambda _: "edge-2", 2.0)
    mobility.ended(copy, 3.0, undone=True)
    (then,) = mobility.decide([Sighting(CAR, "edge-1", 3, 4.0)], lambda _: "edge-2", 4.0)
    assert (then.source, then.destination, then.predicted) == ("edge-2", "edge-1", False)


def test_the_function_gets_the_visits_of_a_source_in_their_order() -> None:
    seen: list[tuple[Visit, ...]] = []
    mobility = Mobility(SITES, MOBILITY, WAIT, direct=True, predict=lambda key, visits: seen.append(visits))
    (first,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    mobility.ended(first, 1.0)
    (second,) = mobility.decide([Sighting(CAR, "edge-3", 3, 5.0)], lambda _: "edge-2", 5.0)
    mobility.ended(second, 6.0)
    assert mobility.decide([], lambda _: "edge-3", 7.0) == []
    assert seen[-1] == (Visit("edge-2", 0.0), Visit("edge-3", 5.0))


def test_a_prediction_of_no_site_of_the_deployment_copies_nothing() -> None:
    mobility = following({"edge-2": "mars"})
    (first,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    mobility.ended(first, 1.0)
    assert mobility.decide([], lambda _: "edge-2", 2.0) == []


def test_a_key_is_not_handed_over_again_because_the_tables_are_a_second_old() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT)
    (up,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    mobility.ended(up, 1.0)
    seen = [Sighting(CAR, "edge-2", 3, 1.0)]
    assert mobility.decide(seen, lambda _: "edge-1", 1.0) == [], "it is at region-1"
    assert mobility.decide([], lambda _: "region-1", 2.0) == []
    (down,) = mobility.decide([Sighting(CAR, "edge-2", 3, 6.0)], lambda _: "region-1", 6.0)
    assert (down.source, down.destination) == ("region-1", "edge-2")


def test_tables_that_stay_as_they_are_count_in_the_end() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT)
    (up,) = mobility.decide([Sighting(CAR, "edge-2", 3, 0.0)], lambda _: "edge-1", 0.0)
    mobility.ended(up, 1.0)
    mobility.decide([Sighting(CAR, "edge-2", 3, 1.0)], lambda _: "edge-1", 1.0)
    (again,) = mobility.decide([Sighting(CAR, "edge-2", 3, 8.0)], lambda _: "edge-1", 8.0)
    assert again.source == "edge-1"


def test_a_late_report_of_rows_from_before_a_hand_over_does_not_count_as_leaving() -> None:
    mobility = Mobility(SITES, MOBILITY, WAIT)
    assert mobility.decide([Sighting(CAR, "edge-2", 9, 0.0)], lambda _: "edge-2", 0.0) == []
    assert len(mobility) == 0
    seen = [Sighting(CAR, "edge-1", 1, 5.0)]
    assert mobility.decide(seen, lambda _: "edge-2", 5.0) == [], "one tuple, just now"
