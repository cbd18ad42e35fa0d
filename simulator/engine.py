"""An engine process of the world: the real `EngineCore` and scheduler over `simulator.model`."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

from contract.engine import Command, EngineEvent, KVEvent, KVReady, Ping, Pong, Ready, Submit
from engine.core import ComputedStep, EngineCore
from engine.offload import BlockStore, MemoryStore, OffloadConnector
from engine.scheduling.batch import PENDING, LayerHook, SampledToken, ScheduledSeq, StepTooLarge
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.scheduling.speculation import DraftContext, Drafter
from kv_transfer.memory import HostMemory
from pdserve.core.kv_layout import KVLayout, Region
from pdserve.core.request import EngineStatus, Request
from simulator.loop import Mailbox, WorldLoop
from simulator.model import EOS_TOKEN_ID, NUM_LAYERS, SLOT_BYTES, VOCAB_SIZE, Chain
from simulator.network import Process

KILLED = -9
TIGHT_SHARE = 0.3
"""So many of the steps that may run out of memory do."""


class Violation(AssertionError):
    """Something happened that must not."""


class WorldEngine:
    """Implements `contract.engine.EnginePort` for the worker thread ``control``. ``memory`` is its pool, and ``store``
    keeps cold blocks."""

    def __init__(
        self,
        worker: Process,
        control: WorldLoop,
        layout: KVLayout,
        config: SchedulerConfig,
        memory: HostMemory,
        store: BlockStore | None,
        chance: random.Random,
        *,
        run_ahead: bool,
        layer_groups: int,
        step_s: tuple[float, float],
        tight_tokens: int | None = None,
        speculates: bool = False,
    ) -> None:
        self.process = Process(worker.network, f"{worker.name}/engine", worker.host)
        worker.children.append(self.process)
        self.process.on_death.append(self._died)
        self.loop = self.process.loop("steps")
        self.layout, self._config, self._memory = layout, config, memory
        self._control, self._chance, self._step_s = control, chance, step_s
        self._events: Mailbox[EngineEvent | None] = Mailbox()
        self._kv_reader = _KVReader()
        self._inbox: list[Command] = []
        self._wake = asyncio.Event()
        clock = self.process.clock
        self.runner = _Runner(layout, memory, config.num_blocks, chance, tight_tokens)
        connector = KVConnector(clock, layout, layer_groups)
        self._cold: OffloadConnector | None = None
        if store is not None:
            reader = _Reader(self.process.loop("offload"), chance, step_s)
            connector = self._cold = OffloadConnector(
                clock, layout, layer_groups, store, self._read_block, self._write_block, self._done, reader
            )
        connector.worth_bytes = layout.block_bytes
        drafter = WorldDrafter(self.runner.new_chain, chance) if speculates else None
        self.scheduler = Scheduler(config, clock, connector, drafter)
        self._pipe = _Pipe(control, self._events, self._kv_reader)
        self.core = EngineCore(self.scheduler, self.runner, clock, self._pipe, run_ahead)
        self.returncode: int | None = None
        self.loop.call_soon(lambda: self.loop.create_task(self._run()))

    pid = 0

    @property
    def ready(self) -> Ready:
        """Its first message."""
        return Ready(
            layout=self.layout,
            dtype=self.layout.dtype,
            num_blocks=self._config.num_blocks,
            pool_handle={},
            max_model_len=self._config.max_model_len,
            vocab_size=VOCAB_SIZE,
            device="cpu",
            cores=[],
            load_s=0.0,
            eos_token_ids=[EOS_TOKEN_ID],
        )

    # --- the worker's side -------------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """See `EnginePort`."""
        self.loop.call_soon(self._take, command)

    async def events(self) -> AsyncIterator[EngineEvent]:
        """See `EnginePort`."""
        while (event := await self._events.get()) is not None:
            yield event

    def take_kv_events(self) -> _KVReader:
        """See `EnginePort`."""
        return self._kv_reader

    async def stop(self, timeout_s: float) -> None:
        """See `EnginePort`."""
        self.process.kill()

    def _died(self) -> None:
        if self.returncode is None:
            self.returncode = KILLED
            self._control.call_soon(self._events.put, None)

    def _block(self, block: int) -> Region:
        return Region(block * self.layout.block_bytes, self.layout.block_bytes)

    def _read_block(self, block: int) -> bytes:
        return bytes(self._memory.view(self._block(block)))

    def _write_block(self, block: int, data: bytes) -> None:
        region = self._block(block)
        self.check_access([region])
        self._memory.view(region)[:] = data

    @property
    def reading(self) -> list[str]:
        """The attempts whose cold blocks are being read."""
        if self._cold is None:
            return []
        waiting = [(attempt_id, self.scheduler._seqs.get(attempt_id)) for attempt_id in self._cold._readings]
        return [each for each, seq in waiting if seq is not None and seq.status is EngineStatus.WAITING_FOR_KV]

    def _done(self, command: KVReady) -> None:
        self.loop.call_soon(self._take, command)

    def check_access(self, regions: Sequence[Region]) -> None:
        """Raise `Violation` if a link reads or writes a block that is free, or what reads cold blocks writes one."""
        for region in regions:
            for block in range(region.offset // self.layout.block_bytes, _last(region) // self.layout.block_bytes + 1):
                if block < self._config.num_blocks:
                    if not self.scheduler.blocks.is_owned(block):
                        raise Violation(f"{self.process.name}: block {block} is accessed, and is free")
                    self.runner.touch(block)

    # --- the engine's side -------------------------------------------------------------------------------------------

    def _take(self, command: Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    async def _run(self) -> None:
        busy = False
        while True:
            if not busy and not self._inbox:
                self._wake.clear()
                await self._wake.wait()
            commands, self._inbox = self._inbox, []
            for command in commands:
                if isinstance(command, Ping):
                    self._pipe.send(Pong())
                    continue
                self.runner.note(command)
                self.core.take(command)
            if self.scheduler.has_work or busy:
                await asyncio.sleep(self._chance.uniform(*self._step_s))  # the device computes; commands wait
            busy = self.core.step()


class WorldDrafter(Drafter):
    """Guesses tokens that are right up to a random place. ``start`` returns the chain of a new request."""

    def __init__(self, start: Callable[[str], Chain], chance: random.Random) -> None:
        self._start, self._chance = start, chance
        self._chains: dict[str, Chain] = {}
        self.free = chance.random() < 0.5

    def prepare(self, contexts: Sequence[DraftContext], budget: int) -> list[int]:
        """See `Drafter`."""
        return [self._chance.randrange(context.most + 1) for context in contexts]

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`."""
        return [self._propose(context) for context in contexts]

    def forget(self, attempt_id: str) -> None:
        """See `Drafter`."""
        self._chains.pop(attempt_id, None)

    def _propose(self, context: DraftContext) -> list[int]:
        end = len(context.token_ids)
        chain = self._chains.get(context.attempt_id)
        if chain is None:
            chain = self._chains[context.attempt_id] = self._start(context.attempt_id)
        for token_id in context.token_ids[len(chain.token_ids) :]:
            chain.append(token_id)
        for _ in range(context.most):
            chain.append(chain.token_at(len(chain.token_ids)))
        guess = chain.token_ids[end:]
        chain.cut(end)
        if self._chance.random() < 0.5:
            guess[self._chance.randrange(context.most)] = self._chance.randrange(VOCAB_SIZE)
        return guess


