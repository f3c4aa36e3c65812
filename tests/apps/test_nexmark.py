"""NEXMark's events follow the published rules, and its operators agree with their definitions."""

from __future__ import annotations

import datetime
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tiercel import UserError
from tiercel.apps.app import parse_options
from tiercel.apps.nexmark.app import NexmarkApp, NexmarkOptions
from tiercel.apps.nexmark.generator import BLOCK, Mix, Nexmark
from tiercel.apps.nexmark.oracle import SQL
from tiercel.apps.nexmark.processors import (
    NEW_SELLER,
    SELLER_MEAN,
    WINNING,
    SellerMean,
    SlidingJoin,
    WinningBids,
)
from tiercel.apps.nexmark.queries import OFFER_SIDE, QUERIES, SOLD_AUCTION
from tiercel.apps.times import from_ms, to_ms
from tiercel.testing import Trial, check_deterministic

START = to_ms(datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC))


def at(ms: int) -> datetime.datetime:
    return from_ms(START + ms)


def test_a_cycle_has_one_person_three_auctions_and_46_bids() -> None:
    block = Nexmark(seed=1).block(3)
    counts = [len(columns["dateTime"]) for columns in (block.persons, block.auctions, block.bids)]
    assert counts == [BLOCK // 50, BLOCK // 50 * 3, BLOCK // 50 * 46]
    first = 3 * BLOCK // 50
    assert block.persons["id"] == list(range(1000 + first, 1000 + first + BLOCK // 50))
    assert block.auctions["id"] == list(range(1000 + 3 * first, 1000 + 3 * (first + BLOCK // 50)))


def test_an_event_is_a_function_of_seed_and_number() -> None:
    generator = Nexmark(seed=7)
    whole, cut = generator.block(1), generator.block(1, 500)
    assert cut.bids == {name: values[: len(cut.bids["price"])] for name, values in whole.bids.items()}
    assert Nexmark(seed=7).block(1) != Nexmark(seed=8).block(1)


def test_half_of_the_bids_are_for_the_hot_auction_and_prices_span_six_decades() -> None:
    block = Nexmark(seed=2).block(2)
    last = Nexmark(seed=2).last_auction(block.numbers["bids"])
    hot = (last // 100) * 100 + 1000
    share = np.mean(hot == np.array(block.bids["auction"]))
    assert 0.47 < share < 0.56
    assert 100 <= min(block.bids["price"]) < 200
    assert 50_000_000 < max(block.bids["price"]) <= 100_000_000
    sizes = [len(extra) for extra in block.bids["extra"]]
    assert 40 < np.mean(sizes) < 80


def test_bids_may_name_auctions_that_begin_later_but_none_that_is_far_ahead() -> None:
    generator = Nexmark(seed=3)
    block = generator.block(4)
    ahead = np.array(block.bids["auction"]) - 1000 - generator.last_auction(block.numbers["bids"])
    assert 0 < ahead.max() <= 10


def test_a_mix_without_persons_or_auctions_draws_their_ids_from_those_that_are_active() -> None:
    block = Nexmark(seed=1, mix=Mix(0, 0, 50, active_people=300)).block(0)
    assert len(block.bids["price"]) == BLOCK
    assert {1000 <= bidder < 1000 + 310 for bidder in block.bids["bidder"]} == {True}


def test_events_of_a_query_are_in_order_and_only_those_that_it_reads() -> None:
    events = list(islice(NexmarkApp().generate(NexmarkOptions(query="q4"), 1, 1000), 6000))
    moments = [moment for moment, _, _ in events]
    assert moments == sorted(moments)
    assert set(Counter(stream for _, stream, _ in events)) == {"auctions", "bids"}
    assert 5_900 < moments[-1] < 6_100


@pytest.mark.parametrize("rate", [0, -1, 2_000_000])
def test_an_absurd_rate_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="rate"):
        Nexmark(rate=rate)


def test_an_unknown_query_is_named_with_those_that_exist() -> None:
    with pytest.raises(UserError, match="query = 'q9'") as refused:
        parse_options(NexmarkApp(), {"query": "q9"})
    assert refused.value.expected == "one of: q1, q2, q3, q4, q5, q6, q7, q7-drrs, q8, q8-drrs"


def test_a_speed_that_leaves_too_few_events_in_a_second_is_refused() -> None:
    with pytest.raises(UserError, match="speed = 100 at 200 events"):
        next(NexmarkApp().generate(NexmarkOptions(query="q5", speed=100), 1, 200))


def test_every_query_has_an_oracle_and_an_output() -> None:
    assert set(SQL) == set(QUERIES) == set(NexmarkApp.outputs)


# -- operators -----------------------------------------------------------------------------------

SALE_SIDE = f"{OFFER_SIDE}, price bigint, bidder bigint"


def offer(auction: int, reserve: int, expires: int, time: int = 0) -> tuple[Any, ...]:
    return (auction, 7, 10, reserve, at(expires), at(time), None, None)


def bid(auction: int, price: int, bidder: int, time: int) -> tuple[Any, ...]:
    return (auction, None, None, None, None, at(time), price, bidder)


def winning() -> Trial:
    return Trial(
        WinningBids(1_000),
        schema=SALE_SIDE,
        key="auction",
        output=WINNING,
        time_mode="eventTime",
        event_time="dateTime",
    )


def test_the_earliest_of_the_highest_bids_wins_at_least_the_reserve_before_the_end() -> None:
    trial = winning()
    trial.send(
        bid(1, 300, 5, 90), offer(1, 200, 500), bid(1, 300, 6, 80)
    )  # the first came before its auction
    trial.move(1)
    trial.send(bid(1, 900, 8, 500), bid(1, 100, 9, 10), offer(2, 1_000, 500), bid(2, 999, 5, 20))
    trial.crash()
    trial.watermark(START + 499)
    assert trial.outputs() == []
    trial.watermark(START + 500)
    assert [tuple(row)[:5] for row in trial.outputs()] == [(1, 7, 10, 300, 6)]


def test_bids_without_an_auction_are_forgotten() -> None:
    trial = winning()
    trial.send(bid(3, 50, 1, 100), bid(3, 60, 1, 400))
    assert trial.state(3)
    trial.watermark(START + 1_200)
    trial.watermark(START + 1_500)
    assert not trial.state(3)


def test_a_sellers_mean_counts_sales_in_the_order_of_their_closing() -> None:
    trial = Trial(
        SellerMean(2),
        schema=WINNING,
        key="seller",
        output=SELLER_MEAN,
        time_mode="eventTime",
        event_time="closed",
    )
    for auction, price, closed in ((1, 30, 300), (2, 11, 200), (3, 10, 100)):
        trial.send((auction, 7, 10, price, 1, at(closed)))
    trial.watermark(START + 250)
    trial.move(7)
    trial.watermark(START + 400)
    assert [row.price for row in trial.outputs()] == [10, 11, 21]  # 10, (10 + 11) / 2, (11 + 30) / 2 half up


def test_a_sliding_join_gives_a_pair_for_each_window_that_holds_both() -> None:
    rows = [
        (1, None, 11, 5, at(12_000)),
        (1, "Ann", None, None, at(3_000)),
        (2, None, 12, 5, at(1_000)),
        (1, None, 13, 5, at(29_000)),
    ]
    schema = f"seller bigint, name string, {SOLD_AUCTION.removeprefix('seller bigint, ')}"
    kinds = {
        "schema": schema,
        "key": "seller",
        "output": NEW_SELLER,
        "time_mode": "eventTime",
        "event_time": "dateTime",
    }
    trial = Trial(SlidingJoin(20_000, 5_000), **kinds)
    trial.send(*rows)
    trial.watermark(START + 100_000)
    found = [(row.auction, (to_ms(row.windowEnd) - START) // 1000) for row in trial.outputs()]
    assert found == [(11, 15), (11, 20)]
    assert not trial.state(1)
    check_deterministic(SlidingJoin(20_000, 5_000), rows, **kinds)
