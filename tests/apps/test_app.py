"""Promises of every application: named options, and a generator that is a function of its seed."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

import tiercel
from tiercel.apps.app import described_options, parse_options
from tiercel.apps.catalogue import APPS, find_app
from tiercel.apps.figures import Arrivals
from tiercel.apps.load import Sender
from tiercel.apps.run import Run

NAMES = sorted(APPS)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_events_and_another_seed_gives_others(name: str) -> None:
    app = find_app(name)
    options = parse_options(app, {})
    first, again, other = (list(islice(app.generate(options, seed, 1_000), 500)) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("name", NAMES)
def test_moments_of_events_never_fall(name: str) -> None:
    app = find_app(name)
    options = parse_options(app, {})
    events = list(islice(app.generate(options, 3, 1_000), 2_000))
    moments = [moment for moment, _, _ in [*events, *app.last_events(options, events[-1][0])]]
    assert moments == sorted(moments)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_default_that_is_allowed(name: str) -> None:
    app = find_app(name)
    given = {option: text.partition(" (")[0] for option, text in described_options(app).items()}
    assert parse_options(app, given) == parse_options(app, {})


def test_an_unknown_application_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        tiercel.UserError, match=r"unknown application 'paint'\nexpected: one of: .*wordcount"
    ):
        find_app("paint")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keys": "0"}, r"keycount: keys = '0'\nexpected: int >= 1"),
        ({"keys": "many"}, r"keycount: keys = 'many'\nexpected: int"),
        ({"skew": "steep"}, r"keycount: skew = 'steep'\nexpected: "),
        ({"cars": "3"}, r"keycount: unknown option 'cars'\nexpected: one of: exponent, keys, skew"),
    ],
)
def test_a_bad_option_is_named_with_what_is_allowed(given: dict[str, str], message: str) -> None:
    with pytest.raises(tiercel.UserError, match=message):
        parse_options(find_app("keycount"), given)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rate": -1}, r"rate = -1\nexpected: a number from 0 to 200,000"),
        ({"rate": 10**9}, r"rate = 1,000,000,000\nexpected: a number from 0 to 200,000"),
        ({"seconds": 0}, r"seconds = 0\nexpected"),
        ({"rate": 200_000, "seconds": 3_000}, r"rate times seconds = .*\nexpected: .*20,000,000"),
        (
            {"during": ["explode"]},
            r"unknown change 'explode'\nexpected: some of: none, move, half, scale, restart, kill",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_anything_starts(
    bad: dict[str, object], message: str
) -> None:
    with pytest.raises(tiercel.UserError, match=message):
        Run(find_app("keycount"), **bad).check()  # type: ignore[arg-type]


def test_jitter_is_the_share_of_the_usual_rate_by_which_a_second_is_off() -> None:
    due = np.arange(0, 4_000_000_000, 10_000_000)  # 100 a second
    standing = (due >= 1_500_000_000) & (due < 2_000_000_000)
    late = np.where(standing, 2_100_000_000, due)
    arrivals = Arrivals(due, late, np.zeros(len(due), np.int64))
    assert arrivals.jitter_max(0, 1_000_000_000) == 0.0
    assert arrivals.jitter_max(1_000_000_000, 2_000_000_000) == pytest.approx(0.5, abs=0.01)


def test_events_along_a_ramp_are_due_in_their_second() -> None:
    sender = Sender({}, [], [], iter(()), 30, 3.0, (10, 20, 60))
    sender.start_ns = 0
    due_s = [sender.due_of(n) / 1e9 for n in (0, 5, 10, 20, 30, 89, 90, 120)]
    assert due_s == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2 + 59 / 60, 3.0, 4.0])
    assert Run(find_app("keycount"), rates=(10, 20, 60)).events == 90
