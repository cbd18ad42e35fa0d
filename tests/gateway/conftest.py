from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from checkpoints.source import DUMMIES, ModelSource
from contract.control import BEAT_ANSWERS, MAX_BEAT_BYTES, Beat, BeatAnswer
from contract.message import encode
from gateway.gateway import Gateway
from gateway.tokenizer import Tokenizer
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import WorkerLost
from pdserve.core.prefix_digests import BlockUpdate
from pdserve.core.worker import Role, WorkerInfo, WorkerLoad
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.fake_worker import FakeWorker, fake_info
from tests.loopback import SECRET
from worker.authentication import REGISTRY, open_stream, stream_channel
from worker.links import LinkKeeper

PATIENT = {"heartbeat_timeout_s": 86_400.0}
"""For `router`: fake workers report when told to."""

PROMPT = pb.TokenIds(ids=[1, 2, 3, 4, 5])
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a b c d",
    "größer, schöner — naïve café",
    "日本語 😀 👩‍👩‍👧",
] * 5


def build_byte_level(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A small byte-level BPE folder, with <s> and </s> as special tokens 0 and 1."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|a tool|>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@dataclass
class Service:
    """A gateway on loopback, a channel to it, and fake workers that report when told to."""

    gateway: Gateway
    channel: grpc.aio.Channel
    fleet: dict[str, FakeWorker]
    infos: dict[str, WorkerInfo] = field(default_factory=dict)
    connects: list[str] = field(default_factory=list)
    links: dict[FakeWorker, LinkKeeper] = field(default_factory=dict)
    beats: set[asyncio.Task[BeatAnswer]] = field(default_factory=set)
    turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)

    async def connect(self, info: WorkerInfo) -> FakeWorker:
        self.connects.append(f"{info.worker_id}/{info.epoch}")
        worker = self.fleet.get(info.worker_id)
        if worker is None or worker.info.epoch != info.epoch:
            raise WorkerLost(f"worker {info.worker_id} does not answer")
        return worker

    def make(self, worker_id: str, **changes: Any) -> FakeWorker:
        """A fake worker (or a new incarnation of one) that has not reported yet."""
        role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
        info = replace(fake_info(worker_id, role), **changes)
        self.infos[worker_id] = info
        worker = FakeWorker(info, self.fleet)

        def beat_at_once() -> None:
            task = asyncio.create_task(self.beat(worker_id))
            self.beats.add(task)
            task.add_done_callback(self.beats.discard)

        worker.on_request_heartbeat = beat_at_once
        self.links[worker] = LinkKeeper(worker.connect_peer, worker.open_links, beat_at_once)
        return worker

    async def beat(self, worker_id: str, blocks: BlockUpdate | None = None, **changes: Any) -> BeatAnswer:
        """One heartbeat, and the links that its answer wants. When they are there, or the gateway asks for it, another
        follows at once."""
        async with self.turns[worker_id]:  # as over a worker's one stream: an older beat never comes after a newer one
            info = replace(self.infos[worker_id], **changes)
            links = self.links[self.fleet[worker_id]] if worker_id in self.fleet else None
            load = WorkerLoad(free_blocks=info.num_blocks)
            beat = Beat(info, load, [] if links is None else links.states(), blocks)
            answer = BEAT_ANSWERS.decode(await self.report(encode(beat)))
            if links is not None:
                links.want("", answer.peers)
            return answer

    async def report(self, data: bytes) -> bytes:
        """The gateway's answer to one message on the registry port, over a connection of its own: one connection bears
        few streams, and those that have just been cancelled count."""
        address = self.gateway.registry_address
        async with stream_channel(address, MAX_BEAT_BYTES) as registry:
            stream = await open_stream(registry, REGISTRY, SECRET, address)
            await stream.write(data)
            answer = await stream.read()
        assert isinstance(answer, bytes)
        return answer

    async def stop(self) -> None:
        """No more heartbeats; then the gateway ends."""
        for task in list(self.beats):
            task.cancel()
        for links in self.links.values():
            await links.aclose()
        await self.channel.close(None)
        await self.gateway.stop(0.1)

    async def bring_up(self, *worker_ids: str) -> None:
        """Make workers, report them, and wait until the service serves."""
        for worker_id in worker_ids:
            if worker_id not in self.fleet:
                self.make(worker_id)
            await self.beat(worker_id)
        await self.gateway.wait_serving(30.0)

    def peers_of(self, worker_id: str) -> set[str]:
        """The workers that a worker has links to, as the gateway knows it."""
        worker = self.gateway.registry.get(worker_id)
        return set() if worker is None else {peer for peer, _ in worker.linked}

    async def generate(self, max_tokens: int = 0, **fields: Any) -> tuple[list[pb.Token], pb.Completion]:
        """A whole stream of `PROMPT`, unless it is given another one, its shape checked: tokens, then one
        completion."""
        if not fields.keys() & {"token_ids", "text"}:
            fields["token_ids"] = PROMPT
        if max_tokens:
            fields["sampling"] = pb.Sampling(max_tokens=max_tokens)
        messages = [m async for m in self.stub.Generate(pb.GenerateRequest(**fields), timeout=10)]
        assert [m.WhichOneof("message") for m in messages] == ["token"] * (len(messages) - 1) + ["completion"]
        return [m.token for m in messages[:-1]], messages[-1].completion

    async def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Return once ``condition()`` holds; a failed assertion after ``timeout_s``."""
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            await asyncio.sleep(0.01)
        assert condition()

    @property
    def is_idle(self) -> bool:
        """Whether `check_idle` would pass."""
        try:
            self.check_idle()
        except AssertionError:
            return False
        return True

    def check_idle(self) -> None:
        for worker in self.gateway.registry.workers:
            assert (worker.outstanding_tokens, worker.outstanding_requests, worker.prompt_tokens) == (0, 0, 0)
        assert all(not worker.held for worker in self.fleet.values())


async def settle() -> None:
    """Wait a number of turns of the event loop, in which all pending work of this process is done."""
    for _ in range(100):
        await asyncio.sleep(0)
    for _ in range(10):  # several waits, as this process may be stopped during one
        await asyncio.sleep(0.003)


async def call_error(service: Service, mode: pb.Mode.ValueType = pb.MODE_PD) -> grpc.aio.AioRpcError:
    """The error that ends a request with `PROMPT`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.generate(mode=mode)
    return caught.value


