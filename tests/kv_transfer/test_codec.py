"""KV in fewer bytes on the way: what a codec keeps, and who may use which."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from kv_transfer.codec import Codec, Int8, Lossless, codec_of
from pdserve.core.config import CodecName
from pdserve.core.errors import ConfigError, LayoutMismatch
from pdserve.core.kv_layout import FP8, KVLayout
from tests.kv_transfer.conftest import MakeEnds, with_nixl

BFLOAT16 = KVLayout.uniform("model", "bfloat16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=64)


def normal_numbers(count: int, seed: int = 0) -> bytearray:
    """Numbers as a KV cache has them, bfloat16: each layer with a spread of its own."""
    draw = np.random.default_rng(seed)
    floats = draw.standard_normal(count, np.float32) * np.float32(draw.uniform(0.01, 30))
    return bytearray((floats.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def floats(data: bytes | bytearray | memoryview) -> np.ndarray:
    """bfloat16 numbers, as float32."""
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("seed", range(40))
def test_lossless_keeps_every_bit(seed: int) -> None:
    draw, codec = random.Random(seed), Lossless()
    count = draw.choice([0, 1, 2, 1023, 1024, 1025, draw.randrange(1, 9000)])
    kinds = [
        normal_numbers(count, seed),
        bytearray(2 * count),  # zeros
        bytearray(draw.randbytes(2 * count)),  # any bits: infinities, numbers that are none, tiny ones
        bytearray(2 * (count // 2)) + normal_numbers(count - count // 2, seed),
    ]
    for data in kinds:
        cut = 2 * draw.randrange(count + 1)
        coded = codec.encode([memoryview(data)[:cut], memoryview(data)[cut:]])
        assert bytes(codec.decode(coded, len(data))) == data


def test_lossless_takes_three_quarters() -> None:
    data = normal_numbers(2**16)
    assert len(Lossless().encode([memoryview(data)])) < 0.76 * len(data)
    assert len(Lossless().encode([memoryview(bytearray(len(data)))])) < 0.76 * len(data), "zeros, too"


@pytest.mark.parametrize("codec", [Lossless(), Int8("bfloat16", 64)])
def test_what_was_not_coded_so_is_refused(codec: Codec) -> None:
    data, draw = normal_numbers(4096), random.Random(1)
    coded = bytes(codec.encode([memoryview(data)]))
    for wrong in (b"", coded[:-1], coded + b"x", coded[: len(coded) // 3]):
        with pytest.raises(ValueError, match=r"coded bytes|beside the others"):
            codec.decode(memoryview(wrong), len(data))
    for _ in range(50):
        changed = bytearray(coded)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        with contextlib.suppress(ValueError):  # or it is another payload of this size
            assert len(codec.decode(memoryview(changed), len(data))) == len(data)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_int8_is_near(dtype: str) -> None:
    numbers = floats(normal_numbers(64 * 100, 3)).copy()
    numbers[64:128] = 0
    as_stored = (numbers.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else numbers.astype(dtype)
    stored = memoryview(as_stored.tobytes())
    codec = Int8(dtype, 64)
    coded = codec.encode([stored])
    assert len(coded) == 64 * 100 + 2 * 100
    decoded = codec.decode(coded, stored.nbytes)
    found = floats(decoded) if dtype == "bfloat16" else np.frombuffer(decoded, dtype).astype(np.float32)
    groups, errors = numbers.reshape(-1, 64), np.abs(found - numbers).reshape(-1, 64)
    largest = np.abs(groups).max(axis=1)
    assert not found[64:128].any()
    assert (errors.max(axis=1) <= largest * (1.01 / 254 + 2**-8)).all()


def test_what_a_codec_does_not_code_is_a_setting_that_is_wrong() -> None:
    float32 = KVLayout.uniform("model", "float32", 16, 3, 2, 64)
    with pytest.raises(
        ConfigError, match=r"^transfer.codec: lossless is for KV caches in bfloat16; this one is float32"
    ):
        codec_of("lossless", float32)
    for name in ("lossless", "int8"):
        with pytest.raises(ConfigError, match=r"transfer\.codec"):
            codec_of(name, KVLayout.uniform("model", FP8, 16, 3, 2, 64))
    assert codec_of("none", float32) is None
    assert isinstance(codec_of("int8", float32), Int8)


@pytest.mark.parametrize("transport", ["tcp", "grpc_stream", "nixl"])
@pytest.mark.parametrize("checksum", [True, False])
async def test_a_hand_off_is_coded(
    make_ends: MakeEnds, transport: str, checksum: bool, request: pytest.FixtureRequest
) -> None:
    with_nixl(transport, request)
    ends = await make_ends(transport, layout=BFLOAT16, codec="lossless", checksum=checksum, message_bytes=2**16)
    ends.source.data[:] = normal_numbers(len(ends.source.data) // 2)
    blocks, slots = [5, 6, 7, 20, 21, 9], [40, 3, 17, 18, 19, 60]
    ends.start("r", slots, 1, send=blocks)
    received = await ends.both("r")
    ends.check_moved(blocks[1:], slots[1:])
    proof = received.proof
    assert proof.kv_bytes == 5 * BFLOAT16.block_bytes
    assert 0.7 * proof.kv_bytes < proof.wire_bytes < 0.77 * proof.kv_bytes
    assert ends.sender.links()[0].reason.endswith(", lossless coding")
    assert not any(ends.target.bytes_of([40]))
    ends.check_nothing_left()


@pytest.mark.parametrize("transport", ["shm", "torch_dist"])
async def test_a_link_that_does_not_code_says_so(make_ends: MakeEnds, transport: str) -> None:
    ends = await make_ends(transport, layout=BFLOAT16, codec="lossless")
    ends.source.data[:] = normal_numbers(len(ends.source.data) // 2)
    ends.start("r", [1, 2], send=[30, 31])
    proof = (await ends.both("r")).proof
    ends.check_moved([30, 31], [1, 2])
    assert proof.wire_bytes == proof.kv_bytes
    assert ends.sender.links()[0].reason.endswith(", not coded")


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_what_would_not_be_smaller_is_sent_as_it_is(
    make_ends: MakeEnds, transport: str, request: pytest.FixtureRequest
) -> None:
    """Also beside messages that are coded."""
    with_nixl(transport, request)
    ends = await make_ends(transport, layout=BFLOAT16, codec="lossless")  # of random bits
    coded = normal_numbers(BFLOAT16.block_bytes // 2)
    ends.source.data[30 * len(coded) : 31 * len(coded)] = coded
    ends.start("r", [1, 2, 3], send=[29, 30, 31])
    proof = (await ends.both("r")).proof
    ends.check_moved([29, 30, 31], [1, 2, 3])
    assert 2.7 * BFLOAT16.block_bytes < proof.wire_bytes < 2.77 * BFLOAT16.block_bytes


@pytest.mark.parametrize(("sender", "receiver"), [("lossless", "none"), ("lossless", "int8"), ("none", "int8")])
async def test_the_sender_decides_where_no_bit_changes(
    make_ends: MakeEnds, sender: CodecName, receiver: CodecName
) -> None:
    ends = await make_ends("tcp", layout=BFLOAT16, codec=receiver, sender_codec=sender)
    ends.source.data[:] = normal_numbers(len(ends.source.data) // 2)
    ends.start("r", [1, 2], send=[30, 31])
    proof = (await ends.both("r")).proof
    ends.check_moved([30, 31], [1, 2])
    assert (proof.wire_bytes < proof.kv_bytes) is (sender == "lossless")


async def test_int8_is_for_two_that_want_it(make_ends: MakeEnds) -> None:
    ends = await make_ends("tcp", layout=BFLOAT16, codec="int8")
    ends.source.data[:] = normal_numbers(len(ends.source.data) // 2)
    ends.start("r", [1, 2], send=[30, 31])
    proof = (await ends.both("r")).proof
    assert proof.wire_bytes == proof.kv_bytes * (64 + 2) // 128
    error = np.abs(floats(ends.target.bytes_of([1, 2])) - floats(ends.source.bytes_of([30, 31])))
    assert 0 < error.max() < 0.01 * np.abs(floats(ends.source.bytes_of([30, 31]))).max()
    apart = await make_ends("tcp", layout=BFLOAT16, codec="lossless", sender_codec="int8")
    with pytest.raises(LayoutMismatch, match=r"transfer\.codec: int8 at the peer, lossless here"):
        await apart.connect()
