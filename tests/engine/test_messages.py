"""Every message survives the pipe, however the pipe cuts it."""

from __future__ import annotations

import itertools
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import (
    Abort,
    Command,
    EngineEvent,
    Failed,
    Finished,
    FrameReader,
    KVReady,
    KVRole,
    LayersDone,
    Load,
    Ping,
    Pong,
    PrefixFound,
    Progress,
    Ready,
    Rejected,
    Release,
    Reserved,
    Shutdown,
    Step,
    Submit,
    TokenOut,
    decode,
    encode,
)
from pdserve.core.logprobs import TokenLogprobs

MESSAGES: list[Command | EngineEvent] = [
    Submit("r1", KVRole.RECEIVE, [1, 2, 3], 16, 0.7, 40, 0.95, 2**63 - 1, [5, 6], True, salt="tenant ü"),
    Submit("r2", KVRole.LOCAL, [0], 1, 0.0, 0, 1.0, 0, [], False),
    Submit("ü/3", KVRole.PUSH, list(range(2000)), 1, 0.0, 0, 1.0, 7, [], False),
    Submit("r4", KVRole.LOCAL, [1, 2], 1, 0.5, 0, 1.0, 0, [], False, 0.1, 1.5, -0.5, 2.0, {7: -100.0, 9: 0.5}, 0, 1),
    KVReady("r1", 42),
    Release("r1"),
    Abort("r1"),
    Ping(),
    Pong(),
    Shutdown(),
    Ready(
        {"model_hash": "x", "num_layers": 2},
        128,
        {"kind": "shm", "name": "/p"},
        4096,
        32000,
        "cpu",
        [0, 1],
        1.25,
        [2, 7],
    ),
    Failed("ModelError", "no such folder"),
    Reserved("r1", [3, 1, 2], 1),
    PrefixFound("r1", 128, [7, 2]),
    Rejected("r1", "CapacityExceeded", "too long"),
    Finished("r1", "stop"),
    Step(2.5, 2.25),
    Step(
        2.5,
        2.25,
        [
            TokenOut("r1", 7, "", 2.0),
            TokenOut("r1", 9, "", 2.0, TokenLogprobs(-1.5)),
            TokenOut("r2", 8, "stop", 1.0, TokenLogprobs(-0.25, ((8, -0.25), (3, -2.0)))),
        ],
        [Progress("r3", 64, [0, 1]), Progress("r4", 1, [9])],
    ),
    LayersDone(4, [Progress("r3", 64, [0, 1]), Progress("r4", 1, [9])]),
    LayersDone(8, []),
    Load(10, 2, 3, 1, 2**40, 2**39, 5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Command | EngineEvent) -> None:
    frame = encode(message)
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    again = decode(frame[4:])
    assert type(again) is type(message)
    assert again == message


def test_every_message_is_tried_here() -> None:
    assert {type(m) for m in MESSAGES} == {*get_args(Command), *get_args(EngineEvent)}


def test_nested_and_enum_fields_come_back_as_their_types() -> None:
    step = decode(encode(next(m for m in MESSAGES if isinstance(m, Step) and m.tokens))[4:])
    assert isinstance(step, Step)
    assert isinstance(step.tokens[0], TokenOut)
    assert isinstance(step.progress[0], Progress)
    submit = decode(encode(MESSAGES[0])[4:])
    assert isinstance(submit, Submit)
    assert submit.kv_role is KVRole.RECEIVE


def test_a_token_without_logprobs_spends_nothing_on_them() -> None:
    frame = encode(Step(2.5, 2.25, [TokenOut("r1", 7, "", 2.0)]))
    assert msgpack.unpackb(frame[4:])[3] == [["r1", 7, "", 2.0]]


@pytest.mark.parametrize("name", ["TokenOut", "Progress", "object", ""])
def test_unknown_messages_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown engine message"):
        decode(bytes(msgpack.packb([name])))


def test_an_unknown_kv_role_is_refused() -> None:
    frame = msgpack.packb(["Submit", "r", "sideways", [1], 1, 0.0, 0, 1.0, 0, [], False])
    with pytest.raises(ValueError, match="sideways"):
        decode(bytes(frame))


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_the_reader_does_not_care_how_the_stream_is_cut(messages: list[Command | EngineEvent], cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in messages)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = FrameReader()
    got: list[Command | EngineEvent] = []
    for start, end in itertools.pairwise(places):
        got += reader.feed(stream[start:end])
    assert got == messages


def test_the_reader_byte_by_byte_gives_each_message_as_soon_as_it_is_complete() -> None:
    reader = FrameReader()
    for message in MESSAGES:
        frame = encode(message)
        for byte in frame[:-1]:
            assert reader.feed(bytes([byte])) == []
        assert reader.feed(frame[-1:]) == [message]
