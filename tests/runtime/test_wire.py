"""Every message survives the wire, and what is no frame is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tiercel.core import messages as m
from tiercel.core.records import (
    Abort,
    Adopt,
    Begin,
    Compare,
    Control,
    Done,
    Entry,
    Flip,
    KeyImage,
    KeySet,
    Output,
    Route,
    StreamEntry,
    TableUpdate,
    Tick,
    Watermark,
)
from tiercel.runtime.wire import (
    FRAME_BYTES_MAX,
    MESSAGES,
    Frames,
    MalformedFrame,
    encode_frame,
    merged,
    pack,
)

KEYS = KeySet(keys=frozenset({b"\x00\xff", b"k"}))
SLOTS = KeySet(slots=frozenset({0, 4095}))
UPDATE = TableUpdate({7: Route("avg@a#1", 3)}, {b"\x80k": Route("avg@b#1", 4)})
ROW = (b"\x80k", 12, [1, 2.5, "x", None, b"raw"])
STAMPED = (b"\x80k", 12, ["x"], "a", 5, 2)
OUTPUT = Output(9, b"\x80k", 2, 0, ROW)
ADOPT = Adopt("mv", KEYS, "avg@a#1", "live", UPDATE, 5, -1)
PREPARE = m.Prepare("mv", "avg", SLOTS, "avg@a#1", "avg@b#1", "live", UPDATE)
CONTROLS: list[Control] = [
    Tick(),
    Watermark(4),
    Begin("mv"),
    Compare("mv"),
    Abort("mv", "why"),
    Flip("mv"),
    ADOPT,
    Done("mv"),
]
IMAGE = KeyImage(
    b"\x80k",
    2,
    9,
    {"v": ["value", [1, 2.0]], "l": ["list", [[1], [2]]], "m": ["map", [[[1], [2]]]]},
    (5, 6),
    1,
    2,
)
NOTICES: list[m.AnyNotice] = [
    m.ShadowNotice("mv", 3, 4, [ROW], Tick()),
    m.ShadowNotice("mv", 3, 4, [ROW], None),
    m.FlippedNotice("mv", 5, 6, -1, UPDATE, {b"\x80k": {"a": 3}}, PREPARE),
    m.AbortedNotice("mv"),
    m.EmitFromNotice("mv", 4),
    m.EmittedNotice("mv", 4),
    m.ResumeNotice("mv"),
    m.DoneNotice("mv"),
]
REQUEST = m.MoveRequest("mv", "avg", KEYS, "avg@a#1", "avg@b#1", "live", 30_000.0)

SAMPLES: list[m.Message] = [
    m.Hello("p"),
    m.ProducerMark("p", 3),
    m.Produce("p", 1, "s", [ROW], 5, True),
    m.Produce("p", 1, "s", []),
    m.ProduceMobile("car", 1, "s", [(b"k", 1, [2], 3)]),
    m.MobileReceipt("car", [1, 2]),
    m.Subscribe("s", 0),
    m.Publish("s", [StreamEntry(1, [OUTPUT])]),
    m.Attach("avg@a#1", 2),
    m.AttachReply(
        1,
        2,
        3,
        [(1, 0), (2, 9)],
        [m.ArrivalRole("mv", KEYS, "avg@a#1", "live", UPDATE, ADOPT, 4, None)],
        [m.DepartureRole("mv", SLOTS, "avg@b#1", "live", 1, 2, None)],
    ),
    m.Resume("avg@a#1", 2, 8, {"mv": (0, 4)}, -1),
    *[m.Dispatch([Entry(1, 2, {}, control)]) for control in CONTROLS],
    m.Dispatch([Entry(1, 2, {"avg@a#1": [ROW, ROW], "mv|avg@a#1": [STAMPED]})]),
    m.Confirmed(3, 9),
    m.Outputs("avg@a#1", 2, 3, 9, [OUTPUT], [OUTPUT], -1, True),
    m.MoveOutputs("avg@a#1", 2, "mv", 1, [OUTPUT], []),
    m.Checkpointed("avg@a#1", 2, 8, {"mv": (1, 5)}),
    PREPARE,
    *[m.LaneFrame("avg", n, [STAMPED], notice) for n, notice in enumerate(NOTICES)],
    m.LaneFrame("out", 1, [], None, [OUTPUT]),
    m.LaneReceipt("avg", [1], [1, 2]),
    m.Moved("avg", UPDATE),
    m.WatermarkReport("avg", 5),
    m.Retirement("avg@a#1"),
    REQUEST,
    m.MoveStatus("mv", "flipped", "because"),
    m.StatusQuery(),
    m.StatusReply([REQUEST], [m.MoveStatus("mv", "done")], {"avg": UPDATE}, ["avg@a#1"]),
    m.Prepared("mv", -1),
    m.Refused("mv", "no"),
    m.Capture("mv", KEYS, "avg@b#1"),
    m.CaptureFrom("mv", 4),
    m.Captured("mv"),
    m.Chunk("mv", 0, [IMAGE, KeyImage(b"gone", 0, 3, None)]),
    m.EndOfKeys("mv", 1),
    m.ChunkReceipt("mv", 1),
    m.Fetch("mv"),
    m.Digests("mv", {b"\x80k": (1 << 64) - 1}),
    m.Ready("mv", 2, {b"\x80k": 5}),
    m.Installed("mv"),
    m.FlipNotice("mv", 1, 2),
    m.Cut("mv", 2),
    m.EmitFrom("mv", 2),
    m.EmittedThrough("mv", 2),
    m.Settled("mv"),
    m.AbortNotice("mv"),
    m.Forget("mv"),
    m.Forgotten("mv"),
    m.Halt("mv"),
    m.Shadow("mv", [m.ShadowNotice("mv", 3, 4, [ROW], None)]),
]


def through_the_wire(*messages: m.Message, cut: int = 1 << 20) -> list[m.Message]:
    data = b"".join(encode_frame(message) for message in messages)
    frames = Frames(FRAME_BYTES_MAX)
    found = []
    for begin in range(0, len(data), cut):
        frames.feed(data[begin : begin + cut])
        found += frames.messages()
    return found


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(sample) for sample in SAMPLES} == set(MESSAGES)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda s: type(s).__name__)
def test_a_message_comes_out_as_it_went_in(message: m.Message) -> None:
    assert through_the_wire(message) == [message]


def test_frames_may_be_torn_and_glued_anywhere() -> None:
    assert through_the_wire(*SAMPLES, cut=3) == SAMPLES


def test_a_tuple_inside_a_payload_becomes_a_list_and_nothing_else_changes() -> None:
    (came,) = through_the_wire(m.Produce("p", 1, "s", [(b"k", 1, (1, (2, 3)))]))
    assert isinstance(came, m.Produce)
    assert came.rows == [(b"k", 1, [1, [2, 3]])]


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Nope", encode_frame(m.Hello("p"))[4:-1]]
)
def test_what_is_no_message_is_refused_by_name(body: bytes) -> None:
    frames = Frames(FRAME_BYTES_MAX)
    frames.feed(pack(body))
    with pytest.raises(MalformedFrame, match="are no message"):
        frames.messages()


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    frames = Frames(512)
    frames.feed((513).to_bytes(4))
    with pytest.raises(MalformedFrame, match="513 bytes was announced; the limit here is 512"):
        frames.next()


@pytest.mark.parametrize(
    ("earlier", "later", "both"),
    [
        (
            m.Dispatch([Entry(1, 1, {})]),
            m.Dispatch([Entry(2, 1, {})]),
            m.Dispatch([Entry(1, 1, {}), Entry(2, 1, {})]),
        ),
        (m.Publish("s", []), m.Publish("t", []), None),
        (m.Confirmed(1, 5), m.Confirmed(2, 4), m.Confirmed(2, 5)),
        (m.ProducerMark("p", 1), m.ProducerMark("p", 2), m.ProducerMark("p", 2)),
        (m.ProducerMark("p", 1), m.ProducerMark("q", 2), None),
        (m.Dispatch([]), m.Confirmed(1, 1), None),
    ],
)
def test_two_messages_leave_as_one_only_if_that_means_the_same(earlier: Any, later: Any, both: Any) -> None:
    assert merged(earlier, later) == both
