"""Every message survives the pipe, however the pipe cuts it."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.engine import (
    Abort,
    CacheChanged,
    Command,
    Computed,
    EngineEvent,
    Failed,
    Finished,
    FrameReader,
    KVEvent,
    KVReady,
    KVRole,
    Load,
    Ping,
    PinPrefix,
    Pong,
    Progress,
    Ready,
    Rejected,
    Release,
    Reserved,
    SetTokenBudget,
    Step,
    TokenOut,
    encode,
)
from pdserve.core.handoff import FirstToken
from pdserve.core.kv_layout import KVLayout
from pdserve.core.logprobs import TokenLogprobs
from tests.engine.harness import submit

LAYOUT = KVLayout.uniform("x", "float32", 16, 2, 1, 8)
MESSAGES: list[Command | EngineEvent | KVEvent] = [
    submit(
        "r1",
        KVRole.RECEIVE,
        [1, 2, 3],
        16,
        temperature=0.7,
        top_k=40,
        top_p=0.95,
        seed=2**63 - 1,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        salt="tenant ü",
    ),
    submit("ü/3", KVRole.PUSH, list(range(2000)), 1, seed=7),
    submit(
        "r4",
        KVRole.LOCAL,
        [1],
        1,
        outputs=[2],
        temperature=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={7: -100.0, 9: 0.5},
        logprobs=0,
    ),
    KVReady("r1", 42),
    KVReady("r1", None, 64),
    submit("r5", KVRole.PUSH, list(range(40)), 1, prefix_tokens=32),
    PinPrefix("r5/prefix", "tenant ü", tuple(range(32))),
    Release("r1"),
    Abort("r1"),
    SetTokenBudget(2048),
    Ping(),
    Pong(),
    Ready(LAYOUT, 128, {"kind": "shm", "name": "/p"}, 4096, 32000, "cpu", [0, 1], 1.25, [2, 7]),
    Failed("ModelError", "no such folder"),
    Reserved("r1", [3, 1, 2], 1, 7.5),
    Rejected("r1", "CapacityExceeded", "too long"),
    Finished("r1", "stop"),
    Step(2.5, 2.25),
    Step(
        2.5,
        2.25,
        [
            TokenOut("r1", 7, "", 2.0),
            TokenOut("r1", 9, "", 2.0, TokenLogprobs(-1.5)),
            TokenOut("r2", 8, "stop", 1.0, TokenLogprobs(-0.25, ((8, -0.25), (3, -2.0))), 32),
        ],
    ),
    Computed([Progress("r3", 64, [0, 1]), Progress("r4", 1, [9], first_token=FirstToken(7, ends_here=True))]),
    Computed([Progress("r3", 64, [], num_layers=8)]),
    Load(10, 2, 3, 1, 2**40, 2**39, 5),
    CacheChanged(bytes(range(16)), b""),
]


KINDS: Any = Command | EngineEvent | KVEvent


def read(data: bytes, kinds: Any = KINDS) -> list[Any]:
    """The messages of these frames."""
    return FrameReader(kinds).feed(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Command | EngineEvent | KVEvent) -> None:
    frame = encode(message)
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    (again,) = read(frame)
    assert type(again) is type(message)
    assert again == message


def test_every_message_is_tried_here() -> None:
    assert {type(m) for m in MESSAGES} == {*get_args(Command), *get_args(EngineEvent), *get_args(KVEvent)}


def test_a_message_is_a_list_of_its_name_and_its_fields() -> None:
    frame = encode(Step(2.5, 2.25, [TokenOut("r1", 7, "", 2.0)]))
    assert msgpack.unpackb(frame[4:]) == ["Step", 2.5, 2.25, [["r1", 7, "", 2.0, None, 0, []]]]


def framed(*values: object) -> bytes:
    body = bytes(msgpack.packb(values))
    return len(body).to_bytes(4, "little") + body


REQUEST = msgpack.unpackb(encode(MESSAGES[0])[4:])[1]


@pytest.mark.parametrize(
    "values",
    [
        *(("TokenOut",), ("object",), ("",), ("Submit", REQUEST, "sideways", 0)),
        *(("KVReady", *fields) for fields in ((), ("r1",), ("r1", "42"), ("r1", 42, 1, 1))),
    ],
    ids=range(8),
)
def test_unknown_messages_and_missing_wrong_and_further_fields_are_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="invalid engine message"):
        read(framed(*values))


def test_a_message_of_another_pipe_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid engine message"):
        read(encode(Pong()), Command)


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_the_reader_does_not_care_how_the_stream_is_cut(messages: list[Command | EngineEvent], cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in messages)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader: FrameReader[Any] = FrameReader(KINDS)
    got: list[Command | EngineEvent] = []
    for start, end in itertools.pairwise(places):
        got += reader.feed(stream[start:end])
    assert got == messages
