"""The files of a backup: whole or refused, and nobody's but one process's."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipped import DEPLOYMENT, ME, Shipped, content, names
from tiercel.core.topology import Topology
from tiercel.errors import UserError
from tiercel.runtime import backups, pieces
from tiercel.runtime.backups import ProcessBackup, ahead, folder_of, listed
from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import (
    FORMAT,
    MAGIC,
    DamagedBackup,
    Header,
    Pair,
    glance,
    needed_runs,
    pack,
    unpack,
    unpack_sections,
)
from tiercel.runtime.place import BackupPlan, Manifest
from tiercel.runtime.store import StoreView
from tiercel.runtime.storing import is_newest, open_storage, restore

_fresh = itertools.count()


@pytest.fixture(params=["directory", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    kind = request.param
    return Location(f"memory://b{next(_fresh)}" if kind == "memory" else (tmp_path / "backup").as_uri())


@pytest.fixture
def backup(location: Location) -> ProcessBackup:
    return ProcessBackup(location, DEPLOYMENT, ME)


@pytest.fixture
def chain(tmp_path: Path, backup: ProcessBackup) -> Iterator[Shipped]:
    """Base 1, increments 2 and 3."""
    shipped = Shipped(tmp_path / "db", backup)
    shipped.write(a=1, b=1).ship().write(a=2).write(c=3).ship().write(deletes=(("count", "b"),), a=4).ship()
    yield shipped
    shipped.close()


# -- the way there and back ------------------------------------------------------------------------


def test_a_base_and_its_increments_make_the_same_store(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    assert names(backup, "base") == ["base.000000000001.00000001.000000"]
    assert names(backup, "increment") == [f"increment.00000000000{n}.00000001" for n in (2, 3)]
    assert chain.safe == chain.seq
    header = restore(backup, tmp_path / "elsewhere")
    assert (header.number, header.through) == (3, chain.store.batches)
    assert content(tmp_path / "elsewhere") == {"a": 4, "c": 3}


def test_what_is_not_shipped_is_not_safe(backup: ProcessBackup, chain: Shipped) -> None:
    safe = chain.safe
    chain.write(z=1)
    assert chain.safe == safe
    chain.ship()
    assert chain.safe == chain.seq


def test_a_restored_store_goes_on_with_the_chain_and_a_store_that_has_more_begins_a_new_one(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    restore(backup, tmp_path / "elsewhere")
    second = Shipped(tmp_path / "elsewhere", backup)
    assert second.store.life == 2
    second.write(d=5).ship()
    assert names(backup, "increment")[-1] == "increment.000000000004.00000002"
    second.write(e=6).close()  # committed, never shipped: as after kill -9
    third = Shipped(tmp_path / "elsewhere", backup)
    third.ship()
    assert len(names(backup, "base")) == 2
    third.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "d": 5, "e": 6}


def test_a_life_is_taken_once_wherever_the_store_lies(tmp_path: Path, backup: ProcessBackup) -> None:
    assert backup.claim(0) == 1
    assert backup.claim(0) == 2
    assert backup.claim(7) == 8
    assert backup.last_life() == 8


def test_two_that_claim_the_same_life_at_once_do_not_both_get_it(
    backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, rivals = backup.location.put, ["claim.00000001.rival"]

    def put_and_be_met(name: str, data: bytes) -> None:
        put(name, data)
        if rivals:
            put(f"{backup.folder}/{rivals.pop()}", b"")

    monkeypatch.setattr(backup.location, "put", put_and_be_met)
    assert backup.claim(0) == 2


def test_who_is_believed_dead_and_ships_on_spoils_nothing(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    restore(backup, tmp_path / "elsewhere")
    successor = Shipped(tmp_path / "elsewhere", backup)
    successor.write(new=1).ship()
    chain.write(zombie=1).ship().write(zombie=2).ship()
    successor.write(new=2).ship()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "new": 2}


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("times", [1, 2])
def test_killed_between_an_increment_and_its_head_the_next_life_goes_on_with_the_chain(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Found by chaos: its number was left out, and the file that nobody finished stood in the chain."""
    chain.close()
    for n in range(times):
        restore(backup, tmp_path / f"life {n}")
        dying = Shipped(tmp_path / f"life {n}", backup)
        dying.write(a=5 + n).ship().write(never=n)
        with monkeypatch.context() as patch:
            patch.setattr(backup, "put_head", killed)
            with pytest.raises(KeyboardInterrupt):
                dying.ship()
        dying.close()
        restore(backup, tmp_path / f"whole {n}")
        assert content(tmp_path / f"whole {n}") == {"a": 5 + n, "c": 3}
    restore(backup, tmp_path / "elsewhere")
    successor = Shipped(tmp_path / "elsewhere", backup)
    successor.write(new=1).ship().write(new=2).ship()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4 + times, "c": 3, "new": 2}


