"""A store is usable while its values are still in the backup, as if it were fully restored."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.core.machine.effects import Write
from tiercel.core.model.keys import StateImage, StoredKeyInfo
from tiercel.core.model.topology import Topology
from tiercel.errors import UserError
from tiercel.runtime.backup import lazy_restore as module
from tiercel.runtime.backup import process_backup as backups
from tiercel.runtime.backup import segment_file as pieces
from tiercel.runtime.backup import uploader as uploader_module
from tiercel.runtime.backup.lazy_restore import LazyRestore
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.restore import restore, restore_lazily
from tiercel.runtime.backup.segment_file import DamagedBackup, MissingSegment
from tiercel.runtime.backup.uploader import BackupUploader
from tiercel.runtime.deployment import BackupPlan, Manifest
from tiercel.runtime.recovery.recover import is_newest, open_storage
from tiercel.runtime.storage import store
from tiercel.runtime.storage.store import Store, StoreView

ME, DEPLOYMENT = "count@cloud#1", "d1"
_fresh = itertools.count()


def place(key: str, version: int) -> tuple[Any, ...]:
    return ("state", ord(key) % 4, key.encode(), version)


def image(key: str, version: int, timers: tuple[int, ...] = ()) -> StateImage:
    return StateImage(key.encode(), 1, version, {"n": ["value", [f"{key} {version}" * 9]]}, timers)


class Writer:
    """An instance's store, uploaded when the test says so."""

    def __init__(self, directory: Path, backup: ProcessBackup, pending: LazyRestore | None = None) -> None:
        head = backup.head()
        self.store = Store(directory, "os", next_incarnation=backup.claim, missing=pending)
        self.uploader = BackupUploader(self.store, backup, BackupPlan(backup.location.url), head)
        self.seq = 0

    def write(self, puts: dict[Any, Any], deletes: tuple[Any, ...] = ()) -> Writer:
        self.seq += 1
        self.store.add(Write(self.seq, puts, deletes))
        self.store.commit()
        return self

    def upload(self) -> Writer:
        self.uploader._upload()
        return self


class PausedRestore(LazyRestore):
    """Restores nothing before the test says so."""

    def start_background_restore(
        self, put: Callable[[list[Any]], object], on_complete: Callable[[], object]
    ) -> None:
        self.run_restore = lambda: self._run(put, on_complete)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.runtime.backup.restore.LazyRestore", PausedRestore)
    monkeypatch.setattr(module, "UNDISTURBED_S_MAX", 0.0)


@pytest.fixture
def backup(tmp_path: Path) -> ProcessBackup:
    return ProcessBackup(Location((tmp_path / "backup").as_uri()), DEPLOYMENT, ME)


def filled(directory: Path, backup: ProcessBackup, keys: str = "abcdef") -> None:
    """Each key in a base, some again in an increment, one of them deleted there."""
    writer = Writer(directory, backup)
    writer.write({place(key, 1): image(key, 1, (7,)) for key in keys} | {("schema",): {"n": 1}}).upload()
    writer.write({place("a", 2): image("a", 2)}, (place("a", 1), place("b", 1))).upload()
    writer.store.close()


def content(directory: Path) -> dict[Any, Any]:
    view = StoreView(directory)
    try:
        return {key: value for table in ("state", "schema") for key, value in view.scan((table,))}
    finally:
        view.close()


# -- the same as a whole one ---------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcdefgh"), st.lists(st.integers(0, 99), max_size=2)),
        st.tuples(st.just("delete"), st.sampled_from("abcdefgh"), st.just([])),
        st.tuples(st.just("ship"), st.just(""), st.just([])),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 400))
