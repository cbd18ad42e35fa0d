"""pdserve around vLLM: its router beside vLLM's example proxy, its connector beside NIXL's, requests while servers are
killed, the meter beside plain clients, and what an idle connector costs.

`python -m experiments.benchmarks.vllm --vllm VENV` needs a virtual environment with vLLM's CPU build and NIXL, two
cores, and nothing else that runs on the machine. Where an instance of NIXL keeps a thread that polls without a pause
(NIXL 1.5 over UCX), each server needs a core for it (docs/vllm.md). Parts:

- ``proxy``: the same two servers (NixlConnector) through pdserve and through the proxy of vLLM's examples, in turns;
  needs ``--proxy``, the file ``toy_proxy_server.py`` of vLLM's sources. Times by a plain HTTP client; tokens per second
  with four requests at a time; greedy outputs beside those of vLLM alone, one at a time and at once.
- ``connectors``: the gap between tokens 1 and 2, less the median of the later ones, of `worker.connector` ``nixl``,
  ``pdserve``, ``pdserve`` and ``nixl``, and the prompt tokens that decode computed, by its counters (with pdserve's
  one for each request, also of warm-up: token 1, which is part of decode's prompt).
- ``kills``: greedy outputs of ``worker.connector: pdserve``, while its servers are killed in turn.
- ``meter``: what disaggregation adds to token 2 by `pdserve experiment added-ttft`, and by plain clients before and
  after it, on the same two servers.
- ``idle``: plain requests to a server with the NixlConnector and to one without, in turns; the servers change their
  cores after half of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas
import psutil
import typer

from experiments.benchmarks.frame import Only, Quick, Service, cpu_s, in_turns, note, parts, run, service
from experiments.benchmarks.vllm_servers import (
    MODEL,
    PORTS,
    VLLM,
    Dtype,
    Logs,
    ask,
    ask_vllm,
    check,
    healthy,
    native_dtype,
    saved_model,
    started_by_pdserve,
    version,
    vllm_servers,
)
from experiments.child_process import ROOT, ChildProcess
from experiments.workloads.conversation import random_tokens
from external_engines.adapter import KVCounters
from external_engines.server import client_of
from external_engines.vllm import VLLM as VLLMAdapter
from ops.launch.ports import free_ports
from pdserve import AsyncClient
from pdserve.client.generation import Generation
from pdserve.core.errors import PdserveError
from pdserve.core.interval import median_interval

_VOCABULARY = 250
_DEADLINE_S = 600.0
_PROXY_START_S = 30.0
_AT_ONCE = 4


class _Bench:
    """What the parts have in common."""

    def __init__(self, vllm: Path, proxy: Path | None, dtype: str, logs: Path, folder: Path, quick: bool) -> None:
        self._vllm, self._proxy, self._dtype, self._logs, self._quick = vllm, proxy, dtype, logs, quick
        self._tiny = ROOT / "models" / "tiny"
        self._model = self._tiny if quick else saved_model(folder, dtype)

    # --- the router beside the proxy ---------------------------------------------------------------------------------

    def proxy(self) -> dict[str, Any]:
        """Medians of paired ratios, pdserve over the proxy."""
        if self._proxy is None:
            note("the proxy is not measured: no --proxy was given")
            return {}
        lengths, rounds, output_tokens = ((16,), 2, 4) if self._quick else ((128, 512), 24, 32)
        with (
            vllm_servers(self._vllm, self._model, self._dtype, self._logs),
            self._routed() as ours,
            self._proxied(self._proxy) as proxy_port,
        ):
            ports = {"pdserve": int(ours.http.rpartition(":")[2]), "proxy": proxy_port}
            for port in ports.values():
                ask(port, range(120), output_tokens)  # warm-up
            rows = []
            for length in lengths:
                for number, arm in in_turns(ports, rounds, warm_up=1):
                    prompt = random_tokens(f"{length}/{number}", length, _VOCABULARY)
                    answer = ask(ports[arm], prompt, output_tokens)
                    rows.append({"length": length, "arm": arm, "repeat": number, **answer.figures})
            found = pandas.DataFrame(rows).query("repeat >= 0").set_index(["length", "repeat", "arm"]).unstack("arm")
            names = {"ttft": "token_1", "ttft_decode": "token_2", "last": "last_token"}
            ratios = {
                str(length): {
                    name: (of[column]["pdserve"] / of[column]["proxy"]).median() for column, name in names.items()
                }
                for length, of in found.groupby("length")
            }
            rates: dict[str, list[float]] = {arm: [] for arm in ports}
            for _, arm in in_turns(ports, 2 if self._quick else 4):
                rates[arm].append(self._tokens_per_s(ports[arm], lengths[0], output_tokens))
            return {
                "ratios": ratios,
                "tokens_per_s": {arm: statistics.median(each) for arm, each in rates.items()},
                **ours.client(self._equal_outputs),
            }

    async def _equal_outputs(self, client: AsyncClient) -> dict[str, Any]:
        """Of greedy outputs with hand-off, those that vLLM alone gives, too: one at a time, and at once. In types other
        than float32, a batch may round otherwise."""
        count = 4 if self._quick else 100
        prompts = [random_tokens(f"equal/{number}", 10 + number * 4, _VOCABULARY) for number in range(count)]
        alone = [await asyncio.to_thread(ask, PORTS["prefill"], prompt, 12) for prompt in prompts]

        async def equal(number: int) -> bool:
            answer = client.generate(prompts[number], max_tokens=12, mode="pd", ignore_eos=True, timeout_s=_DEADLINE_S)
            return list((await answer.result()).token_ids) == alone[number].tokens

        one_by_one = [await equal(number) for number in range(count)]
        together = await asyncio.gather(*(equal(number) for number in range(count)))
        return {"outputs": 2 * count, "equal_outputs": sum(one_by_one) + sum(together)}

    def _tokens_per_s(self, port: int, length: int, output_tokens: int) -> float:
        count = _AT_ONCE * (1 if self._quick else 4)
        prompts = [random_tokens(f"rate/{number}", length, _VOCABULARY) for number in range(count)]
        started_s = time.monotonic()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda prompt: ask(port, prompt, output_tokens), prompts))
        return count * output_tokens / (time.monotonic() - started_s)

    def _routed(self) -> contextlib.AbstractContextManager[Service]:
        """pdserve before the two servers."""
        urls = {f"cluster.{role}_urls": [f"http://127.0.0.1:{port}"] for role, port in PORTS.items()}
        settings = {"model.path": str(self._model), "model.name": MODEL, "model.dtype": self._dtype}
        return service({**settings, **urls}, http=True)

    @contextlib.contextmanager
    def _proxied(self, proxy: Path) -> Iterator[int]:
        """The port of vLLM's proxy before the two servers."""
        port = free_ports("127.0.0.1")
        command = [str(self._vllm.absolute() / "bin/python"), str(proxy.absolute()), "--port", str(port)]
        for name, at in zip(("prefiller", "decoder"), PORTS.values(), strict=True):
            command += [f"--{name}-hosts", "127.0.0.1", f"--{name}-ports", str(at)]
        with ChildProcess("the proxy", command, {"PYTHONPATH": ""}, self._logs / "proxy.log", talks=False) as process:
            until_s = time.monotonic() + _PROXY_START_S
            while not healthy(port, "/healthcheck"):
                if process.status is not None or time.monotonic() > until_s:
                    raise SystemExit(f"the proxy did not start{process.log_tail()}")
                time.sleep(0.2)
            yield port

    # --- pdserve's connector -----------------------------------------------------------------------------------------

    def connectors(self) -> dict[str, Any]:
        """Exposed time of hand-offs by round, in milliseconds, and of both connectors the median of all requests."""
        lengths, requests = ((16,), 1) if self._quick else ((128, 512, 2048), 8)
        order = ("nixl", "pdserve") if self._quick else ("nixl", "pdserve", "pdserve", "nixl")
        rows: list[dict[str, Any]] = []
        computed: dict[str, int] = {}
        for number, connector in enumerate(order):
            note(f"round {number + 1} of {len(order)}: {connector}")
            with self._started(self._model, connector) as ours:
                before = _counters(ours)
                rows += ours.client(partial(_exposed, (number, connector), lengths, requests))
                computed[f"{connector}_{number}"] = _counters(ours).since(before).computed
        found = pandas.DataFrame(rows)
        by_round = found.groupby(["round", "length"]).exposed_ms.median()
        medians = found.groupby(["connector", "length"]).exposed_ms.median()
        return {
            "exposed_ms": {
                str(length): {
                    f"{connector}_{number}": by_round[number, length] for number, connector in enumerate(order)
                }
                for length in lengths
            },
            "ratio": {str(length): medians["pdserve", length] / medians["nixl", length] for length in lengths},
            "requests": len(found),
            "prompt_tokens": int(found.length.sum()),
            "computed_by_decode": computed,
        }

    def _started(self, model: Path, connector: str, **settings: Any) -> contextlib.AbstractContextManager[Service]:
        """A service that starts both servers."""
        return service({**started_by_pdserve(self._vllm, model, self._dtype, connector), **settings})

    # --- kills -------------------------------------------------------------------------------------------------------

    def kills(self) -> dict[str, Any]:
        """Outputs while servers are killed in turn, each once the service is whole again."""
        requests, kills = (8, 1) if self._quick else (300, 4)
        arguments = ["--enforce-eager"]
        settings = {"model.dtype": "float32", "worker.arguments": arguments, "router.max_attempts": 4 * kills}
        with self._started(self._tiny, "pdserve", **settings) as ours:
            return ours.client(lambda client: _while_killed(ours, client, requests, kills))

    # --- the meter ---------------------------------------------------------------------------------------------------

    def meter(self) -> dict[str, Any]:
        """Median differences at token 2 with their intervals."""
        length, pairs = (16, 6) if self._quick else (512, 24)
        with vllm_servers(self._vllm, self._model, self._dtype, self._logs):
            before = _added_by_plain_clients(length, pairs, 0)
            by_meter = self._added_by_meter(length, pairs)
            after = _added_by_plain_clients(length, pairs, 1)
        agree = all(by_meter["lo"] <= each["hi"] and each["lo"] <= by_meter["hi"] for each in (before, after))
        figures = {"plain_before": before, "meter": by_meter, "plain_after": after}
        return {"added_to_token_2_ms": figures, "intervals_meet": int(agree)}

    def _added_by_meter(self, length: int, pairs: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            urls = [f"--{role}-url=http://127.0.0.1:{port}" for role, port in PORTS.items()]
            settings = {"model.path": self._model, "model.name": MODEL, "model.dtype": self._dtype}
            options = [f"--set={key}={value}" for key, value in settings.items()]
            load = ["--prompt-lens", str(length), "--rates", "", "--pairs", str(pairs), "--pairs-s", "0"]
            pdserve = [sys.executable, "-c", "from ops.cli.main import main; main()"]
            command = [*pdserve, "experiment", "added-ttft", *urls, *options, *load]
            done = subprocess.run([*command, "--output", folder, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(f"added-ttft ended with exit code {done.returncode}")
            found: dict[str, Any] = json.loads(done.stdout)["cells"][0]["added_ttft_ms"]["ttft_decode"]
            return {key: found[key] for key in ("median", "lo", "hi", "n")}

    # --- an idle connector -------------------------------------------------------------------------------------------

    def idle(self) -> dict[str, Any]:
        """With the connector over without it: medians of paired ratios, and CPU time of the idle servers."""
        length, rounds, output_tokens = (16, 2, 4) if self._quick else (512, 12, 32)
        rows = []
        used: dict[str, list[float]] = {"with": [], "without": []}
        for half, arms in enumerate((("with", "without"), ("without", "with"))):  # on either core
            connectors = tuple(arm == "with" for arm in arms)
            with vllm_servers(self._vllm, self._model, self._dtype, self._logs, connectors) as servers:
                ports = dict(zip(arms, PORTS.values(), strict=True))
                for number, arm in in_turns(ports, rounds, warm_up=1):
                    answer = ask(ports[arm], random_tokens(f"idle/{number}", length, _VOCABULARY), output_tokens)
                    rows.append({"arm": arm, "half": half, "repeat": number, **answer.figures})
                for arm, pid in zip(arms, servers.pids.values(), strict=True):
                    used[arm].append(_idle_cores(pid))
        found = pandas.DataFrame(rows).query("repeat >= 0").set_index(["half", "repeat", "arm"]).unstack("arm")
        ratios = {name: (found[name]["with"] / found[name]["without"]).median() for name in ("ttft", "itl")}
        return {"ratios": ratios, "idle_cores": {arm: statistics.fmean(each) for arm, each in used.items()}}


async def _exposed(
    at: tuple[int, str], lengths: Sequence[int], requests: int, client: AsyncClient
) -> list[dict[str, Any]]:
    """Requests one at a time, two of each length before they count."""
    number, connector = at
    rows = []
    for length in lengths:
        for index in range(-2, requests):
            prompt = random_tokens(f"{length}/{number}/{index}", length, _VOCABULARY)
            done = await client.generate(
                prompt, max_tokens=12, mode="pd", ignore_eos=True, timeout_s=_DEADLINE_S
            ).result()
            if done.kv_bytes != done.kv_bytes_expected and (done.kv_bytes or connector == "pdserve"):
                raise SystemExit(f"{connector}: {done.kv_bytes} of {done.kv_bytes_expected} bytes were moved")
            if index >= 0:
                exposed_ms = done.itl_ms[0] - statistics.median(done.itl_ms[1:])
                rows.append({"round": number, "connector": connector, "length": length, "exposed_ms": exposed_ms})
    return rows


def _counters(ours: Service) -> KVCounters:
    """Where the KV of the prompts of decode's server came from; a server tells it at a socket of this user."""
    (worker,) = (each for each in ours.status().workers if each.role == "decode")
    command = psutil.Process(worker.engine_pid).cmdline()

    async def read() -> KVCounters:
        async with client_of("http://server", command[command.index("--uds") + 1]) as http:
            return (await VLLMAdapter().load(http, 0))[1]

    return asyncio.run(read())


async def _while_killed(ours: Service, client: AsyncClient, requests: int, kills: int) -> dict[str, Any]:
    """Requests, a few at a time. In each of ``kills`` parts of them a server is killed, once a third has answered; the
    next part begins when the service is whole again."""
    prompts = [random_tokens(f"kill/{number}", 5 + number, _VOCABULARY) for number in range(requests)]

    async def answer(number: int, mode: str) -> Generation:
        stream = client.generate(prompts[number], max_tokens=24, ignore_eos=True, mode=mode, timeout_s=_DEADLINE_S)
        return await stream.result()

    alone = [await answer(number, "colocated") for number in range(requests)]
    found: dict[int, Generation] = {}
    errors: list[str] = []
    killed = []
    for part in range(kills):
        numbers = list(range(part * requests // kills, (part + 1) * requests // kills))
        enough, left = len(found) + len(errors) + len(numbers) // 3, iter(numbers)

        async def send(left: Iterator[int] = left) -> None:
            for number in left:
                try:
                    found[number] = await answer(number, "pd")
                except PdserveError as error:
                    errors.append(f"{type(error).__name__}: {error}")

        sending = [asyncio.create_task(send()) for _ in range(2 * _AT_ONCE)]
        while len(found) + len(errors) < enough and not any(each.done() for each in sending):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        worker = ours.status().workers[part % 2]
        os.kill(worker.engine_pid, signal.SIGKILL)
        killed.append(worker.worker_id)
        await asyncio.gather(*sending)
        await _whole(ours)
    for error in errors[:3]:
        note(error)
    return {
        "requests": requests,
        "equal": sum(each.token_ids == alone[number].token_ids for number, each in found.items()),
        "failed": len(errors),
        "kills": len(killed),
        "retried": sum(each.attempts > 1 for each in found.values()),
        "blocks_in_use": ours.status().used_blocks,
    }


async def _whole(ours: Service) -> None:
    """Wait until all workers serve again and have nothing to do."""
    until_s = time.monotonic() + _DEADLINE_S
    while time.monotonic() < until_s:
        status = await asyncio.to_thread(ours.status)
        if all(worker.state == "ready" for worker in status.workers) and status.idle and not status.used_blocks:
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"the service was not whole after {_DEADLINE_S:.0f} s: {status.notes}")


def _added_by_plain_clients(length: int, pairs: int, part: int) -> dict[str, Any]:
    """Disaggregated minus colocated at token 2, in pairs."""
    differences: dict[int, dict[str, float]] = {}
    for number, mode in in_turns(("pd", "colocated"), pairs, warm_up=2):
        prompt = random_tokens(f"meter/{part}/{number}", length, _VOCABULARY)
        differences.setdefault(number, {})[mode] = ask_vllm(prompt, mode, 8).figures["ttft_decode"]
    interval = median_interval([each["pd"] - each["colocated"] for at, each in differences.items() if at >= 0])
    assert interval is not None, "there are pairs"
    return interval.to_dict()


def _idle_cores(pid: int) -> float:
    """The cores that a server uses while it has no request."""
    server = psutil.Process(pid)
    family = [server, *server.children(recursive=True)]
    started_s, used_s = time.monotonic(), cpu_s(family)
    time.sleep(5.0)
    return (cpu_s(family) - used_s) / (time.monotonic() - started_s)


def vllm(
    vllm: VLLM = None,
    proxy: Annotated[Path | None, typer.Option(help="toy_proxy_server.py of vLLM's sources")] = None,
    dtype: Dtype = None,
    logs: Logs = Path("out"),
    only: Only = "",
    quick: Quick = False,
) -> dict[str, Any]:
    """Measure."""
    if vllm is None:
        raise typer.BadParameter("name the virtual environment (make bench-vllm VLLM=VENV)", param_hint="--vllm")
    check(vllm, "bench-vllm")
    with tempfile.TemporaryDirectory() as folder:
        dtype = dtype or native_dtype()
        bench = _Bench(vllm, proxy, dtype, logs, Path(folder), quick)
        found = parts(
            only,
            proxy=bench.proxy,
            connectors=bench.connectors,
            kills=bench.kills,
            meter=bench.meter,
            idle=bench.idle,
        )
    return {"benchmark": "vllm", "vllm": version(vllm), "dtype": dtype, **found}


if __name__ == "__main__":
    run(vllm)
