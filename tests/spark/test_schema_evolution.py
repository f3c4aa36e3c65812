"""A state variable gets another schema: stored values are upgraded, or the start is refused."""

from __future__ import annotations

import contextlib
import datetime
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.machine.effects import Write
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import StateImage
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import Operator, Topology
from tiercel.core.state.handle import Handle
from tiercel.core.state.table import StateTable
from tiercel.errors import UserError
from tiercel.runtime.deployment import BackupPlan, DeploymentDir, Manifest, VariableFacts
from tiercel.runtime.recovery.recover import open_storage
from tiercel.runtime.storage.store import Store, StoreView
from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import InputPlan, ProcessorAdapter
from tiercel.spark.rows.row_codec import RowCodec, encode_payload, parse_ddl
from tiercel.spark.state import schema_evolution as upgrading
from tiercel.spark.state.declared_state import DeclaredState, Variable, declared_state, state_codec
from tiercel.spark.state.schema_evolution import StatePlan, Upgrades, next_facts, try_upgrade, upgrade_store

READ = RowCodec("k string, n bigint", "k")
SAID = RowCodec("said string")
SLOTS = 16
ME = "op@cloud#1"


class Kept(StatefulProcessor):
    """Value, list and map state of one schema; adds each row, and says all of it."""

    def __init__(self, schema: str, ttl_ms: int | None = None, deleted: tuple[str, ...] = ()) -> None:
        self.schema, self.ttl_ms, self.deleted = schema, ttl_ms, deleted

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", self.schema, self.ttl_ms)
        self.list = handle.getListState("list", self.schema, self.ttl_ms)
        self.map = handle.getMapState("map", "d date", self.schema, self.ttl_ms)
        for name in self.deleted:
            handle.deleteIfExists(name)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            said = (self.value.get(), list(self.list.get()), sorted(self.map.iterator()))
            yield Row(said=repr(said))
            new = (row.n, *[None] * self.schema.count(","))
            self.value.update(new)
            self.list.appendValue(new)
            self.map.updateValue((datetime.date(2026, 1, row.n),), new)

    def close(self) -> None:
        """Nothing to let go."""


def declared(processor: StatefulProcessor) -> DeclaredState:
    mode = "processingTime" if getattr(processor, "ttl_ms", None) else "none"
    return declared_state(processor, mode)


def after(found: dict[str, VariableFacts] | None, processor: StatefulProcessor, **upgrades: Any) -> StatePlan:
    return StatePlan(next_facts("op", declared(processor), found, upgrades), upgrades)


def of_all(upgrade: Any) -> dict[str, Any]:
    return {"value": upgrade, "list": upgrade, "map": upgrade}


class Play:
    """One processor on the core, with the state it finds."""

    def __init__(self, processor: StatefulProcessor, plan: StatePlan, time_mode: str = "none") -> None:
        operator = OperatorPlan(processor, (InputPlan(READ),), READ.schema, SAID, time_mode, False, plan)
        self.engine = ProcessorRunner(
            ProcessorAdapter(operator), Operator("op", ("in",), "out", (), time_mode=time_mode)
        )
        self.space = StateTable(SLOTS, lambda key: 1, *self.engine.about_keys)

    def send(self, key: str, n: int) -> Any:
        packed = READ.pack((key, n))
        state, out = self.space.state(packed[0]), list[Any]()
        self.engine.call(state, packed[0], [packed], 5, -1, 1, out)
        assert self.engine.dead_letters == []
        [said] = SAID.unpack(out[0].row[2])
        return eval(said, {"datetime": datetime})

    def images(self) -> list[StateImage]:
        images = [state.image(key, 1, 0, -1) for key, state in self.space.keys.items()]
        return msgspec.msgpack.decode(msgspec.msgpack.encode(images), type=list[StateImage])

    def load(self, images: list[StateImage]) -> None:
        for image in images:
            self.space.install(image, 1)


def stored(*processors: Kept, keys: str = "ab") -> list[StateImage]:
    play = Play(processors[0], after(None, processors[0]))
    for key in keys:
        play.send(key, 7)
    return play.images()


# -- values follow -----------------------------------------------------------------------------


