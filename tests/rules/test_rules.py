"""One promise per rule of the protocol; each of these tests fails when its rule is taken out.

Responsible for: R1 to R30, as docs/rules.md lists them. Where a planted bug takes a rule out, a seed of
    the simulator must notice it; `killers.json` says which seed did when it was last written:

        tiercel sim --mutants --seeds 400 --jobs 1 --json > tests/rules/killers.json

    Rules without a planted bug are transcripts of the real machines, each with its own counter-proof.
Not responsible for: the machines' other promises (tests/core).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from playing import BOSS, Stage, key_in, topology
from tiercel.core import engine
from tiercel.core import messages as m
from tiercel.core.events import Connected, Disconnected
from tiercel.core.feed import Phase as FeedPhase
from tiercel.core.records import Compare, Flip, KeySet, Output, Route, TableUpdate
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.core.strategies import STRATEGIES
from tiercel.core.topology import Stream, Topology
from tiercel.sim.mutants import DIRECTED, MUTANTS, hunt

KILLERS: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parent / "killers.json").read_text(encoding="utf-8")
)["mutants"]
SEEDS_MAX = 60  # a seed that shifted a little is found again; one that did not is the first that is tried
REGENERATE = "tiercel sim --mutants --seeds 400 --jobs 1 --json > tests/rules/killers.json"
A, B = "op@a#0", "op@b#0"
AWAY, OTHER = "op@a#1", "op@a#2"
SLOT_0 = KeySet(slots=frozenset({0}))


def mutants_of(rule: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mutant", [name for name, x in MUTANTS.items() if x.rule == rule])


def assert_noticed(mutant: str) -> None:
    killer = KILLERS.get(mutant)
    assert killer, f"{mutant} is not in killers.json; run: {REGENERATE}"
    kill = hunt(mutant, seeds_max=SEEDS_MAX, first=killer["seed"])
    assert kill is not None, (
        f"{MUTANTS[mutant].what}, and nobody notices ({mutant} survives seeds {killer['seed']} to "
        f"{killer['seed'] + SEEDS_MAX - 1}). If another seed shows it, run: {REGENERATE}"
    )


def identity(output: Output) -> tuple[int, int, int]:
    return output.epoch, output.offset, output.n


# -- the list itself ---------------------------------------------------------------------------


def test_every_rule_has_a_test() -> None:
    tested = {name.split("_")[1] for name in globals() if name.startswith("test_R")}
    assert tested == {f"R{n}" for n in range(1, 31)}


def test_every_planted_bug_has_a_recorded_seed_and_no_other() -> None:
    assert set(KILLERS) == set(MUTANTS), f"run: {REGENERATE}"


def test_a_planted_bug_is_of_a_rule_or_of_a_promise() -> None:
    rules = {f"R{n}" for n in range(1, 31)} | {f"P{n}" for n in range(1, 8)}
    assert {x.rule for x in [*MUTANTS.values(), *DIRECTED.values()]} <= rules


@pytest.mark.parametrize("mutant", [name for name, x in MUTANTS.items() if x.rule.startswith("P")])
def test_a_bug_that_breaks_a_promise_is_noticed(mutant: str) -> None:
    assert_noticed(mutant)


# -- producers and order -----------------------------------------------------------------------


@mutants_of("R1")
def test_R1_every_row_of_a_producer_counts_once_and_in_order(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R2")
def test_R2_the_new_sequencer_of_a_key_knows_what_the_old_one_appended(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R3")
def test_R3_a_checkpoint_never_claims_a_row_that_is_held(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R4")
def test_R4_a_change_of_path_never_reorders_the_rows_of_a_sender(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R5")
def test_R5_frames_that_a_broken_link_lost_are_sent_again(mutant: str) -> None:
    assert_noticed(mutant)


@pytest.mark.parametrize("mutant", ["", "flip-told-too-early", "sent-before-durable"])
def test_R6_a_flip_leaves_its_site_only_when_it_is_durable_there(mutant: str) -> None:
    stage = Stage(settings=Settings(mutant=mutant)).start()
    stage.withholds = lambda sender, to, message: (sender, to) == ("a", "b")
    stage.move(SLOT_0, A, B, "pause")
    stage.unsynced.add("a")
    stage.tell("a", m.Prepared("m1", -1), "b")
    assert flips(stage) == ["m1"]
    told = [f for f in stage.said("a", "b", m.LaneFrame) if isinstance(f.notice, m.FlippedNotice)]
    assert bool(told) is bool(mutant), "a crash of `a` could still take the flip back"
    stage.sync("a")
    assert [f for f in stage.said("a", "b", m.LaneFrame) if isinstance(f.notice, m.FlippedNotice)]


@pytest.mark.parametrize("mutant", ["", "promised-before-durable"])
def test_R6_a_promise_about_event_time_leaves_when_what_it_rests_on_is_durable(mutant: str) -> None:
    facts = topology(kind="windows")
    timed = Stream("in", "a", logged=False, delay_ms=10)
    stage = Stage(
        Topology(facts.sites, {**facts.streams, "in": timed}, facts.operators),
        Settings(mutant=mutant),
        "windows",
    ).start()
    stage.unsynced.add("a")
    stage.produce("a", (key_in(0), 100, 1))
    said = [report.watermark_ms for report in stage.said("a", "b", m.WatermarkReport)]
    assert (90 in said) == (mutant in DIRECTED)
    stage.sync("a")
    assert 90 in [report.watermark_ms for report in stage.said("a", "b", m.WatermarkReport)]


@mutants_of("R6")
def test_R6_nothing_that_a_crash_can_take_back_leaves_a_site_or_enters_a_checkpoint(mutant: str) -> None:
    assert_noticed(mutant)


# -- outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["live", "pause", "restart"])
def test_R7_the_identities_of_a_key_are_totally_ordered_over_there_and_back(strategy: str) -> None:
    stage = Stage().start()
    key = key_in(0)
    for n in range(5):  # so that offsets at `a` are well above those at `b`
        stage.produce("a", (key, n, n))
    stage.move(SLOT_0, A, B, strategy, "m1")
    stage.pass_ms(8_000)
    stage.produce("a", (key, 5, 5))
    stage.move(SLOT_0, B, A, strategy, "m2")
    stage.pass_ms(8_000)
    stage.produce("a", (key, 6, 6))
    stage.pass_ms(1_000)
    ended = [x.phase for x in [*stage.said("a", BOSS, m.MoveStatus), *stage.said("b", BOSS, m.MoveStatus)]]
    assert ended.count("done") >= 2
    outputs = stage.outputs()
    assert [o.row[2][2] for o in outputs] == [1, 2, 3, 4, 5, 6, 7]  # the count goes on over both moves
    assert [o.epoch for o in outputs] == [1, 1, 1, 1, 1, 2, 3]
    assert all(identity(x) < identity(y) for x, y in itertools.pairwise(outputs))
    without_epoch = [(o.offset, o.n) for o in outputs]
    assert without_epoch != sorted(without_epoch), "the counter-proof: offsets of two logs have no order"


@mutants_of("R8")
def test_R8_an_output_is_admitted_once(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R9")
def test_R9_a_producer_is_told_that_its_rows_are_safe_only_when_they_are(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R10")
def test_R10_the_destination_emits_once_the_outputs_of_the_source_have_arrived(mutant: str) -> None:
    assert_noticed(mutant)


def test_R10_a_stream_has_its_log_at_one_home_and_a_subscriber_sees_a_key_in_order() -> None:
    stage = Stage().start()
    here, there = key_in(0), key_in(3)
    stage.tell("a", m.Subscribe("out", 0), "reader")
    for n in range(3):
        stage.produce("a", (here, n, n))
        stage.produce("b", (there, n, n), producer="q")
    assert "out" in stage.machines["a"].streams
    assert "out" not in stage.machines["b"].streams
    assert not stage.log("b", "out")
    travelled = [f for f in stage.said("b", "a", m.LaneFrame) if f.inbox == "out"]
    assert [o.key for f in travelled for o in f.outputs] == [there] * 3
    published = [o for p in stage.said("a", "reader", m.Publish) for e in p.entries for o in e.outputs]
    for key in (here, there):
        assert [o.row[2][2] for o in published if o.key == key] == [1, 2, 3]


def test_R10_an_output_frame_that_comes_twice_or_too_early_is_not_appended() -> None:
    stage = Stage().start()

    def outputs(n: int) -> m.LaneFrame:
        return m.LaneFrame("out", n, [], None, [Output(n, b"k", 1, 0, (b"k", 0, n))])

    for n in (1, 1, 2, 1, 2, 3, 3):  # a broken link makes the sender begin anew at any point
        stage.tell("a", outputs(n), "b")
    assert [o.offset for o in stage.outputs()] == [1, 2, 3]
    stage.tell("a", outputs(5), "b")
    assert [o.offset for o in stage.outputs()] == [1, 2, 3]


@mutants_of("R11")
def test_R11_what_a_call_did_before_it_raised_is_undone(mutant: str) -> None:
    assert_noticed(mutant)


# -- calls of user code ------------------------------------------------------------------------


@mutants_of("R12")
def test_R12_a_replay_makes_the_same_calls_as_the_first_run(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R13")
def test_R13_source_and_destination_process_alike_or_the_move_is_undone(mutant: str) -> None:
    assert_noticed(mutant)


# -- tables ------------------------------------------------------------------------------------


@mutants_of("R14")
def test_R14_old_news_about_an_owner_never_replaces_newer(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R15")
def test_R15_a_slot_sweeps_only_overrides_that_are_older_than_it(mutant: str) -> None:
    assert_noticed(mutant)


def row_for_c(epoch: int, n: int = 1) -> m.LaneFrame:
    """A row of `a`'s, stamped with the epoch that `a` knows for a key of `c`."""
    return m.LaneFrame("op", n, [(key_in(3), 5, "x", "a", n, epoch)])


