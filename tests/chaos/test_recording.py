"""The recording survives the death of the program."""

from __future__ import annotations

from pathlib import Path

from tiercel.chaos.recording import Inputs, Outputs
from tiercel.chaos.workload import frames


def test_recorded_chunk_is_read_back_by_the_next_incarnation(tmp_path: Path) -> None:
    chunk = frames(3, 1, 4)
    assert Inputs(tmp_path, "p").chunk(4) is None
    Inputs(tmp_path, "p").add(4, chunk)
    assert Inputs(tmp_path, "p").chunk(4) == chunk
    assert Inputs(tmp_path, "q").chunk(4) is None


def test_restarted_recorder_continues_after_the_last_file_and_ignores_a_draft(
    tmp_path: Path,
) -> None:
    outputs = Outputs(tmp_path)
    outputs.add([])
    outputs.add([(1, 0, 5, 0, 1, 9), (1, 1, 6, 0, 1, 9), (2, 0, 5, 1, 2, 8)])
    outputs.add([(7, 0, 5, 2, 3, 7)])
    (tmp_path / "_000000000008-000000000009.parquet").write_bytes(b"half")
    again = Outputs(tmp_path)
    assert (again.last, again.rows) == (outputs.last, outputs.rows) == (7, 4)
