"""A write-ahead log that was damaged, cut or deleted is noticed, named, and stays as it is."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercel import cli
from tiercel.core.topology import Topology
from tiercel.runtime import witness
from tiercel.runtime.opening import DamagedStore
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.store import Durability, StoreView
from tiercel.runtime.storing import look_at, open_storage

HEADS = {("stream_head", f"s{n}"): n for n in range(50)}


KILLED = """
import os, sys
from pathlib import Path
from tiercel.core.effects import Write
from tiercel.runtime import witness
from tiercel.runtime.store import Store
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
def test_what_a_damaged_log_has_lost_is_noticed_and_nothing_is_changed(
    tmp_path: Path, spoil: Callable[[Path], None], durability: Durability
) -> None:
    """RocksDB takes the rest of it for never written, and would go on with less than was promised."""
    place = Place(tmp_path)
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
    (directory / witness.NAME).unlink()  # as the hint says: go on with what is left
    look_at(directory)
    store = open_storage(directory, manifest, "cloud").store
    found = store.items()
    assert len(found) < len(HEADS)
    assert found == dict(list(HEADS.items())[: len(found)])
    store.close()


def test_the_command_line_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path)
    place.write(Manifest("test", Topology({"cloud": None}, {}, {}), {}))
    cut(written(place.process("cloud")))
    assert cli.run_app(["state", "show", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(place.process("cloud")) in said.replace("\n", "")
    assert "set this directory aside" in said
    assert witness.NAME in said


WRITER = """
import sys
from pathlib import Path
from tiercel.core.effects import Write
from tiercel.runtime.store import Store
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
def test_a_writer_that_is_killed_again_and_again_is_never_taken_for_damaged(
    tmp_path: Path, durability: Durability
) -> None:
    directory = tmp_path / "s"
    for life in range(1, 5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), durability], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            told = [int(writer.stdout.readline()) for _ in range(5 * life)][-1]
            seen = StoreView(directory)  # beside it
            assert seen.get(("stream_head", "s")) > 0
            seen.close()
            writer.kill()
        noted = witness.reached(directory)
        assert noted > 0
        view = StoreView(directory)
        assert view.get(("stream_head", "s")) >= told
        assert view.numbers[0] == life
        view.close()


def test_a_note_that_is_not_whole_is_none(tmp_path: Path) -> None:
    assert witness.reached(tmp_path) == 0
    noting = witness.Witness(tmp_path)
    assert witness.reached(tmp_path) == 0
    noting.note(7)
    assert not noting.is_due()
    noting.close()
    assert witness.reached(tmp_path) == 7
    note = tmp_path / witness.NAME
    whole = note.read_bytes()
    for torn in (b"", whole[:5], whole[:-1], bytes(12)[:11] + b"\x01"):
        note.write_bytes(torn)
        assert witness.reached(tmp_path) == 0


def test_the_error_reaches_the_driver_whole() -> None:
    error = DamagedStore("what", otherwise="; or else")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "; or else" in str(again)
