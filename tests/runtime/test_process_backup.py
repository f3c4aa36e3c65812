"""The files of a process's backup are complete or refused, and belong to one process."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backup_fixtures import DEPLOYMENT, ME, BackedUpStore, content, names
from tiercel.core.model.topology import Topology
from tiercel.errors import UserError
from tiercel.runtime.backup import process_backup as backups
from tiercel.runtime.backup import segment_file as pieces
from tiercel.runtime.backup.deployment_backup import (
    write_manifest,
)
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.point_in_time import history, numbers_as_of, processes_as_of
from tiercel.runtime.backup.process_backup import ProcessBackup, folder_of, prefetched, segment_names
from tiercel.runtime.backup.restore import restore
from tiercel.runtime.backup.segment_file import (
    FORMAT,
    MAGIC,
    DamagedBackup,
    Header,
    needed_section_ranges,
    pack,
    read_header,
    unpack,
    unpack_sections,
)
from tiercel.runtime.deployment import BackupPlan, Manifest
from tiercel.runtime.recovery.recover import is_newest, open_storage
from tiercel.runtime.storage.codec import Pair
from tiercel.runtime.storage.store import StoreView

_fresh = itertools.count()


@pytest.fixture(params=["directory", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    kind = request.param
    return Location(f"memory://b{next(_fresh)}" if kind == "memory" else (tmp_path / "backup").as_uri())


@pytest.fixture
def backup(location: Location) -> ProcessBackup:
    return ProcessBackup(location, DEPLOYMENT, ME)


@pytest.fixture
def chain(tmp_path: Path, backup: ProcessBackup) -> Iterator[BackedUpStore]:
    """Base 1, increments 2 and 3."""
    uploaded = BackedUpStore(tmp_path / "db", backup)
    uploaded.write(a=1, b=1).upload().write(a=2).write(c=3).upload().write(
        deletes=(("count", "b"),), a=4
    ).upload()
    yield uploaded
    uploaded.close()


# -- the way there and back ------------------------------------------------------------------------


def test_base_and_increments_restore_the_same_store(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
) -> None:
    assert names(backup, "base") == ["base.000000000001.00000001.000000"]
    assert names(backup, "increment") == [f"increment.00000000000{n}.00000001" for n in (2, 3)]
    assert chain.safe == chain.seq
    header = restore(backup, tmp_path / "elsewhere")
    assert (header.number, header.through) == (3, chain.store.batches)
    assert content(tmp_path / "elsewhere") == {"a": 4, "c": 3}


def test_writes_that_are_not_uploaded_are_not_reported_as_uploaded(
    backup: ProcessBackup, chain: BackedUpStore
) -> None:
    safe = chain.safe
    chain.write(z=1)
    assert chain.safe == safe
    chain.upload()
    assert chain.safe == chain.seq


def test_restored_store_continues_the_chain_and_a_newer_store_begins_a_new_one(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
) -> None:
    restore(backup, tmp_path / "elsewhere")
    second = BackedUpStore(tmp_path / "elsewhere", backup)
    assert second.store.incarnation == 2
    second.write(d=5).upload()
    assert names(backup, "increment")[-1] == "increment.000000000004.00000002"
    second.write(e=6).close()  # committed, never uploaded: as after kill -9
    third = BackedUpStore(tmp_path / "elsewhere", backup)
    third.upload()
    assert len(names(backup, "base")) == 2
    third.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "d": 5, "e": 6}


def test_incarnation_is_used_once_wherever_the_store_is(tmp_path: Path, backup: ProcessBackup) -> None:
    assert backup.claim(0) == 1
    assert backup.claim(0) == 2
    assert backup.claim(7) == 8
    assert backup.last_incarnation() == 8


def test_two_processes_that_claim_at_once_get_different_incarnations(
    backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, rivals = backup.location.put, ["claim.00000001.rival"]

    def put_and_be_met(name: str, data: bytes) -> None:
        put(name, data)
        if rivals:
            put(f"{backup.folder}/{rivals.pop()}", b"")

    monkeypatch.setattr(backup.location, "put", put_and_be_met)
    assert backup.claim(0) == 2


def test_fenced_process_that_keeps_uploading_damages_nothing(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
) -> None:
    restore(backup, tmp_path / "elsewhere")
    successor = BackedUpStore(tmp_path / "elsewhere", backup)
    successor.write(new=1).upload()
    chain.write(zombie=1).upload().write(zombie=2).upload()
    successor.write(new=2).upload()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "new": 2}


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("times", [1, 2])
def test_next_incarnation_continues_the_chain_after_kill_between_increment_and_head(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Found by chaos: its number was left out, and the file that nobody finished stood in the chain."""
    chain.close()
    for n in range(times):
        restore(backup, tmp_path / f"incarnation {n}")
        dying = BackedUpStore(tmp_path / f"incarnation {n}", backup)
        dying.write(a=5 + n).upload().write(never=n)
        with monkeypatch.context() as patch:
            patch.setattr(backup, "put_head", killed)
            with pytest.raises(KeyboardInterrupt):
                dying.upload()
        dying.close()
        restore(backup, tmp_path / f"whole {n}")
        assert content(tmp_path / f"whole {n}") == {"a": 5 + n, "c": 3}
    restore(backup, tmp_path / "elsewhere")
    successor = BackedUpStore(tmp_path / "elsewhere", backup)
    successor.write(new=1).upload().write(new=2).upload()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4 + times, "c": 3, "new": 2}


