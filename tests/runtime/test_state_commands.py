"""`tiercel state`: tables and JSON, exit codes, and no traceback whatever is asked for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import types as t
from rocksdict import Options, Rdict

from tiercel.admin import checkpoint
from tiercel.cli import main as cli
from tiercel.core.machine.effects import Write
from tiercel.core.machine.stored import CheckpointHeader, LogReader
from tiercel.core.model.keys import StateImage
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import Operator, Topology
from tiercel.errors import UserError
from tiercel.runtime.backup.process_backup import folder_of
from tiercel.runtime.backup.segment_file import FORMAT, MAGIC
from tiercel.runtime.deployment import BackupPlan, DeploymentDir, Manifest, StreamFacts
from tiercel.runtime.net.registry import Address
from tiercel.runtime.storage.codec import encode_key
from tiercel.runtime.storage.open import DamagedStore
from tiercel.runtime.storage.store import Store
from tiercel.spark.sources.state_source import key_codec

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
    place = DeploymentDir(tmp_path / "storage")
    place.write(Manifest("test", topology, {"in": StreamFacts(schema.json(), ("car",))}))
    place.set_desired_instances([ME])
    key = key_codec(place.manifest(), "count").key_of(["car 7"])
    image = StateImage(key, 1, 5, {"count": ("value", (3,))})
    instance = Store(place.process(ME), "os")
    puts = {
        ("state", slot_of(key, SLOTS), key, 1): image,
        ("checkpoint",): CheckpointHeader(1, 5, 1, 0, 0, []),
    }
    instance.add(Write(1, puts))
    instance.close()
    router = Store(place.process("cloud"), "os")
    router.add(Write(1, {("head", "count"): (5, 0, -1), ("reader", "count", ME): LogReader(1, 5, {})}))
    router.close()
    return place.directory


def test_show_lists_the_state_of_each_process(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
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


def test_backup_restore_and_split_work_from_the_command_line(
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
        (["history", "nowhere"], "holds no backup of a deployment"),
        (["export", "STORAGE", "there", "--operator", "other"], "no operator 'other'"),
        (["export", "STORAGE", "there", "--operator", "count"], "does not say which state variables"),
        (["export", "STORAGE", "there", "--operator", "count", "--as-of", "1"], "without a backup"),
        (["import", "nowhere", "STORAGE", "--operator", "other"], "no operator 'other'"),
        (["split", "STORAGE", "count@cloud#7"], "no instance 'count@cloud#7'"),
        (["split", "STORAGE", ME, "--slots", "many"], "is not a slot"),
        (["merge", "STORAGE", ME, ME], "merging"),
    ],
)
def test_impossible_command_prints_one_sentence(
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


COMMANDS = ["show", "backup", "restore", "history", "checkpoint", "split", "merge", "export", "import"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"Example: tiercel state {command} " in out


# -- damaged -----------------------------------------------------------------------------------


def test_history_lists_restorable_states(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path
) -> None:
    copy = str(tmp_path / "copy")
    for _ in range(2):
        assert run(capsys, "backup", str(storage), copy)[0] == 0
    code, out, _ = run(capsys, "history", copy, "--process", ME, "--json")
    assert code == 0
    assert [(line["process"], line["number"], line["kind"]) for line in json.loads(out)] == [
        (ME, 1, "base"),
        (ME, 2, "base"),
    ]
    assert run(capsys, "history", copy, "--process", "other@cloud#1")[0] == 2


def test_damaged_backup_is_named_and_the_last_complete_state_is_suggested(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path
) -> None:
    copy, there = tmp_path / "copy", tmp_path / "there"
    for _ in range(2):
        assert run(capsys, "backup", str(storage), str(copy))[0] == 0
    [file] = copy.glob("processes/count*/base.000000000002.*")
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(MAGIC + b" %d " % FORMAT, MAGIC + b" 9 "), b""):
        file.write_bytes(damaged)
        code, _, err = run(capsys, "restore", str(copy), str(there))
        assert code == 2
        assert file.name in err
        assert f"--up-to '{ME}=1'" in err or "use the version that wrote it" in err
        assert not there.exists()
        assert file.read_bytes() == damaged
    assert run(capsys, "restore", str(copy), str(there), "--up-to", f"{ME}=1")[0] == 0
    code, out, _ = run(capsys, "show", str(there), "--operator", "count", "--key", "car 7", "--json")
    assert [line["value"] for line in json.loads(out)] == ["[3]"]


def test_missing_backup_file_is_named(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    assert run(capsys, "backup", str(storage), str(copy))[0] == 0
    [file] = copy.glob("processes/count*/base.*")
    file.unlink()
    code, _, err = run(capsys, "restore", str(copy), str(tmp_path / "there"))
    assert code == 2
    assert f"base 1, chunk 0, of {ME} is missing" in err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("gone", ["head.*", "*"])
@pytest.mark.parametrize("process", ["cloud", ME])
def test_process_missing_in_a_backup_is_named_and_its_last_complete_state_suggested(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path, process: str, gone: str
) -> None:
    """It was left out, and the rest restored without a word."""
    copy, there = tmp_path / "copy", tmp_path / "there"
    router = Store(DeploymentDir(storage).process("cloud"), "os")
    router.add(Write(2, {("reader", "count", ME): LogReader(1, 5, {}, stored=True)}))
    router.close()
    assert run(capsys, "backup", str(storage), str(copy))[0] == 0
    for file in (copy / folder_of(process)).glob(gone):
        file.unlink()
    code, _, err = run(capsys, "restore", str(copy), str(there))
    assert code == 2
    assert "holds no complete backup of" in err
    assert process in err
    assert not there.exists()
    if gone == "*":
        assert "no earlier state is complete there" in err
    else:
        assert f"--up-to '{process}=1'" in err
        assert run(capsys, "restore", str(copy), str(there), "--up-to", f"{process}=1")[0] == 0


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_backup_without_manifest_names_the_second_manifest(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path, how: str
) -> None:
    copy, there = tmp_path / "copy", tmp_path / "there"
    assert run(capsys, "backup", str(storage), str(copy))[0] == 0
    manifest = copy / "backup.json"
    if how == "missing":
        manifest.unlink()
    else:
        manifest.write_text("{", encoding="utf-8")
    code, _, err = run(capsys, "restore", str(copy), str(there))
    assert code == 2
    assert "backup.second.json beside it is undamaged: copy it to backup.json" in " ".join(err.split())
    assert not there.exists()
    second = (copy / "backup.second.json").read_bytes()
    (copy / "backup.second.json").write_text("{", encoding="utf-8")
    code, _, err = run(capsys, "restore", str(copy), str(there))
    assert (code, "beside it is undamaged" in err) == (2, False)
    manifest.write_bytes(second)
    assert run(capsys, "restore", str(copy), str(there))[0] == 0


@pytest.mark.parametrize("how", ["damaged head", "no head", "no directory"])
def test_show_reports_problems_of_a_backup(
    capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path, how: str
) -> None:
    """It was shown as if there were none to be had."""
    place, copy = DeploymentDir(storage), tmp_path / "copy"
    assert run(capsys, "backup", str(storage), str(copy))[0] == 0
    place.write(msgspec.structs.replace(place.manifest(), backup=BackupPlan(str(copy))))
    [head] = (copy / folder_of(ME)).glob("head.*")
    if how == "damaged head":
        head.write_bytes(head.read_bytes()[:-9])
    elif how == "no head":
        head.unlink()
    else:
        shutil.rmtree(copy)
        copy.write_text("a file", encoding="utf-8")
    code, out, _ = run(capsys, "show", str(storage), "--json")
    assert code == 0
    lines = {line["process"]: line for line in json.loads(out)}
    assert lines[ME]["backup_number"] is None
    expected = {"damaged head": head.name, "no head": "holds no complete backup", "no directory": str(copy)}
    assert expected[how] in lines[ME]["backup_problem"]
    assert (lines["cloud"]["backup_problem"] is None) == (how != "no directory")


def test_timed_out_checkpoint_reports_the_storage_problem(storage: Path) -> None:
    """Whatever was wrong, it asked whether the instance ran."""
    place = DeploymentDir(storage)
    place.registry.publish(Address(ME, "127.0.0.1", 1, 1, 1))
    with pytest.raises(UserError, match=f"no checkpoint of {ME} within 0.1 s") as silent:
        checkpoint(storage, 0.1)
    assert silent.value.hint == "see with live.status() whether they run"
    next(place.process(ME).glob("MANIFEST-*")).write_bytes(b"spoilt")
    with pytest.raises(UserError, match="cannot be opened") as damaged:
        checkpoint(storage, 0.1)
    assert damaged.value.expected == "instances that run, and storage that can be read"


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("spoilt", ["MANIFEST-*", "*.sst", "CURRENT"])
def test_damaged_checkpoint_is_named_and_left_unchanged(
    capsys: pytest.CaptureFixture[str], storage: Path, spoilt: str
) -> None:
    directory = DeploymentDir(storage).process(ME)
    db = Rdict(str(directory), Options(raw_mode=True))
    db.flush()  # into a file of its own
    db.close()
    file = max(directory.glob(spoilt), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 3, len(data)):
        data[at] ^= 0x5A
    file.write_bytes(data)
    before = contents(directory)
    for arguments in (["show"], ["show", "--operator", "count", "--key", "car 7"], ["backup"]):
        words = [arguments[0], str(storage), *arguments[1:]]
        code, _, err = run(
            capsys, *words, *([str(storage.parent / "copy")] if arguments == ["backup"] else [])
        )
        assert code == 2, (arguments, err)
        assert str(directory) in err
        assert "set this directory aside" in err
    with pytest.raises(DamagedStore):
        Store(directory, "os").items()
    after = contents(directory)
    assert {name: after[name] for name in before if not name.startswith(("LOG", "LOCK"))} == {
        name: data for name, data in before.items() if not name.startswith(("LOG", "LOCK"))
    }


def test_undecodable_checkpoint_value_is_named(capsys: pytest.CaptureFixture[str], storage: Path) -> None:
    place = DeploymentDir(storage)
    key = key_codec(place.manifest(), "count").key_of(["car 7"])
    db = Rdict(str(place.process(ME)), Options(raw_mode=True))
    db.put(encode_key(("state", slot_of(key, SLOTS), key, 1)), b"\xc1")
    db.close()
    code, _, err = run(capsys, "show", str(storage), "--operator", "count", "--key", "car 7")
    assert code == 2
    assert str(place.process(ME)) in err
    assert "cannot be decoded" in err