def site_b() -> Stage:
    """The router of `b`, which believes with epoch 1 that slot 3 is `c`'s."""
    stage = Stage(topology(("a", "b", "c"))).start("b")
    assert stage.machines["b"].inboxes["op"].table.slots[3] == Route("op@c#0", 1)
    return stage


def flipped_to_b(epoch: int) -> m.LaneFrame:
    """`c`'s flip of slot 3 to `b`."""
    update = TableUpdate({3: Route("op@b#0", epoch)}, {})
    keys = KeySet(slots=frozenset({3}))
    prepare = m.Prepare("m", "op", keys, "op@c#0", "op@b#0", "pause", TableUpdate({}, {}))
    return m.LaneFrame("op", 1, [], m.FlippedNotice("m", 9, 1000, -1, update, {}, prepare))


def test_R16_a_row_that_knows_more_than_our_table_waits_for_the_table() -> None:
    stage = site_b()
    stage.tell("b", row_for_c(epoch=2), "a")
    assert stage.log("b") == []
    assert [k for k in stage.disks["b"] if k[0] == "lane"] == []
    assert len(stage.machines["b"].inboxes["op"].waiting) == 1
    assert stage.said("b", "a", m.Moved) == []
    assert [r.settled for r in stage.said("b", "a", m.LaneReceipt)] == [[]]  # taken, but not settled
    stage.tell("b", flipped_to_b(epoch=2), "c")
    assert [row for e in stage.log("b") for rows in e.parts.values() for row in rows] == [(key_in(3), 5, "x")]
    assert stage.said("b", "a", m.LaneReceipt)[-1].settled == [1]


