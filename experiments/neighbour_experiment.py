"""What `experiments.interference` and `experiments.chunked_prefill` share: options, calibration, and how both read the
windows of `experiments.neighbours`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from experiments.experiment import Bench, Options
from experiments.neighbours import Traffic, WindowData, long_prompt_s, warm_up_traffic, windows_of
from experiments.run_folder import RunData
from pdserve.client.async_client import AsyncClient
from pdserve.core.interval import MIN_VALUES
from pdserve.core.request import counted_requests

CALIBRATION = "calibration"
"""The cell that times a long prompt, from which the rate of arrivals follows."""
OFF, AS_CONFIGURED = "off", "as-configured"
"""Chunk sizes besides numbers: prompts are never split, and the unknown one of a running service."""
_LATE_MS = 20.0

WHOLE_PROMPTS = (
    "A prompt that is computed whole makes one long gap for each decoding request. Where such gaps are fewer than 1 % "
    "of all, p99 does not show them; the longest gap beside each long prompt and the tail of the distribution do."
)
"""A caveat of both experiments."""


class NeighbourOptions(Options):
    """Options that both experiments have."""

    prompt_len: int = Field(1024, ge=1, description="length of the long prompts, in tokens")
    output_len: int = Field(8, ge=2, description="output of the long prompts, in tokens")
    decoding: int = Field(4, ge=1, description="requests that decode all the time")
    load: float = Field(0.5, gt=0, le=2, description="arrivals of long prompts, as a share of what a worker computes")
    rate: float | None = Field(None, gt=0, description="arrivals of long prompts per second, instead of --load")
    arrive_s: float = Field(6.0, gt=0, le=600, description="seconds of a window in which prompts arrive")
    throughput_share: float = Field(
        0.95, gt=0, le=1, description="a chunk size qualifies as best with this share of the highest throughput"
    )

    def traffic(self, prompt_s: float) -> Traffic:
        """The traffic of a window, if a long prompt takes a worker ``prompt_s`` seconds."""
        rate = self.load / prompt_s if self.rate is None else self.rate
        arrivals = max(1, round(rate * self.arrive_s))
        return Traffic(self.decoding, arrivals, self.arrive_s, self.prompt_len, self.output_len, self.seed)

    async def calibrate(self, bench: Bench, client: AsyncClient, mode: str) -> None:
        """Note as a fact how many seconds a long prompt takes on the idle service."""
        await warm_up_traffic(bench, client, self.traffic(1.0), (mode,))
        await bench.settle(client, CALIBRATION)
        bench.facts["long_prompt_s"] = await long_prompt_s(client, self.traffic(1.0), mode)
        bench.advance(1)

    def calibrated(self, bench: Bench) -> Traffic:
        """The traffic for a cell after the calibration; notes the number of arrivals as a fact."""
        traffic = self.traffic(float(bench.earlier[CALIBRATION]["long_prompt_s"]))
        bench.facts["arrivals"] = traffic.arrivals
        return traffic

    def traffic_summary(self, run: RunData) -> dict[str, Any]:
        """``traffic`` of the summary; what was not measured yet is None."""
        return {
            "decoding": self.decoding,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "arrive_s": self.arrive_s,
            **{key: first_fact(run, key) for key in ("arrivals", "long_prompt_s")},
        }


def first_fact(run: RunData, key: str) -> Any:
    """The fact ``key`` of the first cell that has it; None if none has."""
    return next((cell.facts[key] for cell in run.cells if key in cell.facts), None)


def windows_by_arm(run: RunData) -> dict[str, list[WindowData]]:
    """The windows of each arm, in the order of their repeats."""
    found: dict[str, list[WindowData]] = {}
    for cell in run.cells:
        for window in windows_of(cell.facts, run.rows_of(cell.cell)):
            found.setdefault(window.arm, []).append(window)
    return {name: sorted(windows, key=lambda window: window.repeat) for name, windows in found.items()}


def failures_of(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What makes a run fail: arms with failed requests."""
    failing = ((name, arm["errors"], arm["error"]) for name, arm in arms.items())
    return [f"{name}: {counted_requests(count)} failed, first with {error}" for name, count, error in failing if count]


def stall_text(arm: Mapping[str, Any]) -> str:
    """The median of the longest gaps beside long prompts, in parentheses; empty if there were none."""
    return f" (longest gap beside a long prompt: {arm['stall_ms']['p50']:.0f} ms)" if arm["stall_ms"] else ""


def arrivals_text(traffic: Mapping[str, Any]) -> str:
    """The traffic of a window in words, for the method; ``traffic`` is that of the summary."""
    return (
        f"{traffic['decoding']} requests decode all the time; in each window {traffic['arrivals']} prompts of "
        f"{traffic['prompt_len']} tokens (output {traffic['output_len']}) arrive within {traffic['arrive_s']:g} s at "
        "the times of a Poisson process"
    )


def measurement_caveats(arms: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Caveats on how ``arms`` were measured; ``name`` is what the experiment calls several of them."""
    caveats = []
    if any(arm["windows"] < MIN_VALUES for arm in arms):
        caveats.append(f"{name} with fewer than {MIN_VALUES} windows have no intervals.")
    late_ms = max((arm["late_ms"] for arm in arms), default=0.0)
    if late_ms > _LATE_MS:
        caveats.append(
            f"The load generator sent a prompt up to {late_ms:.0f} ms late; TTFT counts from when it was due."
        )
    return caveats
