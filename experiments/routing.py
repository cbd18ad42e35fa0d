"""``pdserve experiment routing``: the routing policies on a trace in which many requests share few beginnings.

The trace has Mooncake's format (`experiments.workloads.trace`, or a file of one's own). Its shared beginnings together
are larger than the KV pool of one worker, and smaller than all of them: a policy that sends requests to where their
beginning is cached computes less. Requests decode where they were prefilled (mode ``colocated``), so that all workers
are equal and the choice of one is all that differs.

Each policy is a service of its own. There are rounds; in each of them every policy gets the same requests at the same
times, with cold prefix caches, in an order that is reversed from round to round. The rate is calibrated: a share of the
prompts per second that the workers could compute without any cache."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Unpack

from pydantic import Field

from checkpoints.source import resolve_model
from experiments.deployment import Deployment, Service
from experiments.environment import devices_here
from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.matrix import late_text
from experiments.modes import REQUEST_TIMEOUT_S
from experiments.report.drawing import PALETTE, Mark, Panel, Picture, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, FinishedCell, Parameters, Rows, RunData, values_of
from experiments.statistics import percentile, plain_mean
from experiments.warm_up import requests_of, warm_up
from experiments.workloads.arrivals import timed_arrivals
from experiments.workloads.conversation import Room
from experiments.workloads.trace import TRACE_BLOCK_SIZE, SkewedPrefixes, Trace
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.chance import SYSTEM
from pdserve.core.config import NAMES, ROUTING_POLICIES, PdserveConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, apart, interval_text
from pdserve.core.request import Mode, counted

BASELINE = "round_robin"
_BY_ANNOUNCEMENTS = frozenset({"prefix_affinity", "kv_aware"})
_CALIBRATION = "calibration"
_CALIBRATION_PROMPTS = 6
_OUTPUT_TOKENS = 4
_SLO_MS = 1000.0
"""The objective of policy ``slo``, which chooses the least predicted TTFT, whatever the objective is."""
_OWN_BLOCKS, _SKEW = 2, 0.8
"""Most blocks of a prompt after its shared beginning; beginning number r is drawn with a probability like r^-0.8."""


class RoutingOptions(Options):
    """Options of `Routing`."""

    model: str = Field("tiny", description="model of the services that are started (as model.path)")
    policies: tuple[str, ...] = option(
        tuple(name for name in ROUTING_POLICIES if name != "nearest_link"),  # all links are within a host
        description="policies to compare",
        quick=[BASELINE, "least_tokens", "prefix_affinity", "kv_aware"],
    )
    rounds: int = option(2, ge=1, description="loads of each policy", quick=1)
    duration_s: float = option(12.0, gt=0, le=86_400, description="seconds of each load", quick=10.0)
    load: float = Field(
        1.1,
        gt=0,
        description="arrivals, as a share of the prompts that the workers could compute without caches",
    )
    rate: float | None = Field(None, gt=0, description="arrivals per second, instead of --load")
    workers: int = Field(4, ge=2, le=64, description="workers")
    num_blocks: int = Field(120, ge=1, description="KV blocks of each worker")
    block_size: int = Field(64, ge=1, description="tokens of a KV block, and of a hash id of the trace")
    prefixes: int = Field(16, description="shared beginnings of prompts")
    prefix_blocks: int = Field(20, description="blocks of each of them")
    backlog: int = Field(
        8192, ge=1, description="tokens of prompts that may wait on a worker (router.prefill_backlog_tokens)"
    )
    trace: str | None = Field(None, description="a Mooncake trace instead of these prompts, sent at its own times")


class Routing(Experiment):
    """See the module."""

    name = "routing"
    question = "Which routing policy gives the lowest TTFT when prompts share long beginnings?"
    options_type = RoutingOptions
    needs_own = "routing starts services, because the policy of a running one cannot be changed"
    fixed_options: ClassVar[Parameters] = {"own_blocks": _OWN_BLOCKS, "skew": _SKEW}
    starts_other_engines: ClassVar[bool] = True
    options: RoutingOptions
    _config = PdserveConfig()
    """Of the services, without what differs between cells."""

    def deployment(self, report: Callable[[str], None], **service: Unpack[Service]) -> Deployment:
        """See `RunKind.deployment`. Notes which engines the services have."""
        deployment = super().deployment(report, **service)
        if not deployment.attached:
            self._config = deployment.configuration({})
        return deployment

    @property
    def _names_servers(self) -> bool:
        """Whether the workers are servers that run already, and keep their options and caches."""
        return bool(self._config.cluster.servers)

    @property
    def _left_out(self) -> list[str]:
        """Policies that are not measured: other engines do not announce what they have cached."""
        own = self._config.has_own_engines
        return [name for name in self.options.policies if name in _BY_ANNOUNCEMENTS and not own]

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """The calibration, then one cell per round and policy."""
        options = self.options
        known = NAMES["router.policy"]()
        if unknown := [name for name in options.policies if name not in known]:
            raise InvalidRequest(f"--policies: {unknown[0]!r} is none of {', '.join(known)}")
        if not options.policies:
            raise InvalidRequest("--policies: is empty")
        if self._config.worker.engine == "sglang":
            raise InvalidRequest("worker.engine: SGLang servers that are started serve no colocated requests")
        if not (policies := tuple(name for name in options.policies if name not in self._left_out)):
            raise InvalidRequest(
                f"--policies: {', '.join(options.policies)} need an engine that announces what it has cached"
            )
        self._skewed().validate()
        if options.trace is not None:
            self._trace(1.0)  # checks it
        parameters: Figures = {"policy": policies[0], "round": -1}
        cells = [Cell(_CALIBRATION, parameters, self._service(policies[0]), _CALIBRATION_PROMPTS)]
        for number in range(options.rounds):
            order = policies if number % 2 == 0 else policies[::-1]
            for policy in order:
                name, service = f"{policy}/{number}", self._service(policy)
                parameters = {"policy": policy, "round": number}
                cells.append(Cell(name, parameters, service, 1, options.duration_s, may_overload=True))
        return cells

    def _service(self, policy: str) -> Figures:
        options = self.options
        objectives = {"router.slo.ttft_ms": _SLO_MS, "router.slo.itl_ms": _SLO_MS} if policy == "slo" else {}
        routing = {**objectives, "router.policy": policy, "router.prefill_backlog_tokens": options.backlog}
        if self._names_servers:
            return routing
        return {
            **routing,
            "cluster.prefill": options.workers,
            "cluster.decode": 0,
            "cluster.oversubscribe": True,
            "engine.num_blocks": options.num_blocks,
            "engine.block_size": options.block_size,
            "engine.prefix_caching": True,
            **self._context(),
        }

    def _context(self) -> Figures:
        """vLLM does not start with a context that is longer than what its pool holds."""
        if self._config.has_own_engines:
            return {}
        most = resolve_model(self._config.model.path, served=False).shape.max_position_embeddings
        return {"engine.max_model_len": min(most, self.options.num_blocks * self.options.block_size)}

    def _skewed(self) -> SkewedPrefixes:
        options = self.options
        output_len = -(-_OUTPUT_TOKENS * TRACE_BLOCK_SIZE // options.block_size)
        return SkewedPrefixes(options.prefixes, options.prefix_blocks, _OWN_BLOCKS, _SKEW, output_len)

    def _trace(self, rate: float) -> Trace:
        options = self.options
        if options.trace is not None:
            return Trace.read(Path(options.trace), options.block_size)
        return self._skewed().trace(rate, options.duration_s, options.seed, options.block_size)

    async def measure(self, bench: Bench) -> None:
        """Calibration: cold prompts, one at a time. Otherwise the load of one policy and round."""
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            if bench.cell.name == _CALIBRATION:
                await self._calibrate(bench, client, status)
                return
            trace = self._trace(float(bench.earlier[_CALIBRATION]["rate"])).within(Room.of(status))
            bench.facts["workload"] = trace.describe()
            seed = self.options.seed
            if self._names_servers:  # whose caches are as cold for prompts that no run has sent
                seed = bench.facts["seed"] = SYSTEM.randrange(2**32)
            await warm_up(bench, client, requests_of(trace, seed - 1, status.vocab_size), (Mode.COLOCATED,))
            load = await bench.load(
                client,
                trace.conversations(len(trace.requests), seed, status.vocab_size),
                timed_arrivals(trace.times_s),
                arm=bench.cell.parameters["policy"],
                repeat=bench.cell.parameters["round"],
                mode=Mode.COLOCATED,
                step=0,  # how many requests there are follows from the calibration
                timeout_s=REQUEST_TIMEOUT_S,
            )
            bench.facts["load"] = {"took_s": load.duration_s, "lag": asdict(load.lag) if load.lag else None}
            bench.advance(1)

    async def _calibrate(self, bench: Bench, client: AsyncClient, status: ServiceStatus) -> None:
        """Note the fact ``rate``: arrivals per second of all loads."""
        options = self.options
        lengths = [request.input_length for request in self._trace(100.0).requests]
        length = round(statistics.fmean(lengths) * options.block_size / TRACE_BLOCK_SIZE)
        draw = random.Random(SYSTEM.random() if self._names_servers else f"{options.seed}/calibration")
        ttfts_s = []
        for index in range(-len(status.workers), _CALIBRATION_PROMPTS):  # the first ones warm the workers up
            prompt = [draw.randrange(status.vocab_size) for _ in range(length)]
            cold = await client.generate(prompt, mode=Mode.COLOCATED, max_tokens=2, ignore_eos=True).result()
            if index >= 0:
                assert cold.ttft_ms is not None, "it has tokens"
                ttfts_s.append(cold.ttft_ms / 1e3)
                bench.advance(1)
        ttft_s = statistics.median(ttfts_s)
        at_once = min(options.workers, devices_here())
        if self._names_servers:
            at_once = len(status.workers)
        bench.facts["left_out"] = self._left_out
        bench.facts["named"] = self._names_servers
        bench.facts["cold_ttft_ms"] = round(ttft_s * 1e3, 3)
        bench.facts["rate"] = options.rate or round(options.load * at_once / ttft_s, 4)

    def summarise(self, run: RunData) -> Figures:
        """``policies``, one each: ``policy``, ``n``, ``rounds``, ``errors``, ``error``; ``ttft_ms`` from when a request
        was due, ``ttft_p50_ms``, ``ttft_p99_ms``; ``x_round_robin``: mean TTFT of ``round_robin`` over the policy's;
        ``hit_rate``: share of the prompt tokens that were cached; ``computed_tokens``; ``busiest_share``: share of the
        requests that the busiest worker got; ``behind``: whether the load generator was.

        ``winner`` has the lowest mean; ``rate`` in requests per second; ``cold_ttft_ms``; ``workload``."""
        loads: dict[str, list[FinishedCell]] = {}
        for cell in run.cells:
            if cell.cell != _CALIBRATION:
                loads.setdefault(str(cell.parameters["policy"]), []).append(cell)
        found = [_summarise(name, cells, run.rows, self.options.seed) for name, cells in loads.items()]
        means = {each["policy"]: each["ttft_ms"]["mean"] for each in found if each["ttft_ms"] is not None}
        for each in found:
            both = {BASELINE, each["policy"]} <= means.keys()
            each["x_round_robin"] = round(means[BASELINE] / means[each["policy"]], 3) if both else None
        return {
            "experiment": self.name,
            "workload": run.fact("workload", ""),
            "rate": run.fact("rate"),
            "cold_ttft_ms": run.fact("cold_ttft_ms"),
            "left_out": run.fact("left_out", []),
            "policies": found,
            "winner": min(means, key=means.__getitem__, default=None),
            "failed": [
                f"{each['policy']}: {each['errors']} of {counted(each['n'] + each['errors'], 'request')} failed, first "
                f"with {each['error']}"
                for each in found
                if each["errors"]
            ],
        }

    def report(self, run: RunData, summary: Figures) -> Report:
        """TTFT and computed tokens by policy, and a table."""
        options, rate, cold_ms = self.options, summary["rate"], summary["cold_ttft_ms"]
        named = run.fact("named", False)
        service = (
            "a gateway of its own before the same servers; requests at the same times, of the same lengths, with "
            "prompts that the servers have not seen"
            if named
            else "a service of its own with cold prefix caches; the same requests at the same times"
        )
        method = (
            f"{options.rounds} rounds of {options.duration_s:g} s for each policy, in an order that is reversed from "
            f"round to round, every one on {service}; TTFT counts from when a request was due"
        )
        load = ""
        if rate is not None and options.trace is None:
            load = f"{rate:g} requests/s; a cold prompt takes {cold_ms:.0f} ms alone"
        late = [each["policy"] for each in summary["policies"] if each["behind"]]
        caveats = [
            "The loads begin with cold caches, so that each policy computes every shared beginning at least once; a "
            "longer load has a higher hit rate.",
            "How far policies differ depends on the pools: "
            + (
                "whether the shared beginnings fit the servers is not known, nor what is cached on servers that do not "
                "tell it (--enable-prompt-tokens-details)."
                if named
                else "the shared beginnings fit all workers together, and not one of them."
            ),
            options.rounds < MIN_VALUES
            and f"Requests of one round share a queue. With fewer than {MIN_VALUES} rounds there are no intervals.",
            summary["left_out"] != []
            and f"Left out, as the engines do not announce what they have cached: {', '.join(summary['left_out'])}.",
            late != [] and late_text(f"with {', '.join(late)}"),
        ]
        measured = [each for each in summary["policies"] if each["ttft_ms"] is not None]
        measured.sort(key=lambda each: float(each["ttft_ms"]["mean"]))
        columns = (
            "policy",
            "n",
            "TTFT, ms | ttft_ms:.0f",
            "p50 | ttft_p50_ms:.0f",
            "p99 | ttft_p99_ms:.0f",
            "× round_robin | x_round_robin:.2f",
            "cached tokens | hit_rate:.0%",
            "computed tokens | computed_tokens:,",
            "share of the busiest worker | busiest_share:.0%",
        )
        caption = (
            "Mean TTFT with 95 % intervals. × round_robin: its mean TTFT over that of the policy. Cached tokens: share "
            "of the prompt tokens that were found in the worker's cache."
        )
        setup = setup_of(run, method, workload=summary["workload"], load=load)
        blocks: list[Picture | TableBlock] = []
        if measured:
            blocks = [_picture(measured), table("All policies", measured, columns, caption)]
        return Report("Routing policies", self.question, _answer(summary), setup, blocks, caveats, summary["failed"])


def _summarise(name: str, cells: Sequence[FinishedCell], rows: Rows, seed: int) -> Figures:
    names = {cell.cell for cell in cells}
    sent = [row for row in rows if row.cell in names]
    errors = [row.error for row in sent if row.error is not None]
    good = [row.since_due() for row in sent if row.error is None]
    ttfts_ms, n = values_of(good, "ttft_ms"), len(good)
    prompt_tokens, cached = (sum(values_of(good, key)) for key in ("prompt_tokens", "prefill_cached_tokens"))
    busiest = max(Counter(row.prefill_worker for row in good).values(), default=0)
    return {
        "policy": name,
        "n": n,
        "rounds": len(cells),
        "errors": len(errors),
        "error": next(iter(errors), None),
        "ttft_ms": plain_mean(ttfts_ms, seed, [row.repeat for row in good]),
        **{f"ttft_p{each}_ms": round(percentile(ttfts_ms, each) or 0.0, 3) if n else None for each in (50, 99)},
        "hit_rate": round(cached / prompt_tokens, 4) if prompt_tokens else None,
        "computed_tokens": prompt_tokens - cached,
        "busiest_share": round(busiest / n, 4) if n else None,
        "behind": any((cell.facts.get("load", {}).get("lag") or {}).get("behind") for cell in cells),
    }


def _answer(summary: Figures) -> str:
    policies = {each["policy"]: each for each in summary["policies"] if each["ttft_ms"] is not None}
    if (winner := policies.get(summary["winner"])) is None:
        return "No policy served any request."
    alike = [
        name for name, each in policies.items() if each is not winner and apart(each["ttft_ms"], winner["ttft_ms"]) <= 0
    ]
    lowest = f"a mean TTFT that could not be told from that of {', '.join(alike)}" if alike else "the lowest mean TTFT"
    text = f"{winner['policy']} has {lowest}, {_measured(winner)}."
    if (baseline := policies.get(BASELINE, winner)) is winner:
        return text
    times = f", {winner['x_round_robin']:.2f} times as much"
    more = times if apart(baseline["ttft_ms"], winner["ttft_ms"]) > 0 else ""
    return f"{text} {BASELINE} has {_measured(baseline)}{more}."


def _measured(policy: Figures) -> str:
    return (
        f"{interval_text(policy['ttft_ms'])} ms (over {counted(policy['n'], 'request')}, {policy['hit_rate']:.0%} of "
        "whose prompt tokens were cached)"
    )


def _picture(policies: Sequence[Figures]) -> Picture:
    """Mean, median and 99th percentile of the TTFT of each policy, and its share of cached tokens."""
    rows = [each["policy"] for each in policies]
    marks = [
        Mark(policies, "ttft_ms", "policy", kind="bars", look={"label": "mean"}),
        Mark(policies, "ttft_p50_ms", "policy", kind="points", look={"label": "median", "color": PALETTE[1]}),
        Mark(policies, "ttft_p99_ms", "policy", kind="points", look={"label": "99th percentile", "color": PALETTE[4]}),
    ]
    hits = [{**each, "hits": 100 * each["hit_rate"]} for each in policies]
    cached = Mark(hits, "hits", "policy", kind="bars", look={"color": PALETTE[2]})
    return Picture(
        "ttft_by_policy",
        "TTFT by policy",
        "Bars: means with 95 % intervals. What is cached need not be computed, so requests also wait less for those "
        "before them.",
        [
            Panel(marks, "TTFT from when the request was due, ms", rows=rows, xlim=(0, None), legend="best"),
            Panel([cached], "prompt tokens found in the worker's cache, %", rows=rows, xlim=(0, 100)),
        ],
        columns=2,
        share={"sharey": True},
    )
