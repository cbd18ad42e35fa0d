"""The messages between processes: equal after encoding and decoding, and errors if they are malformed."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import control, engine, kv
from contract.kv import Abort, Announce, Hello, Rated, Refused
from contract.message import encode
from pdserve.core.errors import LayoutMismatch, PdserveError, TransferRefused, WorkerLost, from_wire
from pdserve.core.kv_layout import KVLayout
from pdserve.core.prefix_digests import MAX_UPDATE_BLOCKS, BlockUpdate
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from tests.examples import example

ENGINE: Any = engine.Command | engine.EngineEvent | engine.KVEvent


def from_pipe(data: bytes, kinds: Any = ENGINE) -> Any:
    (message,) = engine.FrameReader(kinds).feed(len(data).to_bytes(4, "little") + data)
    return message


class Protocol(NamedTuple):
    """One direction of a protocol: its messages, how one is decoded, and what a malformed one raises."""

    kinds: Any
    decode: Callable[[bytes], Any]
    error: type[Exception]


PROTOCOLS = {
    "to worker": Protocol(
        control.Work | control.Call | control.RequestHeartbeat, control.TO_WORKER.decode, PdserveError
    ),
    "to gateway": Protocol(control.Reply | control.Outputs, control.TO_GATEWAY.decode, PdserveError),
    "heartbeats": Protocol(control.Beat, control.BEATS.decode, PdserveError),
    "answers to heartbeats": Protocol(control.BeatAnswer, control.BEAT_ANSWERS.decode, PdserveError),
    "KV": Protocol(kv.Header, kv.decode, TransferRefused),
    "engine": Protocol(ENGINE, from_pipe, ValueError),
}
ALL = pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        pytest.param(protocol, kind, id=f"{name}: {kind.__name__}")
        for name, protocol in PROTOCOLS.items()
        for kind in get_args(protocol.kinds) or (protocol.kinds,)
    ],
)
MALFORMED = r"^an unreadable message .* differ in version$|^malformed header: |^invalid engine message"
NOT_TEXT = "\xe4".encode(), b"\xff\xff"


@ALL
def test_it_is_the_same_after_encoding_and_decoding(protocol: Protocol, kind: Any) -> None:
    """Types included. On the wire it is a list of its name and its fields."""
    draw = random.Random(1)
    for _ in range(20):
        message = example(kind, draw)
        data = msgspec.msgpack.encode(message)
        back = protocol.decode(data)
        assert (type(back), back) == (kind, message)
        name, *fields = msgspec.msgpack.decode(data)
        assert (name, len(fields)) == (kind.__name__, len(kind.__struct_fields__))


@ALL
def test_what_is_no_message_is_refused(protocol: Protocol, kind: Any) -> None:
    """One that is cut, has a field less or more, one of another type, another name, or text that is no UTF-8."""
    right = msgspec.msgpack.encode(example(kind, random.Random(2)))
    name, *fields = msgspec.msgpack.decode(right)
    required = len(fields) - len(kind.__struct_defaults__)
    wrong: list[Any] = [[], ["exec", *fields], [name, *fields, 1], {"type": name}, ["\xe4", *fields]]
    wrong += [[name, *fields[: required - 1]]] if required else []
    wrong += [[name, *fields[:i], msgspec.msgpack.Ext(4, b"x"), *fields[i + 1 :]] for i in range(len(fields))]
    for data in (b"", b"\xc1", b"\x91" * 5000, right[:-1], right * 2, *map(msgspec.msgpack.encode, wrong)):
        with pytest.raises(protocol.error, match=MALFORMED) as refused:
            protocol.decode(data.replace(*NOT_TEXT))
        assert len(str(refused.value)) < 400


@ALL
def test_bytes_changed_on_the_way_are_a_message_or_an_error(protocol: Protocol, kind: Any) -> None:
    """Nothing else is ever raised."""
    draw = random.Random(7)
    for _ in range(300):
        data = bytearray(msgspec.msgpack.encode(example(kind, draw)))
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(protocol.error):
            protocol.decode(bytes(data[: draw.randint(1, len(data))] if draw.random() < 0.2 else data))


LAYOUT = KVLayout.uniform("m", "bfloat16", 4, 2, 2, 8)
REQUEST = Request("r", (1, 2), SamplingParams(9, temperature=0.5))
RIGHT: dict[str, Any] = {
    "to worker": control.Run(REQUEST),
    "KV": Hello("p", "e", LAYOUT, True, []),
    "engine": engine.Submit(REQUEST, engine.KVRole.PUSH),
}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("to worker", (1, "request_id"), ...),
        ("to worker", (1, "prompt_token_ids", 0), 1.5),
        ("engine", (2,), "sideways"),
        ("KV", (3, "model_hash"), 1),
        ("KV", (3, "more"), 1),
        ("KV", (3, "caches"), ...),
        ("KV", (3, "caches", 0, "head_dim"), "8"),
        ("KV", (5,), [-1]),
        ("KV", (5,), list(range(1025))),
    ],
)
def test_a_wrong_part_is_refused(name: str, path: tuple[Any, ...], value: object) -> None:
    """With another value at ``path``, or (...) none."""
    inner = whole = msgspec.msgpack.decode(msgspec.msgpack.encode(RIGHT[name]))
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(PROTOCOLS[name].error, match=MALFORMED):
        PROTOCOLS[name].decode(msgspec.msgpack.encode(whole))


@pytest.mark.parametrize(
    "header",
    [
        Announce("r", "n" * 65, 9, 2),
        Announce("r", "n", -1, 2),
        Refused("n", 1, "k" * 65, "m"),
        Abort("n", "k", "m" * 8193),
        Rated(2**48),
        kv.Blocks("n", "e", "r", 0, 1, 0, 1, 0, 2, 0, 0, False, bytes(4097)),
    ],
)
def test_headers_have_bounds(header: kv.Header) -> None:
    with pytest.raises(TransferRefused, match=r"^malformed header: "):
        kv.decode(encode(header))


def test_nesting_without_end_is_refused() -> None:
    """Also where something might be skipped."""
    layout = msgspec.msgpack.encode(LAYOUT)
    nested = bytes([layout[0] + 1]) + layout[1:] + b"\xa4more" + b"\x91" * 10_000 + b"\xc0"
    with pytest.raises(TransferRefused, match=r"^malformed header: "):
        kv.decode(msgspec.msgpack.encode(["Hello", "p", "e", msgspec.Raw(nested), True, []]))


def test_errors_keep_their_class() -> None:
    """Also those of links in a heartbeat."""
    for error in (LayoutMismatch("dtype differs"), WorkerLost("gone")):
        back = control.Failure.of(error).error()
        assert (type(back), str(back)) == (type(error), str(error))
    unexpected = control.Failure.of(ZeroDivisionError("a bug")).error()
    assert (type(unexpected), str(unexpected)) == (PdserveError, "ZeroDivisionError: a bug")
    assert type(from_wire("NoSuchError", "")) is PdserveError
    failed = control.LinkState("decode-1", "e2", control.Failure("LayoutMismatch", "dtype differs"))
    beat = msgspec.structs.replace(example(control.Beat, random.Random(1)), link_states=[failed])
    mismatch = control.BEATS.decode(encode(beat)).links["decode-1", "e2"]
    assert (type(mismatch), str(mismatch)) == (LayoutMismatch, "dtype differs")


@pytest.mark.parametrize("added", [b"1234567", bytes(8 * MAX_UPDATE_BLOCKS + 8)])
def test_an_update_of_no_whole_hashes_or_too_many_is_refused(added: bytes) -> None:
    beat = example(control.Beat, random.Random(1))
    kind, info, load, links, *_ = msgspec.msgpack.decode(encode(beat))
    valid = msgspec.msgpack.decode(msgspec.msgpack.encode(BlockUpdate(0, 1, b"?" * 8)))
    broken = msgspec.msgpack.encode([kind, info, load, links, [*valid[:2], added, *valid[3:]]])
    with pytest.raises(PdserveError, match="are not up to 65536 hashes of 8 bytes"):
        control.BEATS.decode(broken)


def test_a_message_of_another_pipe_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid engine message"):
        from_pipe(msgspec.msgpack.encode(engine.Pong()), engine.Command)


MESSAGES = [example(kind, random.Random(3)) for kind in get_args(ENGINE)]


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 2000), max_size=20))
def test_a_pipe_may_cut_the_stream_anywhere(messages: list[Any], cuts: list[int]) -> None:
    stream = b"".join(engine.encode_frame(message) for message in messages)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader: engine.FrameReader[Any] = engine.FrameReader(ENGINE)
    got = [message for start, end in itertools.pairwise(places) for message in reader.feed(stream[start:end])]
    assert got == messages
