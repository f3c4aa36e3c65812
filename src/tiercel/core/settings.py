"""Every limit and interval of the core, with its reason. One object, passed in, never global."""

from __future__ import annotations

import msgspec

from tiercel.core.faults import InvalidRequest


class Settings(msgspec.Struct, frozen=True):
    """Intervals in ms, limits as `…_max`."""

    retry_ms: float = 200.0  # a control message that was not answered is sent again
    tick_ms: float = 100.0  # log-time ticks, only while someone has processing-time timers
    checkpoint_ms: float = 1000.0  # recovery replays at most about this much
    tidy_ms: float = 200.0  # so long after the last key that came or left, a checkpoint lets go of its move
    move_deadline_ms: float = 30_000.0  # a move that is not decided by then is undone
    takeover_ms: float = 2_000.0  # a source silent this long after the flip loses its last word
    suspect_ms: float = 10_000.0  # a process without any sign of life for so long is started again
    compare_wait_ms: float = 1_000.0  # an overloaded source may owe its digest; do not wait for ever

    dispatch_rows_max: int = 20_000  # rows on their way to one instance, unprocessed
    read_entries_max: int = 256  # entries per read of the log when a reader catches up
    tail_rows_max: int = 100_000  # rows of one inbox in memory for readers that are behind
    backlog_rows_max: int = 1_000_000  # rows of one inbox not processed; producers wait beyond it
    lane_frames_max: int = 1_024  # frames of one lane sent and not acknowledged
    outbox_frames_max: int = 100_000  # frames of one lane kept; producers wait beyond it
    held_rows_max: int = 100_000  # rows held before append; beyond it the lanes that bring them wait
    shadow_entries_max: int = 100_000  # entries of a move's shadow lane; beyond it the move is undone
    suppressed_max: int = 100_000  # outputs a destination keeps before it may emit; beyond it K waits
    stream_tail_max: int = 4_096  # entries of an output log kept in memory; older ones are read
    stream_entries_max: int = 1_000_000  # entries of an output log kept at all
    publish_entries_max: int = 1_024  # entries a subscriber was sent and has not consumed
    capture_pause_ms: float = 2.0  # between two steps of long work: most of a core stays free
    chunk_keys_max: int = 64  # keys captured in one step, so that other keys are not held up
    chunk_bytes_max: int = 256 * 1024
    slice_keys: int = 32  # keys of a checkpoint written in one step, for the same reason
    trim_entries_max: int = 128  # entries of a log deleted in one step
    piece_keys: int = 64  # keys of a live move that flip at once; a larger one is cut into pieces
    moves_at_once_max: int = 1  # moves out of one instance that run side by side
    chunks_unacked_max: int = 16  # keeps the destination from being flooded
    memory_bytes_max: int = 0  # of an instance's decoded state; beyond it keys are read back; 0: no limit

    mutant: str = ""  # name of a planted bug (mutants.py); empty: the real code

    def validate(self) -> Settings:
        """Refuse values that could never work; the message names the setting and the bound."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "mutant" and isinstance(value, str):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name == "memory_bytes_max":
                fits, expected = number and 0 <= value <= 1e15, "0 for no limit, or bytes, at most 1e15"
            else:
                fits, expected = number and 0 < value <= 1e9, "a number above 0 and at most 1e9"
            if not fits:
                raise InvalidRequest(
                    f"setting {name} = {value!r}", f"expected {expected}", "see tiercel.core.settings"
                )
        return self