def test_next_incarnation_continues_after_kill_during_base_upload(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.uploader._require_base()
    chain.write(never=1)
    with monkeypatch.context() as patch:
        patch.setattr(backup, "put_head", killed)
        with pytest.raises(KeyboardInterrupt):
            chain.upload()
    chain.close()
    restore(backup, tmp_path / "elsewhere")
    successor = BackedUpStore(tmp_path / "elsewhere", backup)
    successor.write(new=1).upload()
    successor.uploader._require_base()
    successor.write(new=2).upload().write(new=3).upload()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "new": 3}


def test_only_the_last_bases_and_their_increments_are_retained(tmp_path: Path, backup: ProcessBackup) -> None:
    uploaded = BackedUpStore(tmp_path / "db", backup, keep=2)
    for n in range(5):
        uploaded.write(a=n).upload().write(b=n).upload()
        uploaded.uploader._require_base()
    uploaded.close()
    pieces = segment_names(names(backup))
    assert sorted({p.number for p in pieces if p.kind == "base"}) == [7, 9]
    assert min(p.number for p in pieces) == 7
    assert names(backup, "head") == ["head.00000001"]


def test_large_base_is_split_into_chunks(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "CHUNK_BYTES", 200)
    uploaded = BackedUpStore(tmp_path / "db", backup)
    uploaded.write(**{f"k{n:03d}": n for n in range(100)}).upload()
    uploaded.close()
    assert len(names(backup, "base")) > 5
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {f"k{n:03d}": n for n in range(100)}


def test_full_upload_buffer_triggers_a_new_base(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.runtime.backup.uploader.BUFFER_BYTES_MAX", 100)
    chain.write(**{f"k{n}": n for n in range(20)})
    assert not chain.uploader._pairs
    chain.upload()
    assert [p.number for p in segment_names(names(backup, "base"))] == [1, 4]
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "db")


def test_upload_recovers_from_a_temporarily_failing_location(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = backup.location.put

    def fail(name: str, data: bytes) -> None:
        raise UserError("no space")

    safe = chain.write(d=1).safe
    monkeypatch.setattr(backup.location, "put", fail)
    with pytest.raises(UserError):
        chain.upload()
    assert chain.safe == safe
    chain.write(e=2)
    monkeypatch.setattr(backup.location, "put", put)
    chain.upload()
    assert chain.safe == chain.seq
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 4, "c": 3, "d": 1, "e": 2}


# -- where a process comes back --------------------------------------------------------------------


def manifest(location: Location) -> Manifest:
    return Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {}, backup=BackupPlan(location.url))


def test_missing_store_is_restored_and_an_older_one_is_set_aside(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
) -> None:
    head = backup.head()
    assert head is not None
    assert is_newest(tmp_path / "db", backup, head)
    chain.close()
    for directory in (tmp_path / "executor-2" / ME, tmp_path / "db"):
        storage = open_storage(directory, manifest(backup.location), ME)
        storage.store.close()
    assert content(tmp_path / "executor-2" / ME) == content(tmp_path / "db") == {"a": 4, "c": 3}
    assert (tmp_path / ".older" / "db").exists(), "it was of incarnation 1, and incarnation 2 began elsewhere"
    assert backup.last_incarnation() == 3


