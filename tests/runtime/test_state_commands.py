"""`tiercel state`: tables and JSON, exit codes, and no traceback whatever is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pyspark.sql import types as t

from tiercel import cli
from tiercel.core.checkpoints import Cursor
from tiercel.core.effects import Write
from tiercel.core.readers import Reader
from tiercel.core.records import KeyImage
from tiercel.core.routing import slot_of
from tiercel.core.topology import Operator, Topology
from tiercel.runtime.place import Manifest, Place, StreamFacts
from tiercel.runtime.store import Store
from tiercel.spark.state_source import key_columns

ME = "count@cloud#1"
SLOTS = 16


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run_app(["state", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out, captured.err


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """One key, `car 7`, counted to 3, at offset 5."""
    schema = t.StructType([t.StructField("car", t.StringType()), t.StructField("speed", t.DoubleType())])
    operator = Operator("count", ("in",), "out", (ME,), slots=SLOTS)
    topology = Topology({"cloud": None}, {}, {"count": operator})
    place = Place(tmp_path / "storage")
    place.write(Manifest("test", topology, {"in": StreamFacts(schema.json(), ("car",))}))
    place.want([ME])
    key = key_columns(place.manifest(), "count").key_of(["car 7"])
    image = KeyImage(key, 1, 5, {"count": ("value", (3,))})
    instance = Store(place.process(ME), "os")
    puts = {("state", slot_of(key, SLOTS), key, 1): image, ("cursor",): Cursor(1, 5, 1, 0, 0, [])}
    instance.add(Write(1, puts))
    instance.close()
    router = Store(place.process("cloud"), "os")
    router.add(Write(1, {("head", "count"): (5, 0, -1), ("reader", "count", ME): Reader(1, 5, {})}))
    router.close()
    return place.directory


def test_show_lists_what_each_process_keeps(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
    code, out, _ = run(capsys, "show", str(storage), "--json")
    assert code == 0
    lines = {(line["process"], line["kind"]): line for line in json.loads(out)}
    assert set(lines) == {(ME, "processing"), ("cloud", "routing"), ("cloud", "buffer")}
    assert lines[ME, "processing"]["keys"] == 1
    assert lines[ME, "processing"]["position"] == "5"
    assert lines["cloud", "buffer"]["position"] == "count 5"
    assert lines[ME, "processing"]["backup_number"] is None
    code, out, _ = run(capsys, "show", str(storage))
    assert code == 0
    assert ME in out
    assert "processing" in out


def test_show_of_a_key_prints_its_state(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
    code, out, _ = run(capsys, "show", str(storage), "--operator", "count", "--key", "car 7", "--json")
    assert code == 0
    (line,) = json.loads(out)
    assert (line["variable"], line["value"], line["instance"], line["offset"]) == ("count", "[3]", ME, 5)
    code, out, _ = run(capsys, "show", str(storage), "--operator", "count", "--key", "car 8", "--json")
    assert (code, json.loads(out)) == (0, [])


def test_a_copy_and_back_and_divided(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path
) -> None:
    copy, there = str(tmp_path / "copy"), str(tmp_path / "there")
    code, out, _ = run(capsys, "backup", str(storage), copy, "--json")
    assert code == 0
    assert {line["process"] for line in json.loads(out)} == {ME, "cloud"}
    assert run(capsys, "restore", copy, there)[0] == 0
    assert run(capsys, "restore", copy, there)[0] == 2
    code, out, _ = run(capsys, "split", there, ME, "--json")
    assert code == 0
    (line,) = json.loads(out)
    assert (line["destination"], line["slots"]) == ("count@cloud#2", SLOTS // 2)
    code, out, _ = run(capsys, "merge", there, "count@cloud#2", ME, "--json")
    assert code == 0
    code, out, _ = run(capsys, "show", there, "--operator", "count", "--key", "car 7", "--json")
    (line,) = json.loads(out)
    assert (line["value"], line["instance"]) == ("[3]", ME)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show", "nowhere"], "holds no deployment"),
        (["show", "STORAGE", "--key", "x"], "only one of --operator and --key"),
        (["show", "STORAGE", "--operator", "other", "--key", "x"], "no operator 'other'"),
        (["checkpoint", "STORAGE"], "no instance of .* runs"),
        (["backup", "STORAGE", "nonsense://x"], "backup location"),
        (["restore", "STORAGE", "there"], "holds no backup of a deployment"),
        (["restore", "STORAGE", "there", "--up-to", "7"], "--up-to '7'"),
        (["split", "STORAGE", "count@cloud#7"], "no instance 'count@cloud#7'"),
        (["split", "STORAGE", ME, "--slots", "many"], "is no slot"),
        (["merge", "STORAGE", ME, ME], "merging"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    storage: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *[str(storage) if word == "STORAGE" else word for word in arguments])
    assert code == 2
    assert re.search(reason, err)


@pytest.mark.parametrize("command", ["show", "backup", "restore", "checkpoint", "split", "merge"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"Example: tiercel state {command} " in out
