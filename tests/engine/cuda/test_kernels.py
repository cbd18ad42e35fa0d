"""Each kernel against plain PyTorch in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from checkpoints.shape import Activation
from engine.kernels.cuda_attention import NO_SLOT, CUDAAttention
from engine.kernels.cuda_layer import CUDAFP8Linear, gate_times, rms_norm, rotate_and_write
from engine.kernels.cuda_paged_attention import attend_decodes
from engine.model.kv_pool import TORCH_DTYPES, KVPool, LayerKV
from engine.model.layers import FP8Linear
from engine.model.rope import rotate_
from engine.model.weights import QuantizedTensor
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.kv_layout import KVLayout
from tests.engine.cuda.conftest import INTERPRETED
from tests.engine.harness import GREEDY

TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
NUM_BLOCKS = 64
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    """Heads, KV heads, head dim, block size, window and soft cap."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None


SHAPES = [  # tiles within a block and over several, heads of any size, windows within a tile and over several
    Shape(6, 2, 12, 20, window=70),
    Shape(6, 1, 64, 64),
    Shape(4, 2, 32, 64, window=1),
    Shape(16, 1, 256, 64, window=17, softcap=1.5),
    *(
        pytest.param(shape, marks=pytest.mark.soak)  # groups of 1 to 16 heads, of 16 to 256 numbers
        for shape in (
            Shape(8, 2, 16, 16),
            Shape(4, 4, 64, 16),
            Shape(4, 2, 80, 16, window=30),
            Shape(4, 1, 96, 32),
            Shape(2, 1, 128, 128, window=64),
            Shape(16, 1, 192, 32),
        )
    ),
]


DTYPES = [pytest.param("float32", marks=pytest.mark.soak), "float16"] if INTERPRETED else list(TOLERANCES)
"""The interpreter multiplies bfloat16 matrices as if they were integers. Decoders (`test_decoder`) are in float32."""


def make_pool(shape: Shape, dtype: str, device: torch.device) -> KVPool:
    """A pool full of random numbers."""
    layout = KVLayout.uniform("m", dtype, shape.block_size, LAYERS, shape.kv_heads, shape.head_dim)
    size = NUM_BLOCKS * layout.block_bytes // TORCH_DTYPES[dtype].itemsize
    return KVPool(layout, NUM_BLOCKS, torch.randn(size).to(device, TORCH_DTYPES[dtype]), {})


def reference(query: torch.Tensor, kv: LayerKV, blocks: list[int], position: int, shape: Shape) -> torch.Tensor:
    """What ``query`` (``[heads, head_dim]``) at ``position`` makes of its context, in float64, on the CPU."""
    first = 0 if shape.window is None else max(0, position + 1 - shape.window)
    group = query.shape[0] // kv.k.shape[1]
    keys, values = (
        part[blocks].double().transpose(0, 1).flatten(1, 2)[:, first : position + 1].repeat_interleave(group, 0)
        for part in (kv.k, kv.v)
    )
    scores = torch.einsum("hd,hcd->hc", query.double(), keys) * query.shape[1] ** -0.5
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return torch.einsum("hc,hcd->hd", scores.softmax(-1), values).cpu()


