"""The recording of a run: inputs and outputs as parquet files, which stay whole when the program is killed.

Responsible for: inputs, recorded before they are sent; outputs, each once, with their place in the stream.
Not responsible for: sending and reading (application.py), comparing the two (verdict.py).

A file appears under its name at once and complete, and its name states its content. A restarted program
continues exactly where its files end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tiercel.chaos.workload import CHUNK_FRAMES, FRAME_ROWS, Transfer

_INPUT = pa.schema([(name, pa.int64()) for name in ("account", "n", "amount")])
_OUTPUT = pa.schema([(name, pa.int64()) for name in ("position", "place", "account", "n", "count", "chain")])

Output = tuple[int, int, int, int, int, int]  # offset of its entry, place in it, and the row


def _write(path: Path, schema: pa.Schema, rows: Sequence[tuple[int, ...]]) -> None:
    columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
    draft = path.with_name(f"_{path.name}")  # Spark ignores names with this prefix
    pq.write_table(pa.table(columns, schema), draft)
    draft.rename(path)


class Inputs:
    """The frames of one producer. A chunk is recorded before its first frame is sent."""

    def __init__(self, directory: Path, producer: str) -> None:
        self._directory, self._producer = directory, producer
        directory.mkdir(parents=True, exist_ok=True)

    def chunk(self, number: int) -> list[list[Transfer]] | None:
        """The frames of a chunk if it is recorded; an earlier incarnation may have sent some of them."""
        path = self._path(number)
        if not path.exists():
            return None
        columns = (column.to_pylist() for column in pq.read_table(path, schema=_INPUT).columns)
        rows = list(zip(*columns, strict=True))
        return [rows[begin : begin + FRAME_ROWS] for begin in range(0, len(rows), FRAME_ROWS)]

    def add(self, number: int, frames: Sequence[Sequence[Transfer]]) -> None:
        assert len(frames) == CHUNK_FRAMES
        _write(self._path(number), _INPUT, [row for frame in frames for row in frame])

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._producer}-{number:06}.parquet"


class Outputs:
    """Everything that a reader was given, in files named after the entries in them: `first-last`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        files = [path for path in directory.glob("*.parquet") if not path.name.startswith("_")]
        self.rows = sum(pq.read_metadata(path).num_rows for path in files)
        self.last = max((int(path.stem.partition("-")[2]) for path in files), default=0)

    def add(self, rows: Sequence[Output]) -> None:
        """Whole entries, in their order, behind those that were added before."""
        if rows:
            first, last = rows[0][0], rows[-1][0]
            assert first > self.last
            _write(self._directory / f"{first:012}-{last:012}.parquet", _OUTPUT, rows)
            self.rows, self.last = self.rows + len(rows), last
