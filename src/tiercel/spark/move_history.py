"""The history of moves: one line of JSON for each move that has ended, in the deployment's directory.

Responsible for: the report of a move, writing it when the move ends, reading it back under any later driver.
Not responsible for: running moves (control/controller.py), their latency (bench/).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tiercel.control.predict import Prediction

log = logging.getLogger(__name__)

FILE_BYTES_MAX = 2 * 1024 * 1024  # some thousands of moves; twice that is kept
ENDINGS = ("undone", "queued", "asked", "done")  # of several parts: the first that one of them has


class MoveReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one move went. Times are in ms after the request, as the driver saw them.

    A large move is split into parts (m7.1, m7.2, ...), so that its keys do not wait for each other. The
    report covers all parts: a phase is reached when the last part has reached it.
    """

    move: str
    operator: str
    source: str
    destination: str
    strategy: str
    state: str  # queued | asked | done | undone
    reason: str
    keys: int
    bytes_moved: int
    phases: dict[str, float]
    parts: int = 1
    messages: int = 0  # of the source's router, chunks and their receipts
    overlap: float = 1.0  # for how much of the transfer a unit of state was processed, on average
    prediction: Prediction | None = None  # of `strategy="auto"`, and of explained moves
    requested_at: float = 0.0  # seconds since 1970

    @property
    def duration_ms(self) -> float:
        return max(self.phases.values(), default=0.0)

    def __str__(self) -> str:
        ended = f"{self.state} after {self.duration_ms:.1f} ms"
        what = f"{self.keys} keys, {self.bytes_moved:,} bytes"
        if self.messages:
            what += f", {self.messages} messages, overlap {self.overlap:.0%}"
        if self.prediction is not None:
            expected = self.prediction
            what += f" (predicted: {expected.duration_ms:.1f} ms, {expected.size_bytes:,} bytes)"
        way = f"{self.source} -> {self.destination} ({self.strategy})"
        return f"{self.move}: {way} {ended}, {what} {self.reason}".rstrip()


def merged(parts: list[MoveReport]) -> MoveReport:
    """One report for the parts of a move."""
    worst = min(parts, key=lambda part: ENDINGS.index(part.state))
    phases: dict[str, float] = {}
    for part in parts:
        for phase, at_ms in part.phases.items():
            phases[phase] = max(phases.get(phase, 0.0), at_ms)
    keys = sum(part.keys for part in parts)
    whole = len(parts) == 1 or bool(worst.reason)
    return msgspec.structs.replace(
        worst,
        move=worst.move if whole else worst.move.partition(".")[0],
        keys=keys,
        bytes_moved=sum(part.bytes_moved for part in parts),
        phases=dict(sorted(phases.items(), key=lambda item: item[1])),
        parts=len(parts),
        messages=sum(part.messages for part in parts),
        overlap=round(sum(p.overlap * max(1, p.keys) for p in parts) / sum(max(1, p.keys) for p in parts), 4),
        requested_at=min(part.requested_at for part in parts),
    )


class MoveHistory:
    """The lines of one deployment. One driver writes; anyone reads."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "moves.jsonl"
        self._older = directory / "moves.1.jsonl"

    def add(self, report: MoveReport) -> None:
        """Write one part's report. A full disk costs a line of the history, and never a move."""
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_size > FILE_BYTES_MAX:
                    self._path.replace(self._older)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(report) + b"\n")
        except OSError as error:
            log.warning("move %s is not in the history: %s", report.move, error)

    def parts(self) -> Iterable[MoveReport]:
        """Every line, oldest first; a line that a crash cut off is left out."""
        for path in (self._older, self._path):
            try:
                lines = path.read_bytes().splitlines()
            except FileNotFoundError:
                continue
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=MoveReport)

    def reports(self) -> list[MoveReport]:
        """One report for each move and source, oldest first."""
        found: dict[tuple[str, str], list[MoveReport]] = {}
        for part in self.parts():
            found.setdefault((part.move.partition(".")[0], part.source), []).append(part)
        return [merged(parts) for parts in found.values()]
