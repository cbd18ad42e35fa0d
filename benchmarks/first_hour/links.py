"""Steps of the links between two GPUs: rates of hand-offs over NCCL beside bare sends, and peers that die or stop."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.first_hour.programs import run_pytest
from benchmarks.first_hour.step import Findings, Options

RATE_GOAL = 0.80
_SECRET = bytes(range(32))
_TIMEOUT_S = 120.0


def rates(options: Options) -> Findings:
    """Hand-offs of the 8b shape's blocks over torch_dist, beside send and recv of the same bytes."""
    large = options.on_gpu and not options.quick
    num_bytes, turns = (2**30, 10) if large else (2**25, 3)
    backend = "nccl" if options.on_gpu else "gloo"
    bare_s = _pair(_bare, options, backend, num_bytes, turns)
    ours_s = _pair(_handoffs, options, backend, num_bytes, turns)
    findings = Findings()
    bare, ours = (num_bytes / statistics.median(times) / 1e9 for times in (bare_s, ours_s))
    findings.figures |= {"bare, GB/s": round(bare, 2), "hand-offs, GB/s": round(ours, 2)}
    if large:
        findings.aim("hand-offs / bare", ours / bare, RATE_GOAL)
    else:
        findings.figures["hand-offs / bare"] = round(ours / bare, 3)
    return findings


def losses(options: Options) -> Findings:
    """A peer that is killed or stopped, mid-send and while the two join."""
    findings = Findings()
    files = ("tests/kv_transfer/test_torch_dist_processes.py",)
    if options.on_gpu:
        run_pytest(findings, options, *files, "tests/kv_transfer/test_two_gpus.py", "-m", "cuda2")
    else:
        run_pytest(findings, options, *files, "-k", "gloo")
    return findings


def _pair(work: Any, options: Options, backend: str, num_bytes: int, turns: int) -> list[float]:
    """Run both ends of ``work`` in processes of their own. Seconds of each turn, as the receiver's end has them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    answers, answer = context.Pipe(duplex=False)
    devices = ("cuda:0", "cuda:1") if options.on_gpu else ("cpu", "cpu")
    ends = [
        context.Process(target=work, args=(rank, devices[rank], backend, num_bytes, turns, pipe, answer), daemon=True)
        for rank, pipe in enumerate((ours, theirs))
    ]
    try:
        for end in ends:
            end.start()
        answer.close()
        if not answers.poll(_TIMEOUT_S):
            raise RuntimeError(f"{work.__name__}: no result within {_TIMEOUT_S:.0f} s")
        times: list[float] = answers.recv()
        return times
    except EOFError:
        raise RuntimeError(f"{work.__name__}: its processes ended without a result") from None
    finally:
        for end in ends:
            end.join(5.0)
            if end.is_alive():
                end.kill()
                end.join()


def _bare(
    rank: int, device: str, backend: str, num_bytes: int, turns: int, peer: Connection, answer: Connection
) -> None:
    """torch.distributed's send and recv of whole messages, two at a time."""
    import torch

    distributed: Any = torch.distributed
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        peer.send(store.port)
    else:
        store = distributed.TCPStore("127.0.0.1", peer.recv(), is_master=False)
    where: dict[str, Any] = {}
    if device != "cpu":
        torch.cuda.set_device(device)
        where["device_id"] = torch.device(device)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2, **where)
    size = min(num_bytes, 64 * 2**20)
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num_bytes // size)]
    times: list[float] = []
    for _ in range(turns + 1):
        distributed.barrier()
        started_s = time.monotonic()
        works = [distributed.isend(each, 1) if rank == 0 else distributed.irecv(each, 0) for each in messages]
        for work in works:
            if work is not None:
                work.wait()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started_s)
    if rank == 1:
        answer.send(times[1:])  # the first one is warm-up
    distributed.barrier()


def _handoffs(
    rank: int, device: str, backend: str, num_bytes: int, turns: int, peer: Connection, answer: Connection
) -> None:
    """Hand-offs of blocks by a sender (rank 0) and a receiver."""
    asyncio.run(_hand_over(rank, device, num_bytes, turns, peer, answer))


async def _hand_over(rank: int, device: str, num_bytes: int, turns: int, peer: Connection, answer: Connection) -> None:
    from kv_transfer.factory import create_transport
    from kv_transfer.pool import Pool
    from kv_transfer.receiver import KVReceiver
    from kv_transfer.sender import KVSender
    from pdserve.core.clock import MonotonicClock
    from pdserve.core.config import TransferConfig
    from pdserve.core.handoff import KVPeer
    from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES, KVLayout
    from runtime.secret import ServiceSecret

    layout = KVLayout.uniform("8b", "bfloat16", 64, 32, 8, 128)  # blocks of 8 MiB
    blocks = list(range(num_bytes // layout.block_bytes))
    pool, clock, config = (
        Pool.create(layout, len(blocks), device, MAX_PROBE_AREA_BYTES),
        MonotonicClock(),
        TransferConfig(),
    )
    transport = create_transport("torch_dist", pool.memory, ServiceSecret(_SECRET))
    if rank == 1:
        receiver = KVReceiver(
            pool, [transport], worker_id="d", epoch="e", checksum=True, clock=clock, lease_s=config.lease_s
        )
        await asyncio.to_thread(peer.send, await receiver.start("127.0.0.1"))
        times: list[float] = []
        for turn in range(turns + 1):
            receiver.announce(f"r{turn}", "p", blocks, 0, clock.now() + 60)
            started_s = await asyncio.to_thread(peer.recv)  # both read one clock
            received = await receiver.wait(f"r{turn}")
            times.append(received.verified_s - started_s)
            if received.proof.kv_bytes != num_bytes:
                raise RuntimeError(f"{received.proof.kv_bytes} bytes instead of {num_bytes}")
            await asyncio.to_thread(peer.send, None)
        answer.send(times[1:])
        await receiver.aclose()
    else:
        sender = KVSender(
            pool,
            [transport],
            worker_id="p",
            checksum=True,
            message_bytes=config.message_bytes,
            max_inflight_bytes=config.max_inflight_bytes,
            clock=clock,
            lease_s=config.lease_s,
            connect_timeout_s=config.connect_timeout_s,
        )
        there = KVPeer("d", "e", await asyncio.to_thread(peer.recv))
        await sender.connect(there.worker_id, there.epoch, there.endpoints)
        for turn in range(turns + 1):
            await asyncio.sleep(0.05)  # the announcement arrives
            started_s = clock.now()
            await asyncio.to_thread(peer.send, started_s)
            sender.push(f"r{turn}", there, len(blocks), clock.now() + 60)
            sender.send_blocks(f"r{turn}", 0, blocks, last=True)
            await sender.wait(f"r{turn}")
            await asyncio.to_thread(peer.recv)
        await sender.aclose()
    await transport.aclose()