def test_killed_while_it_ships_a_base_the_next_life_goes_on_and_may_ship_one_too(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.shipper._drop_buffer()
    chain.write(never=1)
    with monkeypatch.context() as patch:
        patch.setattr(backup, "put_head", killed)
        with pytest.raises(KeyboardInterrupt):
            chain.ship()
    chain.close()
    restore(backup, tmp_path / "elsewhere")
    successor = Shipped(tmp_path / "elsewhere", backup)
    successor.write(new=1).ship()
    successor.shipper._drop_buffer()
    successor.write(new=2).ship().write(new=3).ship()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "new": 3}


def test_the_last_bases_are_kept_and_what_is_older_goes(tmp_path: Path, backup: ProcessBackup) -> None:
    shipped = Shipped(tmp_path / "db", backup, keep=2)
    for n in range(5):
        shipped.write(a=n).ship().write(b=n).ship()
        shipped.shipper._drop_buffer()
    shipped.close()
    pieces = listed(names(backup))
    assert sorted({p.number for p in pieces if p.kind == "base"}) == [7, 9]
    assert min(p.number for p in pieces) == 7
    assert names(backup, "head") == ["head.00000001"]


def test_a_large_store_is_cut_into_chunks(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "CHUNK_BYTES", 200)
    shipped = Shipped(tmp_path / "db", backup)
    shipped.write(**{f"k{n:03d}": n for n in range(100)}).ship()
    shipped.close()
    assert len(names(backup, "base")) > 5
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {f"k{n:03d}": n for n in range(100)}


def test_a_buffer_that_is_too_full_becomes_a_base(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.runtime.shipping.BUFFER_BYTES_MAX", 100)
    chain.write(**{f"k{n}": n for n in range(20)})
    assert not chain.shipper._pairs
    chain.ship()
    assert [p.number for p in listed(names(backup, "base"))] == [1, 4]
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "db")


def test_a_location_that_fails_for_a_while_loses_nothing(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = backup.location.put

    def fail(name: str, data: bytes) -> None:
        raise UserError("no space")

    safe = chain.write(d=1).safe
    monkeypatch.setattr(backup.location, "put", fail)
    with pytest.raises(UserError):
        chain.ship()
    assert chain.safe == safe
    chain.write(e=2)
    monkeypatch.setattr(backup.location, "put", put)
    chain.ship()
    assert chain.safe == chain.seq
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "d": 1, "e": 2}


# -- where a process comes back --------------------------------------------------------------------


def manifest(location: Location) -> Manifest:
    return Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {}, backup=BackupPlan(location.url))


