"""Messages are equal after encoding and decoding, and malformed ones are errors."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from contract.control import (
    BEAT_ANSWERS,
    BEATS,
    TO_GATEWAY,
    TO_WORKER,
    Abort,
    Beat,
    BeatAnswer,
    Failure,
    LinkState,
    Message,
    MessageDecoder,
    Outputs,
    Ping,
    Push,
    Receive,
    Reply,
    RequestHeartbeat,
    Run,
    SendPrefix,
    encode,
)
from pdserve.core.block_update import MAX_UPDATE_BLOCKS, SNAPSHOT, BlockUpdate
from pdserve.core.errors import LayoutMismatch, PdserveError, WorkerLost, from_wire
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink, PrefixFetch, PrefixSource, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.request import Mode, Request
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import Role, SharedCores, TokenOutput, WorkerInfo, WorkerLoad

LAYOUT = KVLayout.uniform("abc", "bfloat16", 64, 30, 3, 64)
ENDPOINTS = (KVEndpoint("shm", "host/name"), KVEndpoint("tcp", "10.0.0.1:5"))
PEER = KVPeer("decode-0", "e1", ENDPOINTS)
PROOF = TransferProof("torch_dist", 10, 3, 5, 2, 4, "xxh3-64 verified", 0.5, 1.5, 1.25, 1.75, 2.5, 9.5)
INFO = WorkerInfo(
    "prefill-0", Role.PREFILL, "e1", "10.0.0.1:4", ENDPOINTS, "10.0.0.1", "cpu", 1, 2,
    LAYOUT, 100, 2048, 512, 4096, "0", "0,1", "0.1.0", 3, True, "clock", "life", "service",
)  # fmt: skip
LOAD = WorkerLoad(1, 2, 3, 4, 2**40, 2**39, 5, 6, {"checksum": 2}, shared_cores=(SharedCores((1, 2), 3, 4, True),))
LINKS = [
    LinkState("decode-0", "e1", PeerLink("decode-0", "shm", "because", 9.5)),
    LinkState("decode-1", "e2", Failure("LayoutMismatch", "dtype differs")),
]
EVERYTHING = SamplingParams(
    9, 0.5, 40, 0.9, 2**63 - 1, ("stop", "\N{GRINNING FACE}"), (1, 2), True, 0.1, 1.3, -0.5, 1.7,
    {0: -100.0, 4_000_000: 0.25}, 20,
)  # fmt: skip
REQUESTS = {
    "least": Request("r", (), SamplingParams()),
    "greedy": Request("r", (1, 2, 3), SamplingParams(9), timeout_s=12.5, attempt_id="r#1"),
    "everything": Request("r", (0, 2**31, 3), EVERYTHING, Mode.PD, 12.5, "tenant", "r#2", (7, 8)),
    "no alternatives": Request("r", (1,), SamplingParams(logprobs=0, seed=0)),
}


OUTPUTS = [
    TokenOutput(0),
    TokenOutput(5, FinishReason.LENGTH),
    TokenOutput(5, logprobs=TokenLogprobs(-1.5)),
    TokenOutput(5, logprobs=TokenLogprobs(-0.1, ((5, -0.1), (0, -3.25)))),
    TokenOutput(5, logprobs=TokenLogprobs(-math.inf)),
    TokenOutput(5, cached_tokens=128),
    TokenOutput(5, cached_tokens=128, prefix_fetch=PrefixFetch("p1", 96, 112, 2.5, PROOF)),
    TokenOutput(5, prefix_fetch=PrefixFetch("p1", 0, 112, 250.0, failure="it took too long")),
    TokenOutput(None, FinishReason.STOP, (Event(EventKind.KV_VERIFIED, "w", 1.25),), PROOF),
    TokenOutput(
        5, FinishReason.ABORT, (Event(EventKind.ROOM_MADE, "w", 1.0), Event(EventKind.KV_VERIFIED, "w", 1.25)), PROOF,
        TokenLogprobs(-1.5), 3,
    ),
]  # fmt: skip


UPDATES = [BlockUpdate(SNAPSHOT, 7, bytes(16)), BlockUpdate(3, 9, b"", bytes(8))]
SOURCE = PrefixSource(PEER, 640, 0.25)
PEERS: list[list[KVPeer]] = [[], [PEER, KVPeer("d", "", ())]]
RUN, PUSH, BEAT = Run(REQUESTS["greedy"]), Push(REQUESTS["greedy"], PEER), Beat(INFO, LOAD, LINKS)
OUTPUT = Outputs([("r", OUTPUTS[-1])], [("s", Failure("WorkerLost", "gone"))])
MESSAGES: list[tuple[MessageDecoder[Any], Sequence[Message]]] = [
    (TO_WORKER, [Abort(2**40, "r#1"), RequestHeartbeat(), Ping(0), Run(REQUESTS["greedy"], SOURCE)]),
    (TO_WORKER, [Push(REQUESTS["greedy"], PEER, SOURCE)]),
    *((TO_WORKER, [Run(r), Push(r, PEER), Receive(r, PEER), SendPrefix(r, PEER)]) for r in REQUESTS.values()),
    (TO_GATEWAY, [Reply(7, 1.25, 1e9 + 0.5, failure) for failure in (None, Failure("WorkerLost", "gone"))]),
    (TO_GATEWAY, [OUTPUT, Outputs([]), Outputs([(f"r{i}", output) for i, output in enumerate(OUTPUTS)])]),
    (BEATS, [Beat(INFO, WorkerLoad()), BEAT, *(Beat(INFO, LOAD, LINKS, update) for update in UPDATES)]),
    (BEATS, [Beat(replace(INFO, role=Role.DECODE, ready=False, kv_endpoints=()), LOAD)]),
    (BEAT_ANSWERS, [BeatAnswer("g1", superseded, peers) for superseded in (True, False) for peers in PEERS]),
    (BEAT_ANSWERS, [BeatAnswer("g1", False, [], blocks_after=-1)]),
]  # fmt: skip


def test_messages_are_the_same_after_encoding_and_decoding() -> None:
    """Types included. There is an example of each message."""
    for decoder, messages in MESSAGES:
        for message in messages:
            back = decoder.decode(encode(message))
            assert (type(back), back) == (type(message), message)
    assert {type(message) for _, messages in MESSAGES for message in messages} == set(Message.__subclasses__())


def test_errors_keep_their_class() -> None:
    for error in (LayoutMismatch("dtype differs"), WorkerLost("gone")):
        back = Failure.of(error).error()
        assert (type(back), str(back)) == (type(error), str(error))
    unexpected = Failure.of(ZeroDivisionError("a bug")).error()
    assert (type(unexpected), str(unexpected)) == (PdserveError, "ZeroDivisionError: a bug")
    assert type(from_wire("NoSuchError", "")) is PdserveError


def test_links_keep_their_errors_classes() -> None:
    links = BEATS.decode(encode(Beat(INFO, LOAD, LINKS))).links
    assert links["decode-0", "e1"] == LINKS[0].outcome
    mismatch = links["decode-1", "e2"]
    assert (type(mismatch), str(mismatch)) == (LayoutMismatch, "dtype differs")


@pytest.mark.parametrize("added", [b"1234567", bytes(8 * MAX_UPDATE_BLOCKS + 8)])
def test_an_update_of_no_whole_hashes_or_too_many_is_refused(added: bytes) -> None:
    valid = encode(Beat(INFO, LOAD, [], BlockUpdate(0, 1, b"?" * 8)))
    kind, info, load, links, (begins, ends, _, removed) = msgspec.msgpack.decode(valid)
    broken = msgspec.msgpack.encode([kind, info, load, links, [begins, ends, added, removed]])
    with pytest.raises(PdserveError, match="are not up to 65536 hashes of 8 bytes"):
        BEATS.decode(broken)


# --- what is no message ----------------------------------------------------------------------------------------------


def parts_of(message: object) -> Any:
    """A message as lists, maps, and plain values."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), strict=False)


