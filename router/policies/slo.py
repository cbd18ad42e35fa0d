"""The policy ``slo``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pdserve.core.config import RouterConfig
from pdserve.core.worker import Role
from router.cost_model import NOTHING_KNOWN, Costs
from router.needs import Needs
from router.policies.least_tokens import LeastTokens
from router.policies.policy import Policy, least
from router.worker_view import WorkerView


class Slo(Policy):
    """The worker with the greatest predicted headroom below the objective: of TTFT for prefill, of ITL for decode.
    `LeastTokens` until the cost model predicts all candidates."""

    name = "slo"
    uses_prefixes = True

    def __init__(self, role: Role, objective_s: float, costs: Costs = NOTHING_KNOWN) -> None:
        super().__init__(role)
        self._objective_s = objective_s
        self._costs = costs

    @classmethod
    def of(cls, role: Role, config: RouterConfig) -> Self:
        """With ``router.slo``, which the configuration has if it names this policy."""
        objective_ms = config.slo.ttft_ms if role is Role.PREFILL else config.slo.itl_ms
        assert objective_ms is not None, "the configuration was checked"
        return cls(role, objective_ms / 1e3)

    def given(self, costs: Costs) -> Self:
        """See `Policy.given`."""
        return type(self)(self.role, self._objective_s, costs)

    def choose(
        self, candidates: Sequence[WorkerView], needs: Needs, source: WorkerView | None = None
    ) -> tuple[WorkerView, str]:
        """See `Policy.choose`."""
        figure = "TTFT" if self.role is Role.PREFILL else "ITL"
        known = {worker.worker_id: s for worker in candidates if (s := self._predicted_s(worker, needs)) is not None}
        if len(known) < len(candidates):
            worker, why = LeastTokens(self.role).choose(candidates, needs, source)
            return worker, f"{why} (slo: {figure} is not measured of all of them yet)"
        worker, link = least(candidates, list(known.values()), source)
        predicted_s = known[worker.worker_id]
        headroom_ms = (self._objective_s - predicted_s) * 1e3
        return worker, (
            f"{figure} of {predicted_s * 1e3:.3g} ms predicted, {abs(headroom_ms):.3g} ms "
            f"{'below' if headroom_ms >= 0 else 'above'} its objective, the best of {len(candidates)}{link}"
        )

    def _predicted_s(self, worker: WorkerView, needs: Needs) -> float | None:
        if self.role is Role.PREFILL:
            line = self._costs.prefill.get(worker.kind)
            if line is None:
                return None
            return line.seconds(1, needs.uncached(worker.worker_id), worker.prompt_tokens, worker.decoding)
        line = self._costs.decode.get(worker.kind)
        return None if line is None else line.seconds(1, worker.batch + 1)