class DiskError(OSError):
    """What `FailingStore` raises."""


class FailingStore(MemoryStore):
    """A store of cold blocks that drops so large a share of what it is given, and has lost or cannot read as large a
    share of what it is asked for."""

    def __init__(self, max_bytes: int, fail_share: float, chance: random.Random) -> None:
        super().__init__(max_bytes)
        self._fail_share, self._chance = fail_share, chance

    def put(self, digest: bytes, data: bytes) -> None:
        """See `BlockStore`."""
        if self._chance.random() >= self._fail_share:
            super().put(digest, data)

    def get(self, digest: bytes) -> bytes | None:
        """See `BlockStore`."""
        if self._chance.random() < self._fail_share:
            if self._chance.random() < 0.5:
                raise DiskError("the disk fails")
            return None
        return super().get(digest)


class _Reader:
    """Implements `engine.offload.Reader` on the thread ``loop``. A block takes as long as a step."""

    def __init__(self, loop: WorldLoop, chance: random.Random, step_s: tuple[float, float]) -> None:
        self._loop, self._chance, self._step_s = loop, chance, step_s
        self._works: deque[Iterator[None]] = deque()

    def put(self, work: Iterator[None]) -> None:
        """See `Reader`."""
        self._works.append(work)
        if len(self._works) == 1:
            self._read_later()

    def close(self) -> None:
        """See `Reader`."""

    def _read_later(self) -> None:
        self._loop.call_later(self._chance.uniform(*self._step_s), self._read)

    def _read(self) -> None:
        if next(self._works[0], self) is self:
            self._works.popleft()
        if self._works:
            self._read_later()