def test_R16_a_row_that_knows_less_goes_on_with_the_newer_epoch_and_its_sender_is_told() -> None:
    stage = site_b()
    stage.tell("b", m.Moved("op", TableUpdate({3: Route("op@c#0", 7)}, {})), "c")
    stage.tell("b", row_for_c(epoch=6), "a")
    assert stage.log("b") == []
    ((frame, _),) = [v for k, v in stage.disks["b"].items() if k[:2] == ("lane", "c")]
    assert frame.rows == [(key_in(3), 5, "x", "a", 1, 7)]
    assert stage.said("b", "a", m.Moved) == [m.Moved("op", TableUpdate({3: Route("op@c#0", 7)}, {}))]


def test_R16_without_comparing_epochs_the_row_would_travel_in_circles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up = RoutingTable.route
    monkeypatch.setattr(RoutingTable, "route", lambda self, key: Route(looked_up(self, key).instance, 99))
    stage = site_b()
    stage.tell("b", row_for_c(epoch=2), "a")
    assert [k for k in stage.disks["b"] if k[0] == "lane"] == [("lane", "c", "op", 1)]


# -- time --------------------------------------------------------------------------------------


@mutants_of("R17")
def test_R17_a_moved_key_keeps_its_clock_and_no_watermark_overtakes_a_row(mutant: str) -> None:
    assert_noticed(mutant)


