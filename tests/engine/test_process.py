"""Real engine processes: their tokens, and every way in which they end. `tests.e2e.test_tokens` has hand-offs between
two of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from contract.engine import (
    Abort,
    EngineEvent,
    KVEvent,
    KVRole,
    Load,
    Ready,
    Rejected,
    Reserved,
    Step,
    Submit,
    TokenOut,
)
from engine.process.build import build_engine
from engine.process.client import EngineClient
from engine.spec import EngineSpec
from pdserve.core.errors import ConfigError, LaunchError, ModelError
from tests.engine.harness import submit
from tests.engine.test_loader import flip
from tests.random_models import greedy_tokens, save_random_model

START_S = 60.0
TOKENS = 12
PROMPT = [(i * 37 + 11) % 300 for i in range(45)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose ids 305 and 304 end a request. It never samples them here."""
    model = save_random_model(tmp_path_factory.mktemp("models"), "gqa")
    (model / "generation_config.json").write_text('{"eos_token_id": [305, 304]}')
    return model


class Engine:
    """An engine and what it has said so far."""

    def __init__(self, client: EngineClient, ready: Ready) -> None:
        self.client, self.ready = client, ready
        self.seen: list[EngineEvent | KVEvent] = []
        self._changed = asyncio.Event()
        self._events = client.take_kv_events()
        self._events.follow(self._hear)
        self._reading = asyncio.create_task(self._read())

    def _hear(self, event: EngineEvent | KVEvent) -> None:
        self.seen.append(event)
        self._changed.set()

    async def _read(self) -> None:
        try:
            async for event in self.client.events():
                self._hear(event)
        finally:
            self._changed.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Return once ``done``; StopAsyncIteration if the engine ends before that."""
        async with asyncio.timeout(60.0):
            while not done():
                if self._reading.done():
                    raise StopAsyncIteration
                self._changed.clear()
                await self._changed.wait()

    async def aclose(self) -> None:
        """Read no more."""
        await self._reading
        self._events.close()

    def steps(self) -> list[Step]:
        """All steps so far."""
        return [e for e in self.seen if isinstance(e, Step)]

    def tokens(self, attempt_id: str) -> list[TokenOut]:
        """All tokens of a request so far."""
        return [t for step in self.steps() for t in step.tokens if t.attempt_id == attempt_id]

    def reserved(self, attempt_id: str) -> list[Reserved]:
        """Reservations of a request so far."""
        return [e for e in self.seen if isinstance(e, Reserved) and e.attempt_id == attempt_id]

    def load(self) -> Load:
        """The last load it told."""
        return [e for e in self.seen if isinstance(e, Load)][-1]

    def idle(self, num_blocks: int) -> bool:
        """Whether it said last that nothing is under way and all blocks are free."""
        load = self.load()
        return (load.free_blocks, load.running, load.waiting) == (num_blocks, 0, 0)

    async def finished(self, attempt_id: str) -> list[int]:
        """The tokens of a request, once it has its last."""
        await self.until(lambda: any(t.finish_reason for t in self.tokens(attempt_id)))
        return [t.token_id for t in self.tokens(attempt_id)]


def _spec(folder: Path, **changes: object) -> EngineSpec:
    fields: dict[str, object] = {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 16} | changes
    return EngineSpec(model=str(folder), **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def _engine(spec: EngineSpec) -> AsyncIterator[Engine]:
    client, engine = EngineClient(), None
    try:
        ready = await client.start(spec, START_S)
        engine = Engine(client, ready)
        yield engine
    finally:
        await client.stop(5.0)
        if engine is not None:
            await engine.aclose()
    assert not psutil.pid_exists(client.pid)


def _submit(attempt_id: str, role: KVRole, max_tokens: int = TOKENS, **changes: Any) -> Submit:
    return submit(attempt_id, role, **{"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **changes})


# --- one engine for all that leave it idle ---------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """An engine on one core, started where another package has its name."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "engine").mkdir()
    (elsewhere / "engine" / "__init__.py").write_text("raise AssertionError('imported from the current directory')")
    core = min(os.sched_getaffinity(0))
    with contextlib.chdir(elsewhere):
        async with _engine(_spec(folder, cores=(core,), max_num_seqs=1, run_ahead=True)) as engine:
            yield engine
    assert engine.client.returncode == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_local_generation_equals_transformers(shared: Engine, folder: Path) -> None:
    expected = greedy_tokens(folder, PROMPT, TOKENS)
    os.kill(shared.client.pid, signal.SIGINT)  # which does not end it
    for i in range(3):
        shared.client.send(_submit(f"r{i}", KVRole.LOCAL))
    for i in range(3):
        assert await shared.finished(f"r{i}") == expected
    await shared.until(lambda: shared.idle(64))
    first = shared.tokens("r0")[0]
    assert first.first_scheduled_s <= shared.steps()[0].step_started_s < shared.steps()[0].sampled_s
    assert shared.tokens("r0")[-1].finish_reason == "length"
    shared.client.send(_submit("r", KVRole.LOCAL, max_tokens=2000))
    await shared.until(lambda: any(isinstance(e, Rejected) for e in shared.seen))
    (rejected,) = (e for e in shared.seen if isinstance(e, Rejected))
    assert (rejected.attempt_id, rejected.kind) == ("r", "CapacityExceeded")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_keeps_to_its_cores_and_loads_neither_grpc_nor_ray(shared: Engine) -> None:
    process = psutil.Process(shared.client.pid)
    assert process.cpu_affinity() == shared.ready.cores == [min(os.sched_getaffinity(0))]
    libraries = {Path(m.path).name for m in process.memory_maps()}
    assert any("torch" in name for name in libraries)
    assert not any("cygrpc" in name or "_raylet" in name for name in libraries)


