"""A write-ahead log that was damaged, cut or deleted is detected, named, and left unchanged."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercel.cli import main as cli
from tiercel.core.model.topology import Topology
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.recovery.recover import open_storage
from tiercel.runtime.storage import high_water_mark as high_water_mark
from tiercel.runtime.storage.directory import check_undamaged
from tiercel.runtime.storage.open import DamagedStore
from tiercel.runtime.storage.store import Durability, StoreView

HEADS = {("stream_head", f"s{n}"): n for n in range(50)}


KILLED = """
import os, sys
from pathlib import Path
from tiercel.core.machine.effects import Write
from tiercel.runtime.storage import high_water_mark as witness
from tiercel.runtime.storage.store import Store
witness.NOTE_S = 0.0
store = Store(Path(sys.argv[1]), sys.argv[2])
for n in range(50):
    store.add(Write(n + 1, {("stream_head", f"s{n}"): n}))
    store.commit()
    if sys.argv[2] == "disk":
        store.sync()
os._exit(0)  # RocksDB writes files of its own when it is closed
"""


def written(directory: Path, durability: Durability = "os") -> Path:
    """By a process that did not get to close it: all of it is in the write-ahead log."""
    subprocess.run([sys.executable, "-c", KILLED, str(directory), durability], check=True)
    [log] = [file for file in directory.glob("*.log") if file.stat().st_size]
    return log


def flip(log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 0x5A
    log.write_bytes(data)


def cut(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-20])


def contents(directory: Path) -> dict[str, bytes]:
    own = ("LOG", "LOCK")  # RocksDB's story of what it did
    return {f.name: f.read_bytes() for f in directory.iterdir() if not f.name.startswith(own)}


@pytest.mark.parametrize("durability", ["os", "disk"])
@pytest.mark.parametrize("spoil", [flip, cut, Path.unlink])
def test_damaged_write_ahead_log_is_detected_and_left_unchanged(
    tmp_path: Path, spoil: Callable[[Path], None], durability: Durability
) -> None:
    """RocksDB takes the rest of it for never written, and would go on with less than was promised."""
    place = DeploymentDir(tmp_path)
    manifest = Manifest("test", Topology({"cloud": None}, {}, {}), {}, durability=durability)
    directory = place.process("cloud")
    spoil(written(directory, durability))
    before = contents(directory)
    for _ in range(2):
        with pytest.raises(DamagedStore, match=r"ends with update \d+ of 52"):
            open_storage(directory, manifest, "cloud")
        with pytest.raises(DamagedStore, match="was damaged, cut or deleted"):
            StoreView(directory)
        assert contents(directory) == before
    (directory / high_water_mark.MARK_FILE).unlink()  # as the hint says: go on with what is left
    check_undamaged(directory)
    store = open_storage(directory, manifest, "cloud").store
    found = store.items()
    assert len(found) < len(HEADS)
    assert found == dict(list(HEADS.items())[: len(found)])
    store.close()


def test_command_line_names_the_damaged_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = DeploymentDir(tmp_path)
    place.write(Manifest("test", Topology({"cloud": None}, {}, {}), {}))
    cut(written(place.process("cloud")))
    assert cli.run_app(["state", "show", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert str(place.process("cloud")) in printed.replace("\n", "")
    assert "set this directory aside" in printed
    assert high_water_mark.MARK_FILE in printed


WRITER = """
import sys
from pathlib import Path
from tiercel.core.machine.effects import Write
from tiercel.runtime.storage.store import Store
store = Store(Path(sys.argv[1]), sys.argv[2])
for seq in range(1, 10**9):
    store.add(Write(seq, {("stream_head", "s"): seq}))
    store.commit()
    if sys.argv[2] == "disk":
        store.sync()
    if seq % 50 == 0:
        print(seq, flush=True)
"""


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_repeatedly_killed_writer_is_never_reported_as_damaged(
    tmp_path: Path, durability: Durability
) -> None:
    directory = tmp_path / "s"
    for incarnation in range(1, 5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), durability], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            reported = [int(writer.stdout.readline()) for _ in range(5 * incarnation)][-1]
            seen = StoreView(directory)  # beside it
            assert seen.get(("stream_head", "s")) > 0
            seen.close()
            writer.kill()
        noted = high_water_mark.read_mark(directory)
        assert noted > 0
        view = StoreView(directory)
        assert view.get(("stream_head", "s")) >= reported
        assert view.numbers[0] == incarnation
        view.close()


def test_damaged_mark_counts_as_no_mark(tmp_path: Path) -> None:
    assert high_water_mark.read_mark(tmp_path) == 0
    noting = high_water_mark.HighWaterMark(tmp_path)
    assert high_water_mark.read_mark(tmp_path) == 0
    noting.note(7)
    assert not noting.is_due()
    noting.close()
    assert high_water_mark.read_mark(tmp_path) == 7
    note = tmp_path / high_water_mark.MARK_FILE
    whole = note.read_bytes()
    for torn in (b"", whole[:5], whole[:-1], bytes(12)[:11] + b"\x01"):
        note.write_bytes(torn)
        assert high_water_mark.read_mark(tmp_path) == 0


def test_damaged_store_error_survives_pickling() -> None:
    error = DamagedStore("what", otherwise="; or else")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "; or else" in str(again)
