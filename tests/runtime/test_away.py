"""A store that is used while its values are still in the backup: it cannot be told from a whole one."""

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

from tiercel.core.effects import Write
from tiercel.core.records import KeyFacts, KeyImage
from tiercel.core.topology import Topology
from tiercel.errors import UserError
from tiercel.runtime import away as module
from tiercel.runtime import backups, pieces, shipping, store
from tiercel.runtime.away import Away
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import DamagedBackup, MissingPiece
from tiercel.runtime.place import BackupPlan, Manifest
from tiercel.runtime.shipping import Shipper
from tiercel.runtime.store import Store, StoreView
from tiercel.runtime.storing import is_newest, open_storage, restore, restore_outline

ME, DEPLOYMENT = "count@cloud#1", "d1"
_fresh = itertools.count()


def place(key: str, version: int) -> tuple[Any, ...]:
    return ("state", ord(key) % 4, key.encode(), version)


def image(key: str, version: int, timers: tuple[int, ...] = ()) -> KeyImage:
    return KeyImage(key.encode(), 1, version, {"n": ["value", [f"{key} {version}" * 9]]}, timers)


class Writer:
    """An instance's store, shipped when the test says so."""

    def __init__(self, directory: Path, backup: ProcessBackup, away: Away | None = None) -> None:
        head = backup.head()
        self.store = Store(directory, "os", next_life=backup.claim, away=away)
        self.shipper = Shipper(self.store, backup, BackupPlan(backup.location.url), head)
        self.seq = 0

    def write(self, puts: dict[Any, Any], deletes: tuple[Any, ...] = ()) -> Writer:
        self.seq += 1
        self.store.add(Write(self.seq, puts, deletes))
        self.store.commit()
        return self

    def ship(self) -> Writer:
        self.shipper._ship()
        return self


class Paused(Away):
    """Brings nothing before it is told."""

    def bring(self, put: Callable[[list[Any]], object], whole: Callable[[], object]) -> None:
        self.go_on = lambda: self._run(put, whole)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.runtime.storing.Away", Paused)
    monkeypatch.setattr(module, "HEAD_START_S_MAX", 0.0)


@pytest.fixture
def backup(tmp_path: Path) -> ProcessBackup:
    return ProcessBackup(Location((tmp_path / "backup").as_uri()), DEPLOYMENT, ME)


