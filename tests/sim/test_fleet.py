"""The fleet, small: keys follow their cars whatever way they drive, and no row is lost or reordered."""

from __future__ import annotations

import pytest

from tiercel.sim.scenario import fleet


@pytest.fixture(scope="module")
def report() -> fleet.FleetReport:
    return fleet.run_fleet(sites=12, keys=400, cars=24, probes=8, drive_s=4.0)


def test_every_row_of_cars_that_travel_is_processed_once_and_in_order(report: fleet.FleetReport) -> None:
    assert report.faults == []
    assert report.rows > 400 + 24


def test_keys_follow_cars_that_cross_and_rest_where_cars_oscillate(report: fleet.FleetReport) -> None:
    assert report.by_way["crosses"] > 1, "up to the ancestor, and down"
    assert report.by_way["oscillates"] < report.by_way["crosses"]
    assert 0 < report.by_way["vanishes"] <= 1, "a key whose car has vanished stays where it rests"
    assert report.by_way["twice"] >= 1


def test_nothing_is_left_in_the_tables_when_the_cars_have_arrived(report: fleet.FleetReport) -> None:
    assert report.entries_late <= report.entries_early + report.cars


def test_a_lost_row_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = fleet.schedule

    def with_a_row_too_many(*given: object) -> object:
        by_site, counts = scheduled(*given)  # type: ignore[arg-type]
        counts[next(iter(counts))] += 1
        return by_site, counts

    monkeypatch.setattr(fleet, "schedule", with_a_row_too_many)
    assert any("rows came" in fault for fault in fleet.run_fleet(6, 50, 4, 1, 1.0).faults)


def test_there_are_as_many_sites_and_keys_as_asked_for() -> None:
    sites = fleet.fleet_sites(200)
    assert len(sites) == 200
    assert list(sites.values()).count(None) == 1