# --- engines of their own --------------------------------------------------------------------------------------------


async def test_blocks_on_disk_of_other_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    """Although the file's size and times are the same."""
    model, cold = tmp_path / "model", tmp_path / "cold"
    shutil.copytree(folder, model)
    spec = _spec(model, dtype="float32", num_blocks=8, offload_folder=str(cold), offload_disk_bytes=2**26)

    async def cached_tokens(*attempt_ids: str) -> int:
        """Of the prompt's blocks. Further attempts are of other prompts, for which the pool has to forget it."""
        async with _engine(spec) as engine:
            for number, attempt_id in enumerate(attempt_ids):
                prompt = [(token + number) % 300 for token in PROMPT]
                engine.client.send(_submit(attempt_id, KVRole.LOCAL, prompt=prompt, max_tokens=4))
                await engine.finished(attempt_id)
            return engine.tokens(attempt_ids[0])[0].cached_tokens

    assert (await cached_tokens("a", "b", "c"), await cached_tokens("a")) == (0, 40)
    file = model / "model.safetensors"
    flip(file, file.stat().st_size // 2)
    assert await cached_tokens("a") == 0


async def test_a_client_that_never_started_an_engine_stops() -> None:
    client = EngineClient()
    client.send(Abort("r"))  # ignored
    await client.stop(1.0)
    assert client.returncode is None


_PARENT = """
import asyncio, sys
from engine.process.build import build_engine
from engine.process.client import EngineClient
from engine.spec import EngineSpec

async def main():
    client = EngineClient()
    await client.start(EngineSpec(sys.argv[1], num_blocks=8), 60.0)
    sys.stdout.write(f"{client.pid}\\n")
    sys.stdout.flush()
    await asyncio.sleep(60.0)

asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent(folder: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(folder)], stdout=subprocess.PIPE, cwd=root, text=True
    ) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _, alive = psutil.wait_procs([engine], timeout=5.0)
        assert not alive


async def test_the_engine_ends_when_the_command_pipe_closes(folder: Path) -> None:
    async with _engine(_spec(folder)) as engine:
        engine.client._close_commands()
        with pytest.raises(StopAsyncIteration):
            await engine.until(lambda: False)
        assert engine.client.returncode == 0


@pytest.mark.parametrize(
    ("model", "cores", "error", "message"),
    [
        ("/nowhere", (), ModelError, "/nowhere: no such folder"),
        (None, (4095,), LaunchError, r"cannot bind the engine to cores \[4095\]"),
    ],
)
async def test_what_keeps_an_engine_from_starting_is_raised(
    folder: Path, model: str | None, cores: tuple[int, ...], error: type[Exception], message: str
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    client = EngineClient()
    with pytest.raises(error, match=message):
        await client.start(_spec(Path(model or folder), cores=cores), START_S)
    assert not psutil.pid_exists(client.pid)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, r"^engine\.max_model_len: 513 exceeds the model's context of 512"),
        ({"num_blocks": None, "kv_memory_bytes": 1000}, r"^engine\.kv_memory_mb: .* less than one block"),
        pytest.param(
            {"device": "cuda"},
            r"^cluster\.device: cuda is set",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_settings_that_do_not_fit_the_model(
    folder: Path, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda _: None)  # which works once in a process
    with pytest.raises(ConfigError, match=message):
        build_engine(_spec(folder, **changes), memory_fd=-1)


async def test_a_start_that_takes_too_long_is_given_up(folder: Path) -> None:
    client = EngineClient()
    with pytest.raises(LaunchError, match=r"not ready within 0\.05 s"):
        await client.start(_spec(folder), 0.05)
    assert not psutil.pid_exists(client.pid)