def test_store_truncated_by_power_loss_is_older_than_its_backup(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
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
def test_damaged_increment_is_named_and_the_last_complete_state_is_suggested(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, how: str
) -> None:
    change(backup, "increment.000000000003.00000001", how)
    target = tmp_path / "again"
    with pytest.raises(DamagedBackup, match=r"increment[. 0]*3") as refused:
        restore(backup, target)
    assert not target.exists()
    assert list(tmp_path.glob(".again*")) == []
    assert how != "version" or "format 9" in refused.value.what
    assert offered(refused.value) == f"the last complete state before it: --up-to '{ME}=2'"
    restore(backup, target, up_to=2)
    assert content(target) == {"a": 2, "b": 1, "c": 3}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_base_is_named_and_the_previous_base_is_suggested(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, how: str
) -> None:
    chain.uploader._require_base()
    chain.write(late=1).upload()
    change(backup, "base.000000000004.00000001.000000", how)
    with pytest.raises(DamagedBackup, match=r"base[. 0]*4") as refused:
        restore(backup, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert offered(refused.value) == f"the last complete state before it: --up-to '{ME}=3'"
    restore(backup, tmp_path / "again", up_to=3)
    assert content(tmp_path / "again") == {"a": 4, "c": 3}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_head_is_refused_and_the_last_complete_state_is_suggested(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, how: str
) -> None:
    change(backup, "head.00000001", how)
    with pytest.raises(DamagedBackup, match="holds no backup of" if how == "missing" else r"head\.0+1") as no:
        restore(backup, tmp_path / "again")
    assert offered(no.value) == f"the last complete state before it: --up-to '{ME}=3'"
    restore(backup, tmp_path / "again", up_to=3)
    assert content(tmp_path / "again") == {"a": 4, "c": 3}


def test_missing_increment_in_the_chain_is_detected(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
) -> None:
    change(backup, "increment.000000000002.00000001", "missing")
    with pytest.raises(DamagedBackup, match="increment 2 of count@cloud#1 is missing") as refused:
        restore(backup, tmp_path / "again")
    assert offered(refused.value) == f"the last complete state before it: --up-to '{ME}=1'"


def test_file_of_another_chain_is_detected(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore
) -> None:
    header = Header("increment", DEPLOYMENT, ME, 1, 2, 9, "0123456789abcdef", 0)
    backup.location.put(f"{backup.folder}/increment.000000000002.00000001", pack(header)[0])
    with pytest.raises(DamagedBackup, match="does not follow the file before it"):
        restore(backup, tmp_path / "again")


@pytest.mark.parametrize(("deployment", "process"), [("d2", ME), (DEPLOYMENT, "average@cloud#1")])
def test_a_backup_of_another_deployment_or_operator_is_refused(
    tmp_path: Path, backup: ProcessBackup, chain: BackedUpStore, deployment: str, process: str
) -> None:
    other = ProcessBackup(backup.location, deployment, process)
    for name in names(backup):
        data = backup.location.get(f"{backup.folder}/{name}")
        backup.location.put(f"{folder_of(process)}/{name}", data)
    with pytest.raises(DamagedBackup, match=f"is a backup of (the deployment {DEPLOYMENT}|{ME})"):
        restore(other, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_restore_without_a_backup_is_refused(tmp_path: Path, backup: ProcessBackup) -> None:
    with pytest.raises(DamagedBackup, match="holds no backup of count@cloud#1"):
        restore(backup, tmp_path / "again")


@pytest.mark.parametrize("url", ["nonsense://somewhere", "s3s://bucket"])
def test_location_with_an_unknown_scheme_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="backup location"):
        Location(url)


def test_unreadable_location_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory", encoding="ascii")
    backup = ProcessBackup(Location(str(tmp_path / "file")), DEPLOYMENT, ME)
    with pytest.raises(UserError, match=r"file/processes/.* cannot be (read|written)"):
        backup.claim(0)


def test_pack_and_unpack_are_inverse() -> None:
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
def test_needed_sections_contain_all_needed_pairs(
    values: dict[bytes, bytes | None], enough: int, between: tuple[bytes, bytes]
) -> None:
    lowest, highest = sorted(between)
    pairs = sorted(values.items(), key=lambda pair: pair[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SECTION_BYTES", enough)
        data, _ = pack(Header("increment", DEPLOYMENT, ME, 1, 1, 1, "", 5), pairs)
    assert unpack(data, "x")[1] == pairs
    seen = read_header(data)
    assert seen is not None
    assert len(seen.header.sections) <= pieces.SECTIONS_MAX
    read: list[Pair] = []
    for at, sections in needed_section_ranges(seen, lambda first, last: first <= highest and last >= lowest):
        part = data[at : at + sum(section.size for section in sections)]
        read += unpack_sections(part, sections, "x")
        with pytest.raises(DamagedBackup, match="a section has the checksum"):
            unpack_sections(part[:-1], sections, "x")
    wanted = [pair for pair in pairs if lowest <= pair[0] <= highest]
    assert [pair for pair in read if lowest <= pair[0] <= highest] == wanted
    assert set(read) <= set(pairs)


# -- one ahead ---------------------------------------------------------------------------------


def test_next_file_is_prefetched_while_this_one_is_used() -> None:
    fetched = threading.Event()

    def files() -> Iterator[int]:
        yield 1
        fetched.set()
        yield 2

    coming = prefetched(files())
    assert next(coming) == 1
    assert fetched.wait(10)
    assert list(coming) == [2]


def test_prefetch_raises_at_the_file_that_cannot_be_read() -> None:
    def files() -> Iterator[int]:
        yield 1
        raise DamagedBackup("the second one is torn")

    coming = prefetched(files())
    assert next(coming) == 1
    with pytest.raises(DamagedBackup, match="torn"):
        next(coming)


def test_prefetch_stops_when_its_reader_stops() -> None:
    taken = []
    coming = prefetched(n for n in range(1, 100) if taken.append(n) is None)  # type: ignore[func-returns-value]
    assert next(coming) == 1
    coming.close()  # type: ignore[attr-defined]
    assert len(taken) <= 2


def test_read_limit_is_shared_by_all_readers_of_a_location(tmp_path: Path) -> None:
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


def test_head_is_valid_even_if_the_location_reported_a_failed_write(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = BackedUpStore(tmp_path / "db", backup)
    chain.write(a=1).upload().write(a=2)
    whole = backup.location.put

    def too_late(name: str, data: bytes) -> None:
        whole(name, data)
        if "/head." in name:
            raise UserError("timed out")  # it got there all the same

    with monkeypatch.context() as patch:
        patch.setattr(backup.location, "put", too_late)
        with pytest.raises(UserError):
            chain.upload()
    restore(backup, tmp_path / "between")
    chain.write(b=3)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backup, "put_head", killed)
        with pytest.raises(KeyboardInterrupt):
            chain.upload()
    chain.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again")["a"] == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_fenced_process_that_uploads_bases_deletes_no_file_of_its_successor(
    tmp_path: Path, backup: ProcessBackup, keep: int
) -> None:
    zombie = BackedUpStore(tmp_path / "db", backup, keep=keep)
    zombie.write(a=1).upload()
    restore(backup, tmp_path / "elsewhere")
    successor = BackedUpStore(tmp_path / "elsewhere", backup, keep=keep)
    successor.write(new=1).upload()
    for n in range(keep):
        zombie.uploader._require_base()
        zombie.write(zombie=n).upload()
    successor.write(new=2).upload()
    zombie.close()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 1, "new": 2}


def test_every_listed_past_state_can_be_restored(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {})
    write_manifest(backup.location, manifest)
    chain = BackedUpStore(tmp_path / "db", backup)
    chain.write(a=1).upload().write(a=2).upload()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    chain.uploader._require_base()
    chain.write(a=3)
    with monkeypatch.context() as patch:
        patch.setattr(backup, "put_head", killed)
        with pytest.raises(KeyboardInterrupt):
            chain.upload()
    chain.close()
    for state in history(backup.location.url, ME):
        restore(backup, tmp_path / f"as of {state.number}", state.number)
    numbers = numbers_as_of(backup.location, manifest, "count", "latest")
    with processes_as_of(backup.location, DEPLOYMENT, numbers) as processes:
        assert content(processes / ME)["a"] >= 2


def test_upload_counts_even_if_old_files_cannot_be_deleted(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(names: Any) -> None:
        if list(names):
            raise UserError("AccessDenied: s3:DeleteObject")

    monkeypatch.setattr(backup.location, "delete", refuse)
    chain = BackedUpStore(tmp_path / "db", backup, keep=1)
    chain.write(a=1).upload()
    chain.uploader._require_base()
    chain.write(a=2)
    with contextlib.suppress(UserError):
        chain.upload()
    with contextlib.suppress(UserError):
        chain.upload()
    chain.close()
    assert chain.safe == chain.seq
    assert len(names(backup, "base")) == 2, "all of it is uploaded again and again"


def test_process_ends_although_its_backup_location_does_not_answer(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.runtime.backup.uploader.CLOSE_S_MAX", 0.5)
    chain = BackedUpStore(tmp_path / "db", backup)
    chain.write(a=1).upload().write(a=2)
    answers, whole = threading.Event(), backup.location.put

    def put(name: str, data: bytes) -> None:
        answers.wait(30)
        whole(name, data)

    monkeypatch.setattr(backup.location, "put", put)
    chain.uploader.start(lambda seq: None)
    closing = threading.Thread(target=chain.uploader.close, daemon=True)
    closing.start()
    closing.join(5)
    hangs = closing.is_alive()
    answers.set()
    closing.join(5)
    chain.uploader._thread.join(5)
    chain.close()
    assert not hangs
