"""The benchmark of hand-overs: its machines really move the key, and what it counts stays the same."""

from __future__ import annotations

from tiercel.bench.handover_cost import TwoSites, measure, soak


def test_key_is_handed_over_to_and_fro_and_nothing_is_left_behind() -> None:
    sites = TwoSites(50)
    first = sites.first_owner()
    sizes = []
    for n in range(first, first + 8):
        assert sites.first_owner() == n % 2
        sites.hand_over(n)
        sizes.append([len(sites.disks[name]) for name in ("cloud", "edge")])
    assert sizes[4] == sizes[6]
    assert sizes[5] == sizes[7]


def test_lines_say_what_was_measured() -> None:
    line = measure(10, 2)
    assert (line["overrides"], line["moves"]) == (10, 2)
    assert line["ms a hand-over"] > 0
    assert [line["moves"] for line in soak(20)] == list(range(2, 21, 2))