def fake_model(folder: Path | None = None) -> ModelSource:
    """A model with a context of 256 tokens."""
    return ModelSource("fake", folder, replace(DUMMIES["135m"], max_position_embeddings=256), "")


StartService = Callable[..., Awaitable[Service]]


@contextlib.asynccontextmanager
async def services(model_folder: Path) -> AsyncIterator[StartService]:
    """Starts services, and stops them at the end."""
    started: list[Service] = []

    async def start(
        *workers: str,
        folder: Path | None = model_folder,
        cache_key: bytes | None = None,
        restarted: bool = False,
        **settings: Any,
    ) -> Service:
        config = PdserveConfig.parse({"gateway": {"host": "127.0.0.1", "port": 0}, **settings})
        fleet: dict[str, FakeWorker] = {}
        service: Service

        async def connect(info: WorkerInfo, gateway_epoch: str) -> FakeWorker:
            return await service.connect(info)

        gateway = Gateway(
            config,
            model=fake_model(folder),
            connect=connect,
            secret=SECRET,
            version="1.2.3",
            cache_key=cache_key,
            restarted=restarted,
        )
        await gateway.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}")
        service = Service(gateway, channel, fleet)
        started.append(service)
        if workers:
            await service.bring_up(*workers)
        return service

    try:
        yield start
    finally:
        for service in started:
            await service.stop()


@pytest.fixture
async def start_service(model_folder: Path) -> AsyncIterator[StartService]:
    async with services(model_folder) as start:
        yield start


@pytest.fixture
async def service(start_service: StartService) -> Service:
    """A service of one pair."""
    return await start_service("p0", "d0", router=PATIENT)
