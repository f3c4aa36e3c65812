"""The settings of the core: every limit and interval, with its reason. Machines get them as an argument."""

from __future__ import annotations

import msgspec

from tiercel.core.errors import InvalidRequest


class Settings(msgspec.Struct, frozen=True):
    """Intervals in ms; limits end in `_max`."""

    retry_ms: float = 200.0  # interval after which a control message without an answer is repeated
    tick_ms: float = 100.0  # log-time ticks, only while a key has processing-time timers
    checkpoint_ms: float = 1000.0  # recovery replays at most about this much
    tidy_ms: float = 200.0  # delay of the checkpoint that follows the last arrival or departure of keys
    move_deadline_ms: float = 30_000.0  # a move that is not decided by then is undone
    source_silence_ms: float = 2_000.0  # a source silent this long after the flip is cut off by its router
    suspect_ms: float = 10_000.0  # a process that sends nothing for this long is restarted
    site_idle_ms: float = 0.0  # event time does not wait for a site that is cut off this long; 0: it waits
    compare_wait_ms: float = 1_000.0  # after this long an overloaded source flips without its digests

    dispatch_rows_max: int = 20_000  # rows dispatched to one instance and not processed
    dispatch_ms_max: float = 50.0  # the same in time, by the measured service time of a row
    slice_ms: float = 2.0  # user code in one step of an instance; then control messages have their turn
    read_entries_max: int = 256  # entries per read of the log when a reader catches up
    tail_rows_max: int = 100_000  # rows of one inbox in memory for readers that lag
    backlog_rows_max: int = 1_000_000  # unprocessed rows of one inbox; producers wait beyond it
    site_frames_max: int = 1_024  # frames of one outbox sent and not acknowledged
    outbox_frames_max: int = 100_000  # frames of one outbox kept; producers wait beyond it
    held_rows_max: int = 100_000  # rows of one inbox held before append; those beyond it are sent again later
    numbered_keys_max: int = 100_000  # keys of one inbox whose rows to other sites are numbered; see R1
    shadow_entries_max: int = 100_000  # entries of a move's shadow; beyond it the move is undone
    withheld_max: int = 100_000  # withheld outputs of a destination; beyond it the keys wait
    stream_tail_max: int = 4_096  # entries of an output log kept in memory; older ones are read
    stream_entries_max: int = 1_000_000  # entries of an output log kept at all
    subscription_entries_max: int = 1_000_000  # more for named subscriptions; 0: none are kept for them
    publish_entries_max: int = 1_024  # entries sent to a subscriber that it has not consumed
    capture_pause_ms: float = 2.0  # pause between two steps of long work: most of a core stays free
    chunk_keys_max: int = 64  # keys captured in one step, so that other keys do not wait long
    chunk_bytes_max: int = 256 * 1024
    slice_keys: int = 32  # keys of a checkpoint written in one step, for the same reason
    trim_entries_max: int = 128  # entries of a log deleted in one step
    flip_keys_max: int = 64  # keys of a live move that flip together; the controller splits a larger move
    moves_at_once_max: int = 1  # moves out of one instance that run in parallel
    chunks_unacked_max: int = 16  # unacknowledged chunks of a move; limits the load on the destination
    memory_bytes_max: int = 0  # of an instance's decoded state; beyond it keys are evicted; 0: no limit

    def validate(self) -> Settings:
        """Refuse values that cannot work; the message names the setting and its bounds."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name == "memory_bytes_max":
                fits, expected = number and 0 <= value <= 1e15, "0 for no limit, or bytes, at most 1e15"
            elif name == "subscription_entries_max":
                fits, expected = number and 0 <= value <= 1e9, "0 to keep nothing, or at most 1e9"
            elif name == "site_idle_ms":
                fits, expected = number and 0 <= value <= 1e9, "0 to wait for ever, or at most 1e9"
            else:
                fits, expected = number and 0 < value <= 1e9, "a number above 0 and at most 1e9"
            if not fits:
                raise InvalidRequest(
                    f"setting {name} = {value!r}", f"expected {expected}", "see tiercel.core.settings"
                )
        return self