def test_new_field_gets_its_default_in_values_lists_and_maps() -> None:
    old, new = Kept("n bigint"), Kept("n bigint, unit string")
    first = after(None, old)
    plan = after(first.facts, new, **of_all({"unit": "km"}))
    converted = [image for each in stored(old) if (image := plan.converted(each)) is not None]
    assert len(converted) == 2
    play = Play(new, plan)
    play.load(converted)
    day = (datetime.date(2026, 1, 7),)
    assert play.send("a", 8) == ((7, "km"), [(7, "km")], [(day, (7, "km"))])
    assert play.send("a", 9)[0] == (8, None)
    assert all(plan.converted(image) is None for image in play.images())


def test_renamed_or_retyped_field_is_converted_by_a_function() -> None:
    old, new = Kept("n bigint"), Kept("count string")
    plan = after(after(None, old).facts, new, **of_all(lambda row: {"count": f"<{row['n']}>"}))
    [image] = [plan.converted(each) for each in stored(old, keys="a")]
    assert image is not None
    assert image.values is not None
    assert image.values["value@2"] == ("value", ("<7>",))
    assert set(image.values) == {"value@2", "list@2", "map@2"}


def test_upgraded_value_keeps_its_expiry() -> None:
    old, new = Kept("n bigint", 100), Kept("n bigint, unit string", 100)
    first = after(None, old)
    play = Play(old, first, "processingTime")
    play.send("a", 7)
    plan = after(first.facts, new, **of_all({"unit": "km"}))
    [image] = [plan.converted(each) for each in play.images()]
    assert image is not None
    assert image.values is not None
    assert image.values["value@2"] == ("value", ((7, "km"), 105))
    assert image.values["list@2"] == ("list", (((7, "km"), 105),))


def test_values_of_several_earlier_versions_become_the_newest() -> None:
    """A key that was not touched since the first version may come back from a backup."""
    one, two, three = Kept("n bigint"), Kept("n bigint, a string"), Kept("n bigint, b string")
    facts = after(None, one).facts
    facts = after(facts, two, **of_all({"a": "x"})).facts
    plan = after(facts, three, **of_all(lambda row: {"n": row["n"], "b": row.get("a", "none")}))
    of_one = plan.converted(stored(one, keys="a")[0])
    assert of_one is not None
    assert of_one.values is not None
    assert of_one.values["value@3"] == ("value", (7, "none"))
    of_two = plan.converted(msgspec.structs.replace(of_one, values={"value@2": ("value", (7, "y"))}))
    assert of_two is not None
    assert of_two.values == {"value@3": ("value", (7, "y"))}


def test_unchanged_schema_and_new_variables_need_no_upgrade() -> None:
    first = after(None, Kept("n bigint"))
    assert after(first.facts, Kept("n BIGINT")).facts == first.facts
    fewer = next_facts("op", DeclaredState(declared(Kept("n bigint")).variables[:1]), None, {})
    assert next_facts("op", declared(Kept("n bigint")), fewer, {}) == first.facts
    assert next_facts("op", DeclaredState(), first.facts, {}) == first.facts  # it is still stored


def test_deleted_and_redeclared_variable_does_not_see_old_values() -> None:
    first = after(None, Kept("n bigint")).facts
    gone = next_facts("op", DeclaredState((), frozenset(["value", "never there"])), first, {})
    assert gone["value"].deleted
    again = Variable("value", "value", parse_ddl("other string"))
    facts = next_facts("op", DeclaredState((again,)), gone, {})
    assert (facts["value"].version, facts["value"].deleted) == (2, False)
    [image] = stored(Kept("n bigint"), keys="a")
    converted = StatePlan(facts).converted(image)
    assert converted is not None
    assert converted.values is not None
    assert set(converted.values) == {"list", "map"}


def test_fold_finds_its_state_after_an_upgrade() -> None:
    def counted(state: Any, row: Any) -> Any:
        return (state[0] + 1, *state[1:]), (repr(state),)

    old, new = (
        Fold(counted, (0,), "n bigint", "said string"),
        Fold(counted, (0, ""), "n bigint, u string", "said string"),
    )
    first = after(None, old)
    play = Play(old, first)
    play.send("a", 1)
    plan = after(first.facts, new, state={"u": "km"})
    second = Play(new, plan)
    second.load([image for each in play.images() if (image := plan.converted(each))])
    assert second.send("a", 1) == (1, "km")
    assert second.send("a", 1) == (2, "km")