def test_a_missing_directory_is_restored_and_an_older_copy_is_set_aside(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    head = backup.head()
    assert head is not None
    assert is_newest(tmp_path / "db", backup, head)
    chain.close()
    for directory in (tmp_path / "executor-2" / ME, tmp_path / "db"):
        storage = open_storage(directory, manifest(backup.location), ME)
        storage.store.close()
    assert content(tmp_path / "executor-2" / ME) == content(tmp_path / "db") == {"a": 4, "c": 3}
    assert (tmp_path / ".older" / "db").exists(), "it was of life 1, and life 2 began elsewhere"
    assert backup.last_life() == 3


def test_a_store_that_lost_its_end_in_a_power_failure_is_older_than_its_backup(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    restore(backup, tmp_path / "short", up_to=2)
    view = StoreView(tmp_path / "short")
    assert view.numbers[1] > 1 << 32, "one that was chosen in place of a damaged one counts as newer"
    view.close()
    head = backup.head()
    assert head is not None
    assert not is_newest(tmp_path / "nothing", backup, head)


# -- bad input -------------------------------------------------------------------------------------


def change(backup: ProcessBackup, name: str, how: str) -> None:
    path = f"{backup.folder}/{name}"
    data = backup.location.get(path)
    if how == "missing":
        backup.location.delete([path])
        return
    changed = {
        "corrupt": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "no backup": b"something else\n",
        "version": data.replace(MAGIC + b" %d " % FORMAT, MAGIC + b" 9 ", 1),
    }[how]
    backup.location.put(path, changed)


DAMAGES = ["corrupt", "truncated", "empty", "no backup", "version", "missing"]


def offered(refused: DamagedBackup) -> str:
    """Behind whatever else there is to do: of a version, to use the one that wrote it."""
    assert refused.hint is not None
    first, _, other = refused.hint.partition("; or ")
    assert not other or "the version" in first
    return other or first


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_increment_is_named_nothing_is_restored_and_the_last_whole_state_is_offered(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, how: str
) -> None:
    change(backup, "increment.000000000003.00000001", how)
    target = tmp_path / "again"
    with pytest.raises(DamagedBackup, match=r"increment[. 0]*3") as refused:
        restore(backup, target)
    assert not target.exists()
    assert list(tmp_path.glob(".again*")) == []
    assert how != "version" or "format 9" in refused.value.what
    assert offered(refused.value) == f"the last whole state before it: --up-to '{ME}=2'"
    restore(backup, target, up_to=2)
    assert content(target) == {"a": 2, "b": 1, "c": 3}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_base_is_named_and_the_base_before_it_is_offered(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, how: str
) -> None:
    chain.shipper._drop_buffer()
    chain.write(late=1).ship()
    change(backup, "base.000000000004.00000001.000000", how)
    with pytest.raises(DamagedBackup, match=r"base[. 0]*4") as refused:
        restore(backup, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert offered(refused.value) == f"the last whole state before it: --up-to '{ME}=3'"
    restore(backup, tmp_path / "again", up_to=3)
    assert content(tmp_path / "again") == {"a": 4, "c": 3}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_head_is_refused_and_what_is_whole_is_offered(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, how: str
) -> None:
    change(backup, "head.00000001", how)
    with pytest.raises(DamagedBackup, match="holds no backup of" if how == "missing" else r"head\.0+1") as no:
        restore(backup, tmp_path / "again")
    assert offered(no.value) == f"the last whole state before it: --up-to '{ME}=3'"
    restore(backup, tmp_path / "again", up_to=3)
    assert content(tmp_path / "again") == {"a": 4, "c": 3}


def test_a_missing_increment_in_the_middle_is_noticed(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    change(backup, "increment.000000000002.00000001", "missing")
    with pytest.raises(DamagedBackup, match="increment 2 of count@cloud#1 is missing") as refused:
        restore(backup, tmp_path / "again")
    assert offered(refused.value) == f"the last whole state before it: --up-to '{ME}=1'"


def test_a_file_of_another_state_in_the_right_place_is_noticed(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped
) -> None:
    header = Header("increment", DEPLOYMENT, ME, 1, 2, 9, "0123456789abcdef", 0)
    backup.location.put(f"{backup.folder}/increment.000000000002.00000001", pack(header)[0])
    with pytest.raises(DamagedBackup, match="does not follow the file before it"):
        restore(backup, tmp_path / "again")


@pytest.mark.parametrize(("deployment", "process"), [("d2", ME), (DEPLOYMENT, "average@cloud#1")])
def test_a_backup_of_another_deployment_or_operator_is_refused(
    tmp_path: Path, backup: ProcessBackup, chain: Shipped, deployment: str, process: str
) -> None:
    other = ProcessBackup(backup.location, deployment, process)
    for name in names(backup):
        data = backup.location.get(f"{backup.folder}/{name}")
        backup.location.put(f"{folder_of(process)}/{name}", data)
    with pytest.raises(DamagedBackup, match=f"is a backup of (the deployment {DEPLOYMENT}|{ME})"):
        restore(other, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_without_a_backup_there_is_nothing_to_restore(tmp_path: Path, backup: ProcessBackup) -> None:
    with pytest.raises(DamagedBackup, match="holds no backup of count@cloud#1"):
        restore(backup, tmp_path / "again")


@pytest.mark.parametrize("url", ["nonsense://somewhere", "s3s://bucket"])
def test_a_location_of_an_unknown_kind_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="backup location"):
        Location(url)


def test_a_location_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory", encoding="ascii")
    backup = ProcessBackup(Location(str(tmp_path / "file")), DEPLOYMENT, ME)
    with pytest.raises(UserError, match=r"file/processes/.* cannot be (read|written)"):
        backup.claim(0)


def test_what_is_packed_is_unpacked() -> None:
    header = Header("base", DEPLOYMENT, ME, 3, 7, 12, "previous", 5, chunk=2, final=False)
    pairs: list[Pair] = [(b"gone", None), (b"k", b"v")]
    data, checksum = pack(header, pairs)
    found, unpacked, same = unpack(data, "x")
    assert (
        msgspec.structs.replace(found, sections=(), index_bytes=0, index_checksum=""),
        unpacked,
        same,
    ) == (header, pairs, checksum)


@given(
    values=st.dictionaries(st.binary(min_size=1, max_size=4), st.none() | st.binary(max_size=20)),
    enough=st.integers(1, 60),
    between=st.tuples(st.binary(max_size=4), st.binary(max_size=4)),
)
def test_sections_that_are_needed_hold_all_that_is(
    values: dict[bytes, bytes | None], enough: int, between: tuple[bytes, bytes]
) -> None:
    lowest, highest = sorted(between)
    pairs = sorted(values.items(), key=lambda pair: pair[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SECTION_BYTES", enough)
        data, _ = pack(Header("increment", DEPLOYMENT, ME, 1, 1, 1, "", 5), pairs)
    assert unpack(data, "x")[1] == pairs
    seen = glance(data)
    assert seen is not None
    assert len(seen.header.sections) <= pieces.SECTIONS_MAX
    read: list[Pair] = []
    for at, sections in needed_runs(seen, lambda first, last: first <= highest and last >= lowest):
        part = data[at : at + sum(section.size for section in sections)]
        read += unpack_sections(part, sections, "x")
        with pytest.raises(DamagedBackup, match="a section has the checksum"):
            unpack_sections(part[:-1], sections, "x")
    wanted = [pair for pair in pairs if lowest <= pair[0] <= highest]
    assert [pair for pair in read if lowest <= pair[0] <= highest] == wanted
    assert set(read) <= set(pairs)


# -- one ahead ---------------------------------------------------------------------------------


def test_the_next_file_is_fetched_while_this_one_is_used() -> None:
    fetched = threading.Event()

    def files() -> Iterator[int]:
        yield 1
        fetched.set()
        yield 2

    coming = ahead(files())
    assert next(coming) == 1
    assert fetched.wait(10)
    assert list(coming) == [2]


def test_a_file_that_cannot_be_read_ends_it_where_it_is() -> None:
    def files() -> Iterator[int]:
        yield 1
        raise DamagedBackup("the second one is torn")

    coming = ahead(files())
    assert next(coming) == 1
    with pytest.raises(DamagedBackup, match="torn"):
        next(coming)


def test_nothing_is_fetched_for_who_has_left() -> None:
    taken = []
    coming = ahead(n for n in range(1, 100) if taken.append(n) is None)  # type: ignore[func-returns-value]
    assert next(coming) == 1
    coming.close()  # type: ignore[attr-defined]
    assert len(taken) <= 2


def test_readers_of_one_location_are_not_faster_together_than_it_is_allowed_to_be(tmp_path: Path) -> None:
    Location(tmp_path.as_uri()).put("file", bytes(100_000))
    limited = Location(tmp_path.as_uri(), read_mb_s=1.0)
    readers = [
        threading.Thread(target=lambda: [limited.get("file", n, n + 1_000) for n in range(0, 100_000, 1_000)])
        for _ in range(2)
    ]
    begun = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert time.monotonic() - begun > 0.19  # 200,000 bytes