def test_lazy_restore_gives_the_same_names_timers_and_values_as_a_full_restore(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, str, list[int]]], section: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("away")
    backup = ProcessBackup(Location(f"memory://away{next(_fresh)}"), DEPLOYMENT, ME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SECTION_BYTES", section)
        patch.setattr(module, "RANGE_BYTES", section)
        patch.setattr(module, "UNDISTURBED_S_MAX", 0.0)
        patch.setattr("tiercel.runtime.backup.restore.LazyRestore", PausedRestore)
        writer, there = Writer(tmp_path / "db", backup), dict[str, int]()
        writer.write({("schema",): {"n": 1}}).upload()
        for version, (what, key, timers) in enumerate(script):
            old = (place(key, there.pop(key)),) if key in there else ()
            if what == "put":
                writer.write({place(key, version): image(key, version, tuple(timers))}, old)
                there[key] = version
            elif what == "delete":
                writer.write({("schema",): {"n": version}}, old)
            else:
                writer.upload()
        writer.upload()
        writer.store.close()
        restore(backup, tmp_path / "whole")
        pending = restore_lazily(backup, tmp_path / "lazy")
        assert isinstance(pending, PausedRestore)
        whole, lazy = Store(tmp_path / "whole", "os"), Store(tmp_path / "lazy", "os", missing=pending)
        assert lazy.items(values=False) == whole.items(values=False)
        states = [key for key in whole.items(values=False) if key[0] == "state"]
        for key in states:
            assert lazy.read(key) == whole.read(key)
        pending.run_restore()
        assert lazy.items() == whole.items()
        assert [lazy.read(key) for key in states] == [whole.read(key) for key in states]
        for each in (whole, lazy):
            each.close()
    assert content(tmp_path / "lazy") == content(tmp_path / "whole")


# -- while it comes ------------------------------------------------------------------------------


def test_writes_and_deletes_during_a_lazy_restore_are_not_overwritten(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    filled(tmp_path / "db", backup)
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert isinstance(pending, PausedRestore)
    writer = Writer(tmp_path / "lazy", backup, pending)
    writer.write({place("d", 9): image("d", 9)}, (place("c", 1), place("d", 1))).upload()
    with pytest.raises(KeyError):
        writer.store.read(place("c", 1))
    pending.run_restore()
    writer.store.close()
    stored = {place("a", 2), place("d", 9), place("e", 1), place("f", 1)}
    assert {key for key in content(tmp_path / "lazy") if key[0] == "state"} == stored
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "lazy")


def test_store_closed_before_its_restore_is_complete_is_restored_again(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    filled(tmp_path / "db", backup)
    writer = Writer(tmp_path / "lazy", backup, restore_lazily(backup, tmp_path / "lazy"))
    writer.write({place("g", 3): image("g", 3)}).upload()
    writer.write({place("h", 4): image("h", 4)})  # nobody was told of this one
    writer.store.close()
    head = backup.head()
    assert head is not None
    assert not is_newest(tmp_path / "lazy", backup, head)
    manifest = Manifest(
        DEPLOYMENT, Topology({"cloud": None}, {}, {}), {}, backup=BackupPlan(backup.location.url)
    )
    storage = open_storage(tmp_path / "lazy", manifest, ME)
    storage.store.close()
    stored = {key[2] for key in content(tmp_path / "lazy") if key[0] == "state"}
    assert stored == {each.encode() for each in "acdefg"}


def test_reader_waits_until_the_store_is_fully_restored(
    tmp_path: Path, backup: ProcessBackup, paused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "db", backup)
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert isinstance(pending, PausedRestore)
    lazy = Store(tmp_path / "lazy", "os", missing=pending)
    view = StoreView(tmp_path / "lazy", complete=False)
    assert view.restoring
    assert view.get(("schema",)) == {"n": 1}
    view.close()
    with monkeypatch.context() as patch:
        patch.setattr(store, "RESTORED_S_MAX", 0.2)
        with pytest.raises(UserError, match="is still being restored"):
            StoreView(tmp_path / "lazy")
    found: list[Any] = []
    idle_timers = threading.Thread(target=lambda: found.append(content(tmp_path / "lazy")))
    idle_timers.start()
    time.sleep(0.3)
    assert found == []
    pending.run_restore()
    idle_timers.join()
    lazy.close()
    assert len(found[0]) == 6


def test_new_base_waits_until_the_store_is_fully_restored(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    filled(tmp_path / "db", backup)
    backup.claim(1)  # an incarnation that uploaded nothing: the next one begins with a base
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert isinstance(pending, PausedRestore)
    writer = Writer(tmp_path / "lazy", backup, pending)
    before = backup.location.names(backup.folder)
    writer.write({place("g", 3): image("g", 3)}).upload()
    assert backup.location.names(backup.folder) == before
    pending.run_restore()
    writer.upload()
    writer.store.close()
    head = backup.head()
    assert head is not None
    assert head.base == head.number == 3
    restore(backup, tmp_path / "again")
    assert {key[2] for key in content(tmp_path / "again") if key[0] == "state"} == {
        each.encode() for each in "acdefg"
    }


def test_increments_continue_past_the_limit_until_the_store_is_fully_restored(
    tmp_path: Path, backup: ProcessBackup, paused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that was due and waited let nothing become safe: a later death had all of that to do again."""
    monkeypatch.setattr(uploader_module, "REBASE_BYTES_MIN", 1)
    monkeypatch.setattr(backups, "CHUNK_BYTES", 1)
    filled(tmp_path / "db", backup)
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert isinstance(pending, PausedRestore)
    writer = Writer(tmp_path / "lazy", backup, pending)
    for version in range(3, 9):
        writer.write({place("g", version): image("g", version)}).upload()
        head = backup.head()
        assert head is not None
        assert (head.base, head.number, head.through) == (1, version, writer.store.batches)
    pending.run_restore()
    pending._ended.set()
    writer.write({place("g", 9): image("g", 9)}).upload()
    head = backup.head()
    assert head is not None
    assert head.base == head.number == 9
    writer.store.close()


def test_next_incarnation_knows_the_size_of_the_base_it_continues(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it ships a new one after as few bytes as if there were none."""
    monkeypatch.setattr(uploader_module, "REBASE_BYTES_MIN", 1)
    monkeypatch.setattr(backups, "CHUNK_BYTES", 1_000)
    writer = Writer(tmp_path / "db", backup)
    writer.write({place(key, 1): image(key, 1) for key in map(chr, range(100, 200))}).upload()
    writer.store.close()
    again = Writer(tmp_path / "db", backup)
    for version in range(2, 6):
        again.write({place("d", version): image("d", version)}).upload()
    head = backup.head()
    assert head is not None
    assert (head.base, head.number) == (1, 5)
    again.store.close()


def test_background_restore_starts_when_no_reads_are_pending(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNDISTURBED_S_MAX", 60.0)
    monkeypatch.setattr(module, "QUIET_S", 2.0)  # far longer than it takes us to look
    filled(tmp_path / "db", backup)
    lazy = Store(tmp_path / "lazy", "os", missing=restore_lazily(backup, tmp_path / "lazy"))
    for _ in range(10):
        assert lazy.read(place("c", 1))[0] == image("c", 1, (7,))
        time.sleep(0.01)
        view = StoreView(tmp_path / "lazy", complete=False)
        assert view.restoring
        view.close()
    assert lazy.items(values=True)[place("a", 2)] == image("a", 2)
    lazy.close()
    restore(backup, tmp_path / "whole")
    assert content(tmp_path / "lazy") == content(tmp_path / "whole")


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["corrupt", "missing"])
def test_damaged_value_is_named_and_the_store_stays_marked_as_incomplete(
    tmp_path: Path, backup: ProcessBackup, paused: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    filled(tmp_path / "db", backup)
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert isinstance(pending, PausedRestore)
    lazy = Store(tmp_path / "lazy", "os", missing=pending)
    [name] = [name for name in backup.location.names(backup.folder) if name.startswith("base")]
    path = f"{backup.folder}/{name}"
    data = backup.location.get(path)
    if how == "missing":
        backup.location.delete([path])
    else:
        backup.location.put(path, data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(DamagedBackup, match=name):
        lazy.read(place("c", 1))
    assert lazy.read(place("a", 2))[0] == image("a", 2)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    restoring = threading.Thread(target=pending.run_restore)
    restoring.start()
    time.sleep(0.2)
    assert restoring.is_alive()
    backup.location.put(path, data)  # somebody has brought it back
    restoring.join(10)
    assert lazy.items()[place("c", 1)] == image("c", 1, (7,))
    lazy.close()


def test_process_starts_over_when_a_newer_base_replaced_a_file_it_needs(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    """One that is given up may go on with its backup; else a process that restores it waited for ever."""
    filled(tmp_path / "db", backup)
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert isinstance(pending, PausedRestore)
    lazy = Writer(tmp_path / "lazy", backup, pending)
    other = Writer(tmp_path / "db", ProcessBackup(backup.location, DEPLOYMENT, ME))
    other.uploader.start_over()
    other.write({place("g", 9): image("g", 9)}).upload()
    old = [name for name in backup.location.names(backup.folder) if name.startswith("base.000000000001")]
    backup.location.delete(f"{backup.folder}/{name}" for name in old)
    pending.run_restore()
    with pytest.raises(MissingSegment, match="is missing"):
        lazy.write({place("h", 9): image("h", 9)})
    lazy.store.close()
    view = StoreView(tmp_path / "lazy", complete=False)
    assert view.restoring
    view.close()
    other.store.close()


def test_store_closed_before_any_value_arrived_stays_marked_as_incomplete(
    tmp_path: Path, backup: ProcessBackup
) -> None:
    """It would have been opened as it is next time, with a cursor and without its keys."""
    filled(tmp_path / "db", backup)
    Store(tmp_path / "lazy", "os", missing=restore_lazily(backup, tmp_path / "lazy")).close()
    view = StoreView(tmp_path / "lazy", complete=False)
    assert view.restoring
    view.close()
    head = backup.head()
    assert head is not None
    assert not is_newest(tmp_path / "lazy", backup, head)


def test_outline_reads_only_a_fraction_of_the_backup(tmp_path: Path, backup: ProcessBackup) -> None:
    writer = Writer(tmp_path / "db", backup)
    large = {"n": ("value", (bytes(20_000),))}
    writer.write({place(chr(n), 1): StateImage(b"k", 1, 1, large, (n,)) for n in range(48, 120)}).upload()
    writer.store.close()
    read: list[int] = []
    get = backup.location._get

    def counted(*where: Any) -> bytes:
        found = get(*where)
        read.append(len(found))
        return found

    backup.location._get = counted  # type: ignore[method-assign]
    pending = restore_lazily(backup, tmp_path / "lazy")
    assert len(pending.missing_keys()) == 72
    assert {StoredKeyInfo(timers) for timers in pending.missing_keys().values()} == {
        StoredKeyInfo((n,)) for n in range(48, 120)
    }
    assert sum(read) < 40_000


def test_waiting_for_values_that_can_never_arrive_raises(tmp_path: Path, backup: ProcessBackup) -> None:
    filled(tmp_path / "db", backup)
    pending = restore_lazily(backup, tmp_path / "lazy")
    other = Writer(tmp_path / "db", ProcessBackup(backup.location, DEPLOYMENT, ME))
    other.uploader.start_over()
    other.write({place("g", 9): image("g", 9)}).upload()
    old = [name for name in backup.location.names(backup.folder) if name.startswith("base.000000000001")]
    backup.location.delete(f"{backup.folder}/{name}" for name in old)
    lazy = Store(tmp_path / "lazy", "os", missing=pending)
    ended: list[object] = []

    def load() -> None:
        try:
            ended.append(lazy.items())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(15)
    assert pending.lost is not None
    hangs = thread.is_alive()
    lazy.close()
    other.store.close()
    assert not hangs
    assert isinstance(ended[0], DamagedBackup)