def move_away_from_a_log_that_knows_more(mutant: str = "") -> Stage:
    """Site c holds the watermark back at 10, then is silent; only the log of a concluded 90 before."""
    facts = topology(("a", "b", "c"), kind="windows")
    timed = Stream("in", "a", logged=False, delay_ms=10)
    facts = Topology(facts.sites, {**facts.streams, "in": timed}, facts.operators)
    stage = Stage(facts, Settings(mutant=mutant), kind="windows").start()
    stage.withholds = lambda sender, to, message: (sender, to) == ("c", "a")
    stage.produce("c", (key_in(2), 20, 1), producer="of c")
    stage.produce("a", (key_in(0), 100, 1), producer="of a")
    stage.deliver()
    assert [stage.machines[site].inboxes["op"].watermark_ms for site in "abc"] == [90, 10, 10]
    stage.move(SLOT_0, A, B)
    stage.pass_ms(5_000)
    return stage


def test_R17_a_move_does_not_wait_for_a_watermark_that_a_silent_site_holds_back() -> None:
    stage = move_away_from_a_log_that_knows_more()
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    assert stage.machines["b"].inboxes["op"].watermark_ms == 90


def test_R17_the_planted_bug_waits_for_it_for_ever() -> None:
    assert "carried-watermark-not-logged" in DIRECTED
    stage = move_away_from_a_log_that_knows_more("carried-watermark-not-logged")
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "emitting"


def keys_whose_destination_is_ahead(mutant: str = "") -> Stage:
    """The source's outputs are at watermark 50; the destination's site has given 100. A move is asked for."""
    stage = Stage(topology(kind="windows"), Settings(mutant=mutant), kind="windows").start()
    stage.withholds = lambda sender, to, message: (sender, to) == ("a", "b")
    feed = stage.machines["a"].inboxes["op"].feeds[A]
    outputs = m.Outputs(A, feed.life, feed.flush_no + 1, 1, 1, [], [], 50, False)
    stage.tell("a", outputs, A)
    stage.move(SLOT_0, A, B, "pause")
    stage.tell("a", m.Prepared("m1", 100), "b")
    return stage


def flips(stage: Stage) -> list[str]:
    return [entry.control.move for entry in stage.log("a") if isinstance(entry.control, Flip)]


def test_R18_a_move_flips_when_the_source_has_reached_the_watermark_of_the_destination() -> None:
    stage = keys_whose_destination_is_ahead()
    assert flips(stage) == []
    stage.pass_ms(1_000)
    assert flips(stage) == []
    feed = stage.machines["a"].inboxes["op"].feeds[A]
    stage.tell("a", m.Outputs(A, feed.life, feed.flush_no + 1, 2, 2, [], [], 100, False), A)
    assert flips(stage) == ["m1"]


def test_R18_a_source_that_never_gets_there_has_its_move_undone() -> None:
    stage = keys_whose_destination_is_ahead()
    stage.pass_ms(31_000)
    assert flips(stage) == []
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "aborted"


def test_R18_the_planted_bug_flips_while_the_destination_is_ahead() -> None:
    assert "flip-ignores-watermark" in DIRECTED
    assert flips(keys_whose_destination_is_ahead("flip-ignores-watermark")) == ["m1"]