def filled(directory: Path, backup: ProcessBackup, keys: str = "abcdef") -> None:
    """Each key in a base, some again in an increment, one of them deleted there."""
    writer = Writer(directory, backup)
    writer.write({place(key, 1): image(key, 1, (7,)) for key in keys} | {("schema",): {"n": 1}}).ship()
    writer.write({place("a", 2): image("a", 2)}, (place("a", 1), place("b", 1))).ship()
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
def test_names_timers_and_values_are_those_of_a_whole_restore(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, str, list[int]]], section: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("away")
    backup = ProcessBackup(Location(f"memory://away{next(_fresh)}"), DEPLOYMENT, ME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SECTION_BYTES", section)
        patch.setattr(module, "RANGE_BYTES", section)
        patch.setattr(module, "HEAD_START_S_MAX", 0.0)
        patch.setattr("tiercel.runtime.storing.Away", Paused)
        writer, there = Writer(tmp_path / "db", backup), dict[str, int]()
        writer.write({("schema",): {"n": 1}}).ship()
        for version, (what, key, timers) in enumerate(script):
            old = (place(key, there.pop(key)),) if key in there else ()
            if what == "put":
                writer.write({place(key, version): image(key, version, tuple(timers))}, old)
                there[key] = version
            elif what == "delete":
                writer.write({("schema",): {"n": version}}, old)
            else:
                writer.ship()
        writer.ship()
        writer.store.close()
        restore(backup, tmp_path / "whole")
        away = restore_outline(backup, tmp_path / "lazy")
        assert isinstance(away, Paused)
        whole, lazy = Store(tmp_path / "whole", "os"), Store(tmp_path / "lazy", "os", away=away)
        assert lazy.items(values=False) == whole.items(values=False)
        states = [key for key in whole.items(values=False) if key[0] == "state"]
        for key in states:
            assert lazy.read(key) == whole.read(key)
        away.go_on()
        assert lazy.items() == whole.items()
        assert [lazy.read(key) for key in states] == [whole.read(key) for key in states]
        for each in (whole, lazy):
            each.close()
    assert content(tmp_path / "lazy") == content(tmp_path / "whole")


# -- while it comes ------------------------------------------------------------------------------


def test_what_is_deleted_or_written_meanwhile_stays_so(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    filled(tmp_path / "db", backup)
    away = restore_outline(backup, tmp_path / "lazy")
    assert isinstance(away, Paused)
    writer = Writer(tmp_path / "lazy", backup, away)
    writer.write({place("d", 9): image("d", 9)}, (place("c", 1), place("d", 1))).ship()
    with pytest.raises(KeyError):
        writer.store.read(place("c", 1))
    away.go_on()
    writer.store.close()
    kept = {place("a", 2), place("d", 9), place("e", 1), place("f", 1)}
    assert {key for key in content(tmp_path / "lazy") if key[0] == "state"} == kept
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "lazy")


def test_one_that_ends_before_it_is_whole_begins_anew_with_the_backup(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    filled(tmp_path / "db", backup)
    writer = Writer(tmp_path / "lazy", backup, restore_outline(backup, tmp_path / "lazy"))
    writer.write({place("g", 3): image("g", 3)}).ship()
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
    kept = {key[2] for key in content(tmp_path / "lazy") if key[0] == "state"}
    assert kept == {each.encode() for each in "acdefg"}


def test_who_looks_waits_until_it_is_whole(
    tmp_path: Path, backup: ProcessBackup, paused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "db", backup)
    away = restore_outline(backup, tmp_path / "lazy")
    assert isinstance(away, Paused)
    lazy = Store(tmp_path / "lazy", "os", away=away)
    view = StoreView(tmp_path / "lazy", whole=False)
    assert view.restoring
    assert view.get(("schema",)) == {"n": 1}
    view.close()
    with monkeypatch.context() as patch:
        patch.setattr(store, "WHOLE_S_MAX", 0.2)
        with pytest.raises(UserError, match="is still being restored"):
            StoreView(tmp_path / "lazy")
    found: list[Any] = []
    looking = threading.Thread(target=lambda: found.append(content(tmp_path / "lazy")))
    looking.start()
    time.sleep(0.3)
    assert found == []
    away.go_on()
    looking.join()
    lazy.close()
    assert len(found[0]) == 6


def test_a_new_base_waits_until_the_store_is_whole(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    filled(tmp_path / "db", backup)
    backup.claim(1)  # a life that shipped nothing: who comes next begins with a base
    away = restore_outline(backup, tmp_path / "lazy")
    assert isinstance(away, Paused)
    writer = Writer(tmp_path / "lazy", backup, away)
    before = backup.location.names(backup.folder)
    writer.write({place("g", 3): image("g", 3)}).ship()
    assert backup.location.names(backup.folder) == before
    away.go_on()
    writer.ship()
    writer.store.close()
    head = backup.head()
    assert head is not None
    assert head.base == head.number == 3
    restore(backup, tmp_path / "again")
    assert {key[2] for key in content(tmp_path / "again") if key[0] == "state"} == {
        each.encode() for each in "acdefg"
    }


def test_increments_go_on_until_the_store_is_whole_however_many_there_are(
    tmp_path: Path, backup: ProcessBackup, paused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that was due and waited let nothing become safe: a later death had all of that to do again."""
    monkeypatch.setattr(shipping, "REBASE_BYTES_MIN", 1)
    monkeypatch.setattr(backups, "CHUNK_BYTES", 1)
    filled(tmp_path / "db", backup)
    away = restore_outline(backup, tmp_path / "lazy")
    assert isinstance(away, Paused)
    writer = Writer(tmp_path / "lazy", backup, away)
    for version in range(3, 9):
        writer.write({place("g", version): image("g", version)}).ship()
        head = backup.head()
        assert head is not None
        assert (head.base, head.number, head.through) == (1, version, writer.store.batches)
    away.go_on()
    away._ended.set()
    writer.write({place("g", 9): image("g", 9)}).ship()
    head = backup.head()
    assert head is not None
    assert head.base == head.number == 9
    writer.store.close()


def test_a_life_that_goes_on_knows_how_large_its_base_is(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it ships a new one after as few bytes as if there were none."""
    monkeypatch.setattr(shipping, "REBASE_BYTES_MIN", 1)
    monkeypatch.setattr(backups, "CHUNK_BYTES", 1_000)
    writer = Writer(tmp_path / "db", backup)
    writer.write({place(key, 1): image(key, 1) for key in map(chr, range(100, 200))}).ship()
    writer.store.close()
    again = Writer(tmp_path / "db", backup)
    for version in range(2, 6):
        again.write({place("d", version): image("d", version)}).ship()
    head = backup.head()
    assert head is not None
    assert (head.base, head.number) == (1, 5)
    again.store.close()


def test_a_thread_brings_all_of_it_once_nobody_needs_anything(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_START_S_MAX", 60.0)
    monkeypatch.setattr(module, "CALM_S", 2.0)  # far longer than it takes us to look
    filled(tmp_path / "db", backup)
    lazy = Store(tmp_path / "lazy", "os", away=restore_outline(backup, tmp_path / "lazy"))
    for _ in range(10):
        assert lazy.read(place("c", 1))[0] == image("c", 1, (7,))
        time.sleep(0.01)
        view = StoreView(tmp_path / "lazy", whole=False)
        assert view.restoring
        view.close()
    assert lazy.items(values=True)[place("a", 2)] == image("a", 2)
    lazy.close()
    restore(backup, tmp_path / "whole")
    assert content(tmp_path / "lazy") == content(tmp_path / "whole")


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["corrupt", "missing"])
def test_a_damaged_value_is_named_and_the_store_is_never_called_whole(
    tmp_path: Path, backup: ProcessBackup, paused: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    filled(tmp_path / "db", backup)
    away = restore_outline(backup, tmp_path / "lazy")
    assert isinstance(away, Paused)
    lazy = Store(tmp_path / "lazy", "os", away=away)
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
    bringing = threading.Thread(target=away.go_on)
    bringing.start()
    time.sleep(0.2)
    assert bringing.is_alive()
    backup.location.put(path, data)  # somebody has brought it back
    bringing.join(10)
    assert lazy.items()[place("c", 1)] == image("c", 1, (7,))
    lazy.close()


def test_who_needs_a_file_that_a_newer_base_has_replaced_ends_and_begins_with_that(
    tmp_path: Path, backup: ProcessBackup, paused: None
) -> None:
    """One that is believed dead may go on with its backup; else whoever restores it waited for ever."""
    filled(tmp_path / "db", backup)
    away = restore_outline(backup, tmp_path / "lazy")
    assert isinstance(away, Paused)
    lazy = Writer(tmp_path / "lazy", backup, away)
    other = Writer(tmp_path / "db", ProcessBackup(backup.location, DEPLOYMENT, ME))
    other.shipper.begin_anew()
    other.write({place("g", 9): image("g", 9)}).ship()
    old = [name for name in backup.location.names(backup.folder) if name.startswith("base.000000000001")]
    backup.location.delete(f"{backup.folder}/{name}" for name in old)
    away.go_on()
    with pytest.raises(MissingPiece, match="is missing"):
        lazy.write({place("h", 9): image("h", 9)})
    lazy.store.close()
    view = StoreView(tmp_path / "lazy", whole=False)
    assert view.restoring
    view.close()
    other.store.close()


def test_one_that_is_closed_before_anything_came_is_not_called_whole(
    tmp_path: Path, backup: ProcessBackup
) -> None:
    """It would have been opened as it is next time, with a cursor and without its keys."""
    filled(tmp_path / "db", backup)
    Store(tmp_path / "lazy", "os", away=restore_outline(backup, tmp_path / "lazy")).close()
    view = StoreView(tmp_path / "lazy", whole=False)
    assert view.restoring
    view.close()
    head = backup.head()
    assert head is not None
    assert not is_newest(tmp_path / "lazy", backup, head)


def test_names_and_timers_alone_are_a_fraction_of_what_is_there(
    tmp_path: Path, backup: ProcessBackup
) -> None:
    writer = Writer(tmp_path / "db", backup)
    large = {"n": ("value", (bytes(20_000),))}
    writer.write({place(chr(n), 1): KeyImage(b"k", 1, 1, large, (n,)) for n in range(48, 120)}).ship()
    writer.store.close()
    read: list[int] = []
    get = backup.location._get

    def counted(*where: Any) -> bytes:
        found = get(*where)
        read.append(len(found))
        return found

    backup.location._get = counted  # type: ignore[method-assign]
    away = restore_outline(backup, tmp_path / "lazy")
    assert len(away.names()) == 72
    assert {KeyFacts(timers) for timers in away.names().values()} == {KeyFacts((n,)) for n in range(48, 120)}
    assert sum(read) < 40_000


def test_who_waits_for_values_that_will_never_come_is_told(tmp_path: Path, backup: ProcessBackup) -> None:
    filled(tmp_path / "db", backup)
    away = restore_outline(backup, tmp_path / "lazy")
    other = Writer(tmp_path / "db", ProcessBackup(backup.location, DEPLOYMENT, ME))
    other.shipper.begin_anew()
    other.write({place("g", 9): image("g", 9)}).ship()
    old = [name for name in backup.location.names(backup.folder) if name.startswith("base.000000000001")]
    backup.location.delete(f"{backup.folder}/{name}" for name in old)
    lazy = Store(tmp_path / "lazy", "os", away=away)
    ended: list[object] = []

    def load() -> None:
        try:
            ended.append(lazy.items())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(15)
    assert away.lost is not None
    hangs = thread.is_alive()
    lazy.close()
    other.store.close()
    assert not hangs
    assert isinstance(ended[0], DamagedBackup)