def test_deleting_a_variable_deletes_all_its_versions() -> None:
    facts = after(None, Kept("n bigint")).facts
    facts = after(facts, Kept("n bigint, u string"), **of_all({"u": ""})).facts

    class Without(Kept):
        def init(self, handle: Any) -> None:
            handle.deleteIfExists("value")

    plan = StatePlan(next_facts("op", declared(Without("")), facts, {}))
    play = Play(Without(""), plan)
    image = StateImage(
        encode_payload(("a",)), 1, 1, {"value": ("value", (1,)), "value@2": ("value", (1, ""))}
    )
    play.load([image])
    assert play.space.keys == {}


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "upgrades", "reason"),
    [
        (
            Kept("n bigint, u string"),
            {},
            r"'value' of operator 'op' has another .*n:bigint,u:string\nexpected: n:bigint\n.*upgrade=",
        ),
        (Kept("n bigint, u string"), of_all({}), "no default for u"),
        (Kept("n bigint, u string"), of_all({"u": "", "v": ""}), "default for v"),
        (Kept("n string"), of_all({}), "n has another type"),
        (Kept("m bigint"), of_all({"m": 1}), "n is gone"),
        (Kept("m bigint"), of_all(7), "a dict of defaults, or a function"),
        (Kept("n bigint", 100), {}, "its time to live is not as stored: one\nexpected: none"),
        (Kept("n bigint"), {"other": {}}, "declares no such state variable"),
    ],
)
def test_invalid_upgrade_is_refused(processor: Kept, upgrades: Upgrades, reason: str) -> None:
    with pytest.raises(UserError, match=f"(?s){reason}"):
        next_facts("op", declared(processor), after(None, Kept("n bigint")).facts, upgrades)


def test_changed_kind_or_map_key_is_refused() -> None:
    found = after(None, Kept("n bigint")).facts
    schema = parse_ddl("n bigint")
    for variable, reason in (
        (Variable("value", "list", schema), "its kind of state is not as stored: list\nexpected: value"),
        (
            Variable("map", "map", schema, parse_ddl("d string")),
            "its type of map keys is not as stored: d:string\nexpected: d:date",
        ),
    ):
        with pytest.raises(UserError, match=f"(?s){reason}"):
            next_facts("op", DeclaredState((variable,)), found, {"map": {}} if variable.name == "map" else {})
    with pytest.raises(UserError, match="does not end with @ and a number"):
        next_facts("op", DeclaredState((Variable("a@2", "value", schema),)), None, {})


def test_value_that_fails_its_upgrade_is_named_with_its_key() -> None:
    old, new = Kept("n bigint"), Kept("n bigint not null, u string")
    first = after(None, old).facts
    [image] = stored(old, keys="a")
    with pytest.raises(UserError, match=r"failed at key \['a'\]: ZeroDivisionError"):
        after(first, new, **of_all(lambda row: 1 / 0)).converted(image)
    with pytest.raises(UserError, match=r"value\.n"):
        after(first, new, **of_all(lambda row: {"n": None, "u": ""})).converted(image)


# -- in the store ------------------------------------------------------------------------------


@pytest.fixture
def deployment(tmp_path: Path) -> DeploymentDir:
    """Forty keys of the first version, some of them arriving."""
    deployment = DeploymentDir(tmp_path)
    operator = Operator("op", ("in",), "op.out", (ME,), slots=SLOTS)
    deployment.write(Manifest("test", Topology({"cloud": None}, {}, {"op": operator}), {}))
    puts: dict[Any, Any] = {("checkpoint",): CheckpointHeader(3, 5, 1, 0, 0, [])}
    for n in range(40):
        key = encode_payload((f"k{n}",))
        where = ("move", "m1", key, 3) if n % 4 == 0 else ("state", slot_of(key, SLOTS), key, 3)
        puts[where] = StateImage(key, 1, 5, {"value": ("value", (n,))})
    store = Store(deployment.process(ME), "os")
    store.add(Write(1, puts))
    store.close()
    return deployment