def changed(message: object, path: tuple[Any, ...], value: object) -> bytes:
    """The message's bytes with another value at ``path``; an ellipsis removes the value."""
    whole = parts_of(message)
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return msgspec.msgpack.encode(whole)


MALFORMED: dict[str, tuple[MessageDecoder[Any], bytes]] = {
    "no msgpack": (TO_WORKER, b"\xc1"),
    "an unknown name": (TO_WORKER, msgspec.msgpack.encode(["Exec", 1])),
    "a call to a gateway": (TO_GATEWAY, msgspec.msgpack.encode(Ping(1))),
    "cut short": (TO_WORKER, msgspec.msgpack.encode(PUSH)[:-1]),
    "more behind it": (TO_WORKER, msgspec.msgpack.encode(Ping(1)) + b"\x00"),
    "a missing field": (TO_WORKER, msgspec.msgpack.encode(["Abort", 1])),
    "a request without its name": (TO_WORKER, changed(RUN, (1, "request_id"), ...)),
    "a token that is a fraction": (TO_WORKER, changed(RUN, (1, "prompt_token_ids", 0), 1.5)),
    "an unknown mode": (TO_WORKER, changed(Run(REQUESTS["everything"]), (1, "mode"), "best")),
    "a name in no UTF-8": (TO_WORKER, msgspec.msgpack.encode(Abort(1, "\xe4")).replace("\xe4".encode(), b"\xff\xff")),
    "no peer": (TO_WORKER, changed(PUSH, (2,), None)),
    "an unknown event": (TO_GATEWAY, changed(OUTPUT, (1, 0, 1, 2, 0, 0), "lunch")),
    "a proof that lacks something": (TO_GATEWAY, changed(OUTPUT, (1, 0, 1, 3, "kv_bytes"), ...)),
    "a layout that lacks something": (BEATS, changed(BEAT, (1, "layout", "caches"), ...)),
    "a wanted peer that is a text": (BEAT_ANSWERS, msgspec.msgpack.encode(["BeatAnswer", "g1", False, ["decode-0"]])),
}


@pytest.mark.parametrize(("decoder", "data"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_errors(decoder: MessageDecoder[Any], data: bytes) -> None:
    with pytest.raises(PdserveError, match=r"^an unreadable message .* differ in version$") as refused:
        decoder.decode(data)
    assert type(refused.value) is PdserveError


@pytest.mark.parametrize(
    ("decoder", "message"),
    [(decoder, messages[0]) for decoder, messages in MESSAGES],
    ids=range(len(MESSAGES)),
)
def test_bytes_changed_on_the_way_are_a_message_or_an_error(decoder: MessageDecoder[Any], message: Message) -> None:
    """Decoding random bytes raises PdserveError only."""
    draw, right = random.Random(7), encode(message)
    for _ in range(1000):
        data = bytearray(right)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(PdserveError):
            decoder.decode(bytes(data))
