"""What was written is found again, in order, and batches are all or nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from small import FullDisk
from tiercel.core.effects import Write
from tiercel.core.records import Entry, KeyImage, Route, Tick
from tiercel.runtime.store import Store
from tiercel.runtime.tables import decode_key, encode_key

ELEMENTS = {
    "int": st.integers(-(1 << 62), 1 << 62),
    "str": st.text("\x00a\xff€", max_size=4),
    "bytes": st.binary(max_size=4),
}


@st.composite
def keys_of_one_shape(draw: st.DrawFn) -> list[tuple[object, ...]]:
    shape = draw(st.lists(st.sampled_from(sorted(ELEMENTS)), min_size=1, max_size=3))
    return draw(st.lists(st.tuples(*(ELEMENTS[kind] for kind in shape)), max_size=6))


@given(keys_of_one_shape())
def test_keys_come_back_and_keep_their_order(keys: list[tuple[object, ...]]) -> None:
    assert [decode_key(encode_key(key)) for key in keys] == keys
    for a, b in itertools.pairwise(sorted(keys, key=encode_key)):
        assert [str(x).encode() if isinstance(x, str) else x for x in a] <= [  # text orders by its bytes
            str(x).encode() if isinstance(x, str) else x for x in b
        ]


@pytest.mark.parametrize("others", [{}, {("stream_head", "s"): 4}], ids=["last", "in between"])
def test_where_no_key_has_timers_only_names_are_read(
    tmp_path: Path, others: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {**others, ("head", "avg"): (3, 4, -1)}
    states = {("state", n % 3, b"k%d" % n, 1): KeyImage(b"k", 1, 5, {"v": ["value", [n]]}) for n in range(9)}
    store = Store(tmp_path / "s", "os")
    store.add(Write(1, {**others, **states}))
    store.commit()
    every = store.items(values=False)
    assert every.keys() == {*others, *states}
    monkeypatch.setattr("tiercel.runtime.store.timers_in", None)
    assert store.items(values=False, timers=False) == every
    store.close()


def test_a_new_life_finds_what_the_last_one_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", "os")
    assert store.life == 1
    image = KeyImage(b"\x00k", 1, 5, {"v": ["value", [1, 2.0]]}, (3,))
    store.add(Write(1, {("head", "avg"): (3, 4, -1), ("state", 9, b"\x00k", 1): image, ("trimmed", "x"): 1}))
    store.add(Write(2, {("route", "avg", 7): Route("avg@a#1", 2)}, (("trimmed", "x"),)))
    assert store.commit() == 2
    store.close()
    store = Store(tmp_path / "s", "os")
    assert store.life == 2
    assert store.items() == {
        ("head", "avg"): (3, 4, -1),
        ("state", 9, b"\x00k", 1): image,
        ("route", "avg", 7): Route("avg@a#1", 2),
    }
    store.close()


@pytest.mark.parametrize(
    ("after", "limit", "expected"), [(0, 10, [1, 2, 300]), (1, 1, [2]), (2, 9, [300]), (300, 9, [])]
)
def test_a_log_is_read_in_order_from_anywhere(
    tmp_path: Path, after: int, limit: int, expected: list[int]
) -> None:
    store = Store(tmp_path / "s", "disk")
    entries = {
        1: Entry(1, 5, {"avg@a#1": [(b"k", 1, [2])]}),
        2: Entry(2, 5, {}, Tick()),
        300: Entry(300, 6, {}),
    }
    store.add(
        Write(1, {("inbox", "avg", o): e for o, e in entries.items()} | {("inbox", "avg2", 1): entries[1]})
    )
    assert store.read_log("avg", after, limit) == [entries[o] for o in expected]
    store.sync()
    store.close()


def test_a_batch_that_could_not_be_written_is_gone_for_the_backup_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", "os")
    taken: list[int] = []
    store.hand_over_to(lambda batch, seq, pairs: taken.append(seq))
    store.add(Write(1, {("count", "a"): 1}))
    store.commit()
    store._db = cast("Any", FullDisk(store._db))
    store.add(Write(2, {("count", "a"): 2}))
    with pytest.raises(OSError, match="No space left"):
        store.commit()
    store.close()  # says nothing more: the first failure is the one to be told
    store = Store(tmp_path / "s", "os")
    assert (store.items(), taken) == ({("count", "a"): 1}, [1])
    store.close()


def test_behind_a_batch_that_could_not_be_written_nothing_is_though_there_is_room_again(
    tmp_path: Path,
) -> None:
    """Found by chaos: a pause came back after its end, because the batch that ended it was missing."""
    store = Store(tmp_path / "s", "os")
    store.add(Write(1, {("count", "a"): 1, ("count", "b"): 1}))
    store.commit()
    database = store._db
    store._db = cast("Any", FullDisk(database))
    store.add(Write(2, {}, (("count", "a"),)))
    with pytest.raises(OSError, match="No space left"):
        store.commit()
    store._db = database
    store.add(Write(3, {("count", "b"): 3}))
    for attempt in (store.commit, lambda: store.read_log("in", 0, 1), store.close):
        with pytest.raises(OSError, match="No space left"):
            attempt()
    store = Store(tmp_path / "s", "os")
    assert store.items() == {("count", "a"): 1, ("count", "b"): 1}
    store.close()


TIDIED_UP = """
import sys, time
from pathlib import Path
from tiercel.core.effects import Write
from tiercel.runtime.store import Store
store = Store(Path(sys.argv[1]), "os", memory_bytes_max=1)  # with the smallest buffers
value = b"x" * 1_000_000
for seq in range(1, 60):
    store.add(Write(seq, {("trimmed", str(seq % 7)): seq, ("state", seq, b"k"): value}))
    store.commit()
for _ in range(200):  # it takes its place when it begins with its first work
    stats = [(task / "stat").read_text() for task in Path("/proc/self/task").iterdir()]
    parts = [stat.partition("(")[2].rpartition(")") for stat in stats]
    names = [name + " " + rest.split()[16] for name, _, rest in parts]
    if "rocksdb:low 0" not in names:
        break
    time.sleep(0.1)
print(*names, sep="\\n")
store.close()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_the_thread_that_tidies_up_gives_way_to_those_that_work(tmp_path: Path) -> None:
    """In a process of its own: the threads are those of all stores of a process."""
    done = subprocess.run(
        [sys.executable, "-c", TIDIED_UP, str(tmp_path / "s")], capture_output=True, text=True, check=True
    )
    assert {"rocksdb:low 19", "rocksdb:high 0"} <= set(done.stdout.splitlines())