class Value(Kept):
    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", self.schema)


def names(deployment: DeploymentDir) -> list[str]:
    with contextlib.closing(StoreView(deployment.process(ME))) as view:
        images = [image for table in ("state", "move") for _, image in view.scan((table,))]
    assert len(images) == 40
    return sorted(name for image in images for name in image.values)


def test_interrupted_upgrade_is_finished_by_the_next_start(
    deployment: DeploymentDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrading, "KEYS_PER_BATCH", 10)
    facts = after(None, Value("n bigint")).facts
    calls = []

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row)
        if len(calls) == 25:
            raise KeyboardInterrupt  # killed
        return {"n": 2 * row["n"], "u": "km"}

    plan = after(facts, Value("n bigint, u string"), value=doubled)
    with pytest.raises(KeyboardInterrupt):
        upgrade_store(deployment.process(ME), plan)
    assert names(deployment) == ["value"] * 20 + ["value@2"] * 20
    with pytest.raises(UserError, match="another schema than what is stored"):
        upgrade_store(deployment.process(ME), StatePlan(plan.facts))  # who forgets the function is told
    upgrade_store(deployment.process(ME), plan)
    assert names(deployment) == ["value@2"] * 40
    assert len(calls) == 25 + 20
    with contextlib.closing(StoreView(deployment.process(ME))) as view:
        found = {image.values["value@2"][1][0] for t in ("state", "move") for _, image in view.scan((t,))}
    assert found == {2 * n for n in range(40)}  # each once
    upgrade_store(deployment.process(ME), StatePlan(plan.facts))  # nothing is left to do
    assert len(calls) == 45


def test_older_state_from_a_backup_is_upgraded_in_store_and_backup(
    deployment: DeploymentDir, tmp_path: Path
) -> None:
    plan = BackupPlan((tmp_path / "backup").as_uri(), every_s=0.01)
    manifest = msgspec.structs.replace(deployment.manifest(), backup=plan)

    def upload(directory: Path, **options: Any) -> None:
        store, backup, _ = open_storage(directory, manifest, ME, is_instance=True, **options)
        assert backup is not None
        backup.uploader.start(lambda seq: None)
        backup.uploader.close()
        store.close()

    upload(deployment.process(ME))
    shutil.rmtree(deployment.process(ME))
    facts = after(None, Value("n bigint")).facts
    upgraded = after(facts, Value("n bigint, u string"), value={"u": "km"})
    upload(deployment.process(ME), prepare=partial(upgrade_store, plan=upgraded))
    assert names(deployment) == ["value@2"] * 40
    shutil.rmtree(deployment.process(ME))
    upload(deployment.process(ME), prepare=partial(upgrade_store, plan=StatePlan(upgraded.facts)))
    assert names(deployment) == ["value@2"] * 40


def test_every_value_is_tried_before_anything_is_written(deployment: DeploymentDir) -> None:
    facts = after(None, Value("n bigint")).facts
    before = sorted(path.name for path in deployment.process(ME).iterdir())
    plan = after(facts, Value("u bigint"), value=lambda row: {"u": 1 // (39 - row["n"])})
    with pytest.raises(UserError, match=r"failed at key \['k39'\]: ZeroDivisionError"):
        try_upgrade(deployment, "op", plan, [ME])
    assert sorted(path.name for path in deployment.process(ME).iterdir()) == before
    assert names(deployment) == ["value"] * 40
    try_upgrade(deployment, "op", after(facts, Value("n bigint")), [ME])  # nothing to do, nothing is read


def test_state_newer_than_its_manifest_is_refused(deployment: DeploymentDir) -> None:
    facts = after(None, Value("n bigint")).facts
    image = StateImage(b"a", 1, 1, {"value@3": ("value", (1,))})
    with pytest.raises(UserError, match="newer than its manifest"):
        StatePlan(facts).converted(image)


def test_installed_state_is_undone_if_its_call_fails() -> None:
    handle = Handle("processingTime", state_codec)
    handle.install({"value": ("value", [1]), "list": ("list", [[1], [2]])}, [70])
    assert handle.state.values == {"value": (1,), "list": [(1,), (2,)]}
    assert handle.state.timers == {70}
    handle.roll_back()
    assert handle.state.empty