def scattered(shape: Shape, *tokens: int) -> list[list[int]]:
    """Block tables for sequences of so many tokens."""
    free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[free.pop() for _ in range(-(-n // shape.block_size))] for n in tokens]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_of_decodes_and_chunks(shape: Shape, dtype: str, device: torch.device) -> None:
    """Contexts around tiles, windows and blocks; chunks that start anywhere."""
    spans = [(0, 1), (16, 1), (63, 1), (64, 1), (101, 1), (0, 37), (5, 3), (64, 34), (101, 70)]
    check_step(shape, dtype, make_pool(shape, dtype, device), scattered(shape, *map(sum, spans)), spans)


PRODUCTION = Shape(32, 8, 128, 64)
"""Of `dummy:8b`."""
STEPS = [(2, 200)] if INTERPRETED else [(batch, context) for batch in (1, 16, 64) for context in (2048, 8192, 32768)]


@pytest.mark.parametrize(("batch", "context"), STEPS)
def test_steps_of_the_sizes_of_production(batch: int, context: int, device: torch.device) -> None:
    """Decodes at long contexts, and a chunk at the end of one, so that all pipelined loops take several turns."""
    dtype, chunk, size = "float16" if INTERPRETED else "bfloat16", min(512, context), PRODUCTION.block_size
    layout = KVLayout.uniform("m", dtype, size, 1, PRODUCTION.kv_heads, PRODUCTION.head_dim)
    each = layout.blocks_for(context)
    numbers = layout.block_bytes // 2
    if device.type == "cuda" and 4 * (batch + 1) * each * layout.block_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"{batch} contexts of {context} tokens do not fit onto this GPU")
    num_blocks = (batch + 1) * each
    flat = torch.randn(num_blocks * numbers, device=device).to(TORCH_DTYPES[dtype])
    pool, free = KVPool(layout, num_blocks, flat, {}), random.Random(2).sample(range(num_blocks), num_blocks)
    seqs = [
        ScheduledSeq(str(i), [0], context - 1, [free.pop() for _ in range(each)], True, GREEDY) for i in range(batch)
    ]
    seqs.append(ScheduledSeq("chunk", [0] * chunk, context - chunk, free, True, GREEDY))
    query = torch.randn(batch + chunk, PRODUCTION.heads, PRODUCTION.head_dim, device=device).to(TORCH_DTYPES[dtype])
    [kv] = pool.layers
    out = CUDAAttention(pool).plan(seqs).attend(query, kv, None, PRODUCTION.head_dim**-0.5)
    rows = {0: context - 1, batch - 1: context - 1, batch: context - chunk, batch + chunk - 1: context - 1}
    for row, position in rows.items():
        expected = reference(query[row], kv, list(seqs[min(row, batch)].block_ids), position, PRODUCTION)
        found = out[row].view(PRODUCTION.heads, -1).double().cpu()
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_a_pool_of_more_than_2_to_the_31_numbers(device: torch.device) -> None:
    """Offsets of its last blocks do not fit into 32 bits. The memory between the first and the last is never used."""
    shape = Shape(4, 2, 64, 16)
    layout = KVLayout.uniform("m", "float16", shape.block_size, LAYERS, shape.kv_heads, shape.head_dim)
    numbers = layout.block_bytes // 2
    last = 2**31 // numbers + 2
    pool = KVPool(layout, last + 1, torch.empty((last + 1) * numbers, dtype=torch.float16, device=device), {})
    assert pool.tensor.numel() > 2**31
    tables = [[last], [last - 2, 0, last - 1], [1, last - 3]]
    for table in tables:
        pool.tensor[table] = torch.randn(pool.tensor[table].shape).to(device, torch.float16)
    check_step(shape, "float16", pool, tables, [(9, 1), (35, 1), (5, 20)])


def check_step(shape: Shape, dtype: str, pool: KVPool, tables: list[list[int]], spans: list[tuple[int, int]]) -> None:
    """Run a step of ``spans`` (start, rows) over ``tables``, and compare what it writes and returns."""
    torch.manual_seed(0)
    device = pool.tensor.device
    attention = CUDAAttention(pool, shape.softcap)
    seqs = [
        ScheduledSeq(str(i), [0] * rows, start, blocks, True, GREEDY)
        for i, ((start, rows), blocks) in enumerate(zip(spans, tables, strict=True))
    ]
    seqs = attention.order(random.Random(1).sample(seqs, len(seqs)))
    step = attention.plan(seqs)
    rows = sum(len(s.token_ids) for s in seqs)
    qkv = torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim).to(device, TORCH_DTYPES[dtype])
    used = sorted({block for table in tables for block in table})
    whole = pool.tensor if pool.num_blocks == NUM_BLOCKS else pool.tensor[used]
    places = {block: block if pool.num_blocks == NUM_BLOCKS else used.index(block) for block in used}
    before = whole.clone()
    kv = pool.layers[LAYER]
    unturned = torch.ones(rows, 1, shape.head_dim, device=device), torch.zeros(rows, 1, shape.head_dim, device=device)
    rotate_and_write(qkv, *unturned, None, 0.0, step.slots, kv.k, kv.v)
    out = (
        step.attend(qkv[:, : shape.heads], kv, shape.window, shape.head_dim**-0.5)
        .double()
        .cpu()
        .view(rows, shape.heads, -1)
    )
    row = 0
    for seq in seqs:
        for position in range(seq.start, seq.start + len(seq.token_ids)):
            block, offset = seq.block_ids[position // shape.block_size], position % shape.block_size
            written = torch.cat((kv.k[block, :, offset], kv.v[block, :, offset]))
            torch.testing.assert_close(written, qkv[row, shape.heads :], rtol=0, atol=0)
            before[places[block], LAYER, :, :, offset] = written.view(2, -1, shape.head_dim)
            expected = reference(qkv[row, : shape.heads], kv, list(seq.block_ids), position, shape)
            tolerance = TOLERANCES[dtype]
            torch.testing.assert_close(out[row], expected, rtol=tolerance, atol=tolerance)
            row += 1
    whole = pool.tensor if pool.num_blocks == NUM_BLOCKS else pool.tensor[used]
    assert torch.equal(whole, before)  # and nothing else was written


@pytest.mark.parametrize("splits", [4, 16])
def test_padding_reads_nothing(splits: int, device: torch.device) -> None:
    """Rows of padding become zeros, whatever their tables hold; and the number of splits makes no difference."""
    torch.manual_seed(1)
    shape = Shape(8, 2, 32, 16)
    pool = make_pool(shape, "float32", device)
    kv = pool.layers[LAYER]
    tables = scattered(shape, 130, 70)
    table = torch.full((4, 9), 2**30, dtype=torch.int32)
    for row, blocks in ((0, tables[0]), (2, tables[1])):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    contexts = torch.tensor([130, 0, 70, 0], dtype=torch.int32, device=device)
    query = torch.randn(4, 8, 32, device=device)
    arrivals = torch.zeros(8, dtype=torch.int32, device=device)
    for tables_on_device in (table.to(device), table.t().contiguous().to(device).t()):
        out = torch.full_like(query, torch.nan)
        scale = query.shape[-1] ** -0.5
        attend_decodes(query, kv.k, kv.v, tables_on_device, contexts, 2**30, scale, splits, arrivals, out)
        assert not arrivals.any()
        assert not out[1].any()
        assert not out[3].any()
        for row, blocks, position in ((0, tables[0], 129), (2, tables[1], 69)):
            expected = reference(query[row], kv, blocks, position, shape)
            torch.testing.assert_close(out[row].double().cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("shape", "normed"), [(Shape(8, 2, 16, 16), False), (Shape(9, 3, 12, 20), True)], ids=str)
def test_rope_and_write(shape: Shape, normed: bool, dtype: str, device: torch.device) -> None:
    torch.manual_seed(2)
    pool = make_pool(shape, dtype, device)
    kv = pool.layers[LAYER]
    rotated = shape.heads + shape.kv_heads
    qkv = torch.randn(5, rotated + shape.kv_heads, shape.head_dim).to(device, TORCH_DTYPES[dtype])
    cos, sin = torch.rand(2, 5, 1, shape.head_dim // 2).repeat(1, 1, 1, 2).to(device, TORCH_DTYPES[dtype])
    sin[..., : shape.head_dim // 2].neg_()
    norm = torch.rand(rotated, shape.head_dim).to(device, TORCH_DTYPES[dtype]) if normed else None
    size = shape.block_size
    slots = [3 * size + size - 1, NO_SLOT, 7 * size, 0, NO_SLOT]
    expected = qkv.double()
    if norm is not None:
        root = (expected[:, :rotated].square().mean(-1, keepdim=True) + 1e-5).sqrt()
        expected[:, :rotated] = expected[:, :rotated] / root * norm.double()
    rotate_(expected[:, :rotated], cos.double(), sin.double())
    expected_pool = pool.tensor.clone()
    for row, slot in enumerate(slots):
        if slot != NO_SLOT:
            written = expected[row, shape.heads :].view(2, -1, shape.head_dim).to(expected_pool.dtype)
            expected_pool[slot // size, LAYER, :, :, slot % size] = written
    slot_tensor = torch.tensor(slots, dtype=torch.int32, device=device)
    query = rotate_and_write(qkv, cos, sin, norm, 1e-5, slot_tensor, kv.k, kv.v)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(query.double(), expected[:, : shape.heads], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool.tensor, expected_pool, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [72, 2100])
def test_norm_and_gate(size: int, dtype: str, device: torch.device) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 2 * size).to(device, TORCH_DTYPES[dtype])
    weight = torch.rand(2 * size).to(device, TORCH_DTYPES[dtype])
    exact = x.double()
    normed = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), normed, rtol=tolerance, atol=tolerance)
    gate, up = exact[:, :size], exact[:, size:]
    gates: tuple[tuple[Activation, torch.Tensor], ...] = (
        ("silu", torch.nn.functional.silu(gate)),
        ("gelu_tanh", torch.nn.functional.gelu(gate, approximate="tanh")),
    )
    for activation, gated in gates:
        torch.testing.assert_close(gate_times(x, activation).double(), gated * up, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [48, 4096])
def test_rows_are_quantized(size: int, dtype: str, device: torch.device) -> None:
    """As PyTorch does it. The numbers avoid a fault of the interpreter, which loses the carry of the mantissa."""
    draw = torch.Generator().manual_seed(size)
    x = torch.randint(0, 15, (7, size), generator=draw) / 8.0 * 2.0 ** torch.randint(-6, 9, (7, size), generator=draw)
    x[:, 0] = 448.0
    x[2] = 0.0
    x *= torch.randn(7, size, generator=draw).sign()
    x = x.to(device, TORCH_DTYPES[dtype])
    weight = QuantizedTensor(torch.zeros(16, size, device=device).to(torch.float8_e4m3fn), torch.ones(16, 1), None)
    (values, scales), (expected, their_scales) = (kind(weight).quantized(x) for kind in (CUDAFP8Linear, FP8Linear))
    torch.testing.assert_close(scales, their_scales)
    torch.testing.assert_close(values.float(), expected.float(), rtol=0.0, atol=0.0)
    assert len(set(expected[0].float().tolist())) > 30