def test_R18_a_site_does_not_raise_its_watermark_while_it_prepares_for_keys() -> None:
    stage = Stage(topology(kind="windows"), kind="windows").start()
    router = stage.machines["b"]
    inbox = router.inboxes["op"]
    inbox.watermark_ms = inbox.feeds[B].watermark_ms = 40
    assert router.output_promise("op") == 40
    keys = KeySet(slots=frozenset({0}))
    stage.withholds = lambda sender, to, message: True
    stage.tell("b", m.Prepare("m1", "op", keys, A, B, "live", TableUpdate({}, {})), "a")
    inbox.watermark_ms = inbox.feeds[B].watermark_ms = 70
    assert router.output_promise("op") == 40
    stage.tell("b", m.AbortNotice("m1"), "a")
    assert router.output_promise("op") == 70


def keys_that_come_to_a_log_ahead_of_theirs(strategy: str, mutant: str = "") -> Stage:
    """A window ends at 100. The source's log is at 90; the destination's reaches 120 once it has prepared."""
    facts = topology(kind="windows")
    timed = Stream("in", "a", logged=False, delay_ms=10)
    facts = Topology(facts.sites, {**facts.streams, "in": timed}, facts.operators)
    stage = Stage(facts, Settings(mutant=mutant), kind="windows").start()
    stage.produce("a", (key_in(0), 95, 1), (key_in(0), 100, 2), producer="of a")
    stage.produce("b", (key_in(1), 100, 1), producer="of b")
    news = (m.Prepared, m.WatermarkReport)
    stage.withholds = lambda sender, to, message: (sender, to) == ("b", "a") and isinstance(message, news)
    stage.move(SLOT_0, A, B, strategy)
    stage.produce("b", (key_in(1), 130, 2), producer="of b")
    stage.produce("a", (key_in(2), 130, 3), producer="of a")
    assert [stage.machines[site].inboxes["op"].watermark_ms for site in "ab"] == [90, 120]
    stage.tell("a", m.Prepared("m1", 90), "b")
    stage.pass_ms(5_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    assert stage.machines["b"].output_promise("op") == 120
    return stage


def closed_windows(stage: Stage) -> list[int]:
    return [
        output.row[1] for output in stage.outputs() if output.key == key_in(0) and "window" in output.row[2]
    ]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_R18_what_the_destinations_log_has_passed_is_fired_before_its_promise_holds_for_it(
    strategy: str,
) -> None:
    """Found by seed 4840: a window closed with the next watermark, behind one that was given meanwhile."""
    assert closed_windows(keys_that_come_to_a_log_ahead_of_theirs(strategy)) == [100]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_R18_the_planted_bug_leaves_them_to_a_watermark_that_may_never_come(strategy: str) -> None:
    assert "passed-timers-not-fired" in DIRECTED
    assert closed_windows(keys_that_come_to_a_log_ahead_of_theirs(strategy, "passed-timers-not-fired")) == []


@mutants_of("R19")
def test_R19_timers_fire_at_their_time_and_no_operator_sees_a_row_behind_its_watermark(mutant: str) -> None:
    assert_noticed(mutant)


# -- moves -------------------------------------------------------------------------------------


@mutants_of("R20")
def test_R20_keys_that_died_before_their_capture_do_not_rise_again(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R21")
def test_R21_capture_shadow_and_cut_leave_no_row_out_and_take_none_twice(mutant: str) -> None:
    assert_noticed(mutant)


def keys_whose_shadow_is_behind(mutant: str = "") -> Stage:
    """The destination is in step as of Compare; rows that came since wait to be read for it."""
    stage = Stage(settings=Settings(mutant=mutant, read_entries_max=1)).start()
    key = key_in(0)
    stage.produce("a", (key, 0, 1))
    stage.slow_readers = {"shadow|m1"}
    stage.move(SLOT_0, A, B, "live")
    while not any(isinstance(entry.control, Compare) for entry in stage.log("a")):
        stage.pass_ms(1)
    stage.produce("a", (key, 0, 2))
    stage.produce("a", (key, 0, 3))
    while not any(isinstance(notice, Compare) for notice in shown(stage)):
        stage.answer_read()
    stage.pass_ms(2_000)  # it votes
    return stage


def shown(stage: Stage) -> list[Any]:
    """The controls of what was shadowed."""
    return [e.control for _, _, said in stage.sent if isinstance(said, m.Shadow) for e in said.entries]


def has_flipped(stage: Stage) -> bool:
    return "m1 departure at a: comparing -> flipped" in stage.notes


def test_R21_a_move_flips_when_all_that_was_appended_is_shadowed() -> None:
    stage = keys_whose_shadow_is_behind()
    assert not has_flipped(stage)
    while stage.reads:
        stage.answer_read()
    assert has_flipped(stage)
    stage.produce("a", (key_in(0), 0, 4))
    stage.pass_ms(2_000)
    assert [output.row[2][2] for output in stage.outputs()] == [1, 2, 3, 4]


def test_R21_the_planted_bug_flips_while_rows_are_not_shadowed() -> None:
    assert "flip-ahead-of-shadow" in DIRECTED
    assert has_flipped(keys_whose_shadow_is_behind("flip-ahead-of-shadow"))


@mutants_of("R22")
def test_R22_a_vote_binds_and_keys_on_the_move_are_locked(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R23")
def test_R23_a_source_that_was_taken_over_emits_nothing_more(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R24")
def test_R24_a_destination_that_restarts_finds_its_shadow_at_its_own_site(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R25")
def test_R25_the_source_forgets_late_and_then_for_good(mutant: str) -> None:
    assert_noticed(mutant)


@mutants_of("R26")
def test_R26_a_decided_move_is_never_undone(mutant: str) -> None:
    assert_noticed(mutant)


def test_R26_after_the_flip_a_row_of_its_keys_is_in_the_outbox_and_not_in_the_log() -> None:
    """The reverse move that the destination's router would order is not built."""
    stage = Stage().start()
    key = key_in(0)
    stage.produce("a", (key, 0, 0))
    stage.withholds = lambda sender, to, message: sender == A and isinstance(message, m.Said)
    stage.move(SLOT_0, A, B, "pause")
    (flip,) = [e.offset for e in stage.log("a") if isinstance(e.control, Flip)]
    stage.withholds = lambda sender, to, message: (sender, to) == ("a", "b")
    stage.produce("a", (key, 1, 1))
    assert [e.offset for e in stage.log("a") if e.parts and e.offset > flip] == []
    under_way = [v[0] for k, v in stage.disks["a"].items() if k[:3] == ("lane", "b", "op")]
    assert [f.rows for f in under_way if f.rows] == [[(key, 1, 1, "a", 1, 2)]]


@mutants_of("R27")
def test_R27_a_checkpoint_has_a_position_for_every_log_it_rests_on(mutant: str) -> None:
    assert_noticed(mutant)


def destination_that_dies_while_rows_wait(mutant: str = "") -> Stage:
    """It has voted and adopted, may not emit yet, and keeps as many outputs as it may: the next rows wait."""
    stage = Stage(settings=Settings(suppressed_max=1, mutant=mutant)).start()
    key = key_in(0)
    stage.produce("a", (key, 0, 0))
    stage.withholds = lambda sender, to, message: isinstance(message, m.EmitFrom | m.EmittedThrough)
    stage.move(SLOT_0, A, B)
    stage.pass_ms(100)
    for n in range(1, 5):
        stage.produce("a", (key, n, n))
    assert stage.machines[B].arriving["m1"].stalled
    stage.pass_ms(1_500)  # a checkpoint that cannot say more of it than the last one did
    stage.restart(B)
    stage.deliver()
    stage.pass_ms(3_000)
    return stage


def test_R27_a_checkpoint_keeps_what_has_voted_also_while_rows_of_it_wait() -> None:
    stage = destination_that_dies_while_rows_wait()
    assert len(stage.outputs()) == 5
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"


def test_R27_the_planted_bug_forgets_it_and_the_keys_are_nowhere() -> None:
    assert "stalled-arrivals-left-out" in DIRECTED
    stage = destination_that_dies_while_rows_wait("stalled-arrivals-left-out")
    assert len(stage.outputs()) < 5


def stage_with_initial_state() -> tuple[Stage, list[str]]:
    """Initial state of a key, then a row of it; returns what user code was called with."""
    calls: list[str] = []
    stage = Stage().start()
    processor = stage.machines[A].engine.code.processor
    record_calls(processor, calls)
    key = key_in(0)
    stage.produce("a", (key, 0, "initial"), initial=True)
    stage.produce("a", (key, 7, "first"))
    return stage, calls


def record_calls(processor: Any, calls: list[str]) -> None:
    kind = type(processor)

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def handleInitialState(self, key: Any, row: Any, times: Any) -> None:
            calls.append(f"state {row[1]}")
            super().handleInitialState(key, row, times)

        def row(self, key: Any, event_time: int, payload: Any, times: Any) -> Any:
            calls.append(f"row {payload}")
            return super().row(key, event_time, payload, times)

    processor.__class__ = Recorded


def test_R28_initial_state_is_there_before_the_first_row_of_its_key() -> None:
    """The other half of R28, staged batches of a DataFrame feed: tests/runtime/test_feeds.py."""
    stage, calls = stage_with_initial_state()
    assert calls == ["state initial", "row first"]
    assert [o.row[2][2] for o in stage.outputs()] == [2]  # the running count knows of the initial row


def test_R28_initial_state_survives_a_replay() -> None:
    stage, _ = stage_with_initial_state()
    stage.stop(A)
    assert stage.disks[A] == {}, "no checkpoint yet: all it knows is the log"
    stage.start(A)
    stage.produce("a", (key_in(0), 8, "second"))
    assert [o.row[2][2] for o in stage.outputs()] == [2, 3]
    digests = [o.row[2][3] for o in stage.outputs()]
    undisturbed, _ = stage_with_initial_state()
    undisturbed.produce("a", (key_in(0), 8, "second"))
    assert digests == [o.row[2][3] for o in undisturbed.outputs()]


def test_R28_initial_state_that_entered_elsewhere_is_initial_state_at_its_owner() -> None:
    stage, key = Stage().start(), key_in(3)
    calls: list[str] = []
    record_calls(stage.machines[B].engine.code.processor, calls)
    stage.produce("a", (key, 0, "initial"), initial=True)
    stage.produce("a", (key, 7, "first"))
    assert calls == ["state initial", "row first"]


def test_R28_a_row_that_overtook_the_initial_state_of_its_key_is_still_a_row() -> None:
    """`c` sends initial state to `a`; the key moves to `b`; `c` sends the first row straight there."""
    stage, key = Stage(topology(("a", "b", "c"))).start(), key_in(0)
    stage.withholds = lambda sender, to, message: (sender, to) == ("c", "a")
    stage.produce("c", (key, 0, "initial"), initial=True)
    slow, stage.withheld = stage.withheld, []
    stage.withholds = lambda sender, to, message: False
    stage.move(SLOT_0, A, B, "pause")
    stage.pass_ms(2_000)
    stage.tell("c", m.Moved("op", TableUpdate({0: Route(B, 2)}, {})), "a")
    stage.produce("c", (key, 7, "first"))
    assert stage.outputs() == [], "it waits for what was sent before it"
    stage.withheld = slow
    stage.deliver()
    stage.pass_ms(500)
    assert [o.row[2][2] for o in stage.outputs()] == [2]


def test_R28_without_the_mark_of_initial_rows_they_would_be_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "INITIAL", -99)
    _, calls = stage_with_initial_state()
    assert calls == ["row initial", "row first"]


@mutants_of("R29")
def test_R29_a_life_that_was_replaced_is_not_listened_to(mutant: str) -> None:
    assert_noticed(mutant)


def one_that_was_retired_while_it_was_away(mutant: str = "") -> Stage:
    """It owned nothing, and a move was done while nobody could reach it; it comes back in the same life."""
    stage = Stage(topology(("a",), instances=(A, AWAY, OTHER)), Settings(mutant=mutant)).start()
    owned = stage.machines["a"].inboxes["op"].table.slots
    stage.move(
        KeySet(slots=frozenset(s for s, r in enumerate(owned) if r.instance == AWAY)), AWAY, A, "pause"
    )
    stage.pass_ms(2_000)
    stage.withholds = lambda sender, to, message: to == AWAY
    for here, gone in (("a", AWAY), (AWAY, "a")):
        stage.give(here, Disconnected(gone))
    stage.move(SLOT_0, A, OTHER, "pause", name="m2")
    stage.pass_ms(2_000)
    stage.withholds = lambda sender, to, message: False
    for here, gone in (("a", AWAY), (AWAY, "a")):
        stage.give(here, Connected(gone))
    return stage


def test_R29_one_that_was_retired_while_it_was_away_comes_back_as_a_new_one() -> None:
    """Found by seed 52987: it was never told what it had missed, and never knew."""
    stage = one_that_was_retired_while_it_was_away()
    (*_, reply) = stage.said("a", AWAY, m.AttachReply)
    assert reply.fresh
    assert stage.said(AWAY, "a", m.Resume)[-1].applied == reply.start == reply.head
    assert stage.lives[AWAY] == 1, "no process ends for it"


def test_R29_the_planted_bug_goes_on_where_it_was() -> None:
    assert "retired-goes-on" in DIRECTED
    stage = one_that_was_retired_while_it_was_away("retired-goes-on")
    assert stage.said(AWAY, "a", m.Resume)[-1].applied < stage.said("a", AWAY, m.AttachReply)[-1].start


# -- credits -----------------------------------------------------------------------------------


@mutants_of("R30")
def test_R30_held_rows_do_not_close_the_lane_that_would_release_them(mutant: str) -> None:
    assert_noticed(mutant)


def test_R30_state_and_control_flow_while_a_reader_has_no_credit() -> None:
    """A source that is sent nothing more is still asked to capture, and its keys still arrive.

    The window of their own for the notices in a lane is not built: see docs/rules.md.
    """
    stage = Stage(settings=Settings(dispatch_rows_max=2)).start()
    keys = [key_in(0, n) for n in range(3)]
    for n, key in enumerate(keys):
        stage.produce("a", (key, n, n))
    stage.pass_ms(1_000)
    stage.withholds = lambda sender, to, message: to == A and isinstance(message, m.Dispatch)
    for n in range(6):
        stage.produce("a", (key_in(1), n, n))
    feed = stage.machines["a"].inboxes["op"].feeds[A]
    assert feed.phase is FeedPhase.CATCHING_UP
    dispatched = len(stage.said("a", A, m.Dispatch))
    stage.move(SLOT_0, A, B, "live")
    stage.pass_ms(100)
    assert len(stage.said("a", A, m.Dispatch)) == dispatched, "no credit, so no rows"
    assert [c.move for c in stage.said("a", A, m.Capture)][:1] == ["m1"]
    assert [i.key for c in stage.said(A, B, m.Chunk) for i in c.images] == sorted(keys)
    assert stage.said(A, B, m.EndOfKeys) == [m.EndOfKeys("m1", 1)]
    assert [s for s in stage.said(B, "b", m.Said) if isinstance(s.message, m.Installed)]
    stage.deliver()
    stage.pass_ms(8_000)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    assert len(stage.outputs()) == 9


def test_R30_one_dead_site_does_not_stop_the_rows_for_the_others() -> None:
    stage = Stage(topology(("a", "b", "c"))).start("a", "c", "op@a#0", "op@c#0")
    dead, alive = key_in(1, 0), key_in(3, 0)
    assert [stage.machines["a"].inboxes["op"].table.route(k).site for k in (dead, alive)] == ["a", "c"]
    dead = key_in(2)
    assert stage.machines["a"].inboxes["op"].table.route(dead).site == "b"
    for n in range(3):
        stage.produce("a", (dead, n, n), (alive, n, n))
    assert [o.key for o in stage.outputs()] == [alive] * 3
    assert len([k for k in stage.disks["a"] if k[:3] == ("lane", "b", "op")]) == 3
    assert stage.said("a", "p", m.ProducerMark)[-1].seq == 3
