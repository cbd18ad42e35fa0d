"""An engine core under a virtual clock: steps take the time of a model, and nothing is computed.

Run as a program it simulates what its argument says, without torch, and prints the result as JSON.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core import ComputedStep, EngineCore
from engine.messages import EngineEvent, KVEvent, KVReady, KVRole, Release, Reserved, Step, Submit
from engine.scheduling.baselines import scheduler_class
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.kv_connector import TransferConnector
from engine.scheduling.scheduler import SchedulerConfig
from pdserve.core.clock import FakeClock
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

STEP_S = 0.005
PREFILL_TOKEN_S = 0.0001
TOKEN_KV_S = 0.00002


@dataclass
class ModelledRunner:
    """Takes `STEP_S`, and `PREFILL_TOKEN_S` for each token after a request's first."""

    clock: FakeClock
    num_steps: int = 0

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> ComputedStep:
        """Token 1, for each request that wants any."""
        self.num_steps += 1
        self.clock.advance(STEP_S + sum(len(seq.token_ids) - 1 for seq in seqs) * PREFILL_TOKEN_S)
        return ComputedStep({seq.attempt_id: SampledToken(1) for seq in seqs if seq.sample})


@dataclass
class Simulation:
    """One engine with requests that come from outside and KV that comes over a link."""

    config: SchedulerConfig
    batching: str = "continuous"
    clock: FakeClock = field(default_factory=FakeClock)
    num_tokens: dict[str, int] = field(default_factory=dict)
    first_token_s: dict[str, float] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scheduler = scheduler_class(self.batching, None)(self.config, self.clock, TransferConnector(self.clock))
        self.runner = ModelledRunner(self.clock)
        self.core = EngineCore(scheduler, self.runner, self.clock, self)
        self._due: list[tuple[float, int, Submit | KVReady | Release]] = []
        self._numbers = itertools.count()  # commands due at the same time keep their order
        self._submits: dict[str, Submit] = {}

    def submit(self, at_s: float, name: str, prompt_tokens: int, max_tokens: int, role: KVRole = KVRole.LOCAL) -> None:
        """Have a request come at ``at_s``."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = tuple((len(self._submits) * 613 + i * 7) % 1009 for i in range(prompt_tokens))
        self._submits[name] = submit = Submit(Request(name, prompt, params, attempt_id=name), role)
        self._later(at_s, submit)

    def _later(self, at_s: float, command: Submit | KVReady | Release) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), command))

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            while self._due and self._due[0][0] <= self.clock.now():
                self.core.take(heapq.heappop(self._due)[2])
            if not self.core.step():
                if not self._due:
                    return
                self.clock.advance(max(0.0, self._due[0][0] - self.clock.now()))

    def send(self, *events: EngineEvent) -> None:
        """Note tokens; what a PUSH request holds is fetched over the link."""
        for event in events:
            for token in event.tokens if isinstance(event, Step) else []:
                name = token.attempt_id
                self.num_tokens[name] = self.num_tokens.get(name, 0) + 1
                self.first_token_s.setdefault(name, self.clock.now())
                if token.finish_reason:
                    self.finished_s[name] = self.clock.now()
                    if self._submits[name].kv_role is KVRole.PUSH:
                        self._later(self.clock.now() + self._link_s(name), Release(name))

    def send_kv(self, *events: KVEvent) -> None:
        """KV of a RECEIVE request comes once it has its blocks."""
        for event in events:
            if isinstance(event, Reserved):
                self._later(event.reserved_s + self._link_s(event.attempt_id), KVReady(event.attempt_id, 1))

    def _link_s(self, name: str) -> float:
        return self._submits[name].request.num_tokens * TOKEN_KV_S


def random_load(num_requests: int, seed: int, batching: str) -> Simulation:
    """A finished simulation of ``num_requests`` requests in a pool that is too small for all at once."""
    config = SchedulerConfig(256, 16, 1024, 16, 256)
    simulation = Simulation(config, batching)
    choices = random.Random(seed)
    at_s = 0.0
    for i in range(num_requests):
        at_s += choices.expovariate(40.0)
        role = choices.choice(list(KVRole))
        simulation.submit(at_s, f"r{i}", choices.randint(1, 600), choices.randint(2, 100), role)
    simulation.run()
    return simulation


def result(simulation: Simulation) -> dict[str, Any]:
    """What can be compared."""
    load = simulation.core.scheduler.load()
    return {
        "took_s": simulation.clock.now(),
        "steps": simulation.runner.num_steps,
        "finished": len(simulation.finished_s),
        "tokens": sum(simulation.num_tokens.values()),
        "free_blocks": load.free_blocks,
        "preemptions": load.preemptions,
    }


if __name__ == "__main__":
    outcome = result(random_load(**json.loads(sys.argv[1])))
    assert "torch" not in sys.modules
    sys.stdout.write(json.dumps(outcome))