class _Pipe:
    """The engine's outbox (`engine.core.Outbox`)."""

    def __init__(self, control: WorldLoop, events: Mailbox[EngineEvent | None], kv: _KVReader) -> None:
        self._control, self._events, self._kv = control, events, kv

    def send(self, *events: EngineEvent) -> None:
        """Send events to the worker's control loop."""
        for event in events:
            self._control.call_soon(self._events.put, event)

    def send_kv(self, *events: KVEvent) -> None:
        """Send events to its KV loop."""
        for event in events:
            self._kv.put(event)


class _KVReader:
    """Implements `contract.engine.KVEventReader`, over a pipe."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_event: Callable[[KVEvent], None] | None = None
        self._pipe: list[KVEvent] = []

    def follow(self, on_event: Callable[[KVEvent], None]) -> None:
        """See `KVEventReader`."""
        self._loop, self._on_event = asyncio.get_running_loop(), on_event

    def close(self) -> None:
        """See `KVEventReader`."""
        self._on_event = None

    def put(self, event: KVEvent) -> None:
        """Pass an event on."""
        self._pipe.append(event)
        if self._loop is not None and len(self._pipe) == 1:
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        """Read the pipe, which was readable some time ago: with what has come since."""
        events, self._pipe = self._pipe, []
        for event in events:
            if self._on_event is not None:
                self._on_event(event)


class _Known(msgspec.Struct, eq=False):
    """The chain of a request, and which of its full blocks held the right KV at the time ``stamp``."""

    request: Request
    chain: Chain
    blocks: list[int] = []
    stamp: int = 0


class _Runner:
    """Computes steps: checks the KV that a request reads, writes that of its new tokens, and samples.

    A full block is checked again when it was written since, or is another one."""

    def __init__(
        self, layout: KVLayout, memory: HostMemory, num_blocks: int, chance: random.Random, tight_tokens: int | None
    ) -> None:
        self._chance, self._tight_tokens = chance, tight_tokens
        self._size, self._block_bytes = layout.block_size, layout.block_bytes
        self._pool = memory.view(Region(0, num_blocks * layout.block_bytes))
        self._written = [0] * num_blocks  # when each block was written, counted in writes
        self._writes = 0
        self._known: dict[str, _Known] = {}
        self._pending: dict[str, int] = {}

    def note(self, command: Command) -> None:
        """Take note of new requests."""
        if isinstance(command, Submit):
            request = command.request
            self._known[request.attempt_id] = _Known(request, Chain(request.salt, request.token_ids))

    def new_chain(self, attempt_id: str) -> Chain:
        """A chain of the tokens that a request came with."""
        request = self._known[attempt_id].request
        return Chain(request.salt, request.token_ids)

    def touch(self, block: int) -> None:
        """Note that a block may be written."""
        self._writes += 1
        self._written[block] = self._writes

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> ComputedStep:
        """See `engine.core.Runner`."""
        size, most = sum(len(seq.token_ids) for seq in seqs), self._tight_tokens
        if most is not None and size > most and self._chance.random() < TIGHT_SHARE:
            raise StepTooLarge("the device of the world")
        known = [self._known[seq.attempt_id] for seq in seqs]
        for seq, each in zip(seqs, known, strict=True):
            self._extend(each.chain, seq)
            self._check(each, seq)
        for layer in range(NUM_LAYERS):
            for seq, each in zip(seqs, known, strict=True):
                self._write(each.chain.rows[layer], seq, layer)
            if hook is not None and layer + 1 in hook.after:
                hook.done(layer + 1)
        sampled: dict[str, list[SampledToken]] = {}
        for seq, each in zip(seqs, known, strict=True):
            if (prompt := seq.prompt_logprobs) is not None:
                prompt.values += each.chain.prompt_logprobs(prompt.missing(seq.start, seq.end)[0])
            if seq.sample:
                accepted, chain = seq.end - seq.num_drafts, each.chain
                token_ids = [chain.token_at(place) for place in range(accepted, seq.end + 1)]
                while accepted < seq.end and chain.token_ids[accepted] == chain.token_at(accepted):
                    accepted += 1
                chain.cut(accepted)
                self._pending[seq.attempt_id] = token_ids[-1]
                sampled[seq.attempt_id] = [SampledToken(token_id) for token_id in token_ids]
        return ComputedStep(sampled)

    def _extend(self, chain: Chain, seq: ScheduledSeq) -> None:
        if chain.token_ids[seq.start : seq.end] == seq.token_ids:
            return
        for position, token_id in enumerate(seq.token_ids, seq.start):
            actual = self._pending[seq.attempt_id] if token_id == PENDING else token_id
            if position == len(chain.token_ids):
                chain.append(actual)
            elif position > len(chain.token_ids) or chain.token_ids[position] != actual:
                raise Violation(f"{seq.attempt_id}: token {actual} at {position} is not the one before")

    def _check(self, known: _Known, seq: ScheduledSeq) -> None:
        """Raise `Violation` unless the KV before the step's tokens is that of the request's own tokens."""
        size, written, blocks = self._size, self._written, known.blocks
        num_full = seq.start // size
        table = seq.block_ids[:num_full]
        if blocks != table[: len(blocks)] or any([written[block] > known.stamp for block in blocks]):
            blocks = []
        for place in range(len(blocks), -(-seq.start // size)):
            self._check_block(known.chain, seq, place)
        known.blocks, known.stamp = list(table), self._writes

    def _check_block(self, chain: Chain, seq: ScheduledSeq, place: int) -> None:
        size, block = self._size, seq.block_ids[place]
        first, last = place * size * SLOT_BYTES, min((place + 1) * size, seq.start) * SLOT_BYTES
        for layer in range(NUM_LAYERS):
            offset = block * self._block_bytes + layer * size * SLOT_BYTES
            if self._pool[offset : offset + last - first] != chain.rows[layer][first:last]:
                raise Violation(
                    f"{seq.attempt_id}: block {block} (its {place}.) holds other KV than that of its tokens, in layer "
                    f"{layer}"
                )

    def _write(self, row: bytearray, seq: ScheduledSeq, layer: int) -> None:
        start, end, size = seq.start, seq.end, self._size
        while start < end:
            block, stop = seq.block_ids[start // size], min(end, (start // size + 1) * size)
            offset = block * self._block_bytes + (layer * size + start % size) * SLOT_BYTES
            self._pool[offset : offset + (stop - start) * SLOT_BYTES] = row[start * SLOT_BYTES : stop * SLOT_BYTES]
            self.touch(block)
            start = stop


def _last(region: Region) -> int:
    return region.offset + region.size - 1
