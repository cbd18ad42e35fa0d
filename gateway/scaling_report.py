"""What the scaling controller of a service has done, as its gateways show it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from pdserve.pb import inference_pb2 as pb


@dataclass(frozen=True)
class ScalingReport:
    """``controller``: `ScalingConfig.controller`. ``last``: the last action, ``reason`` and ``last_s`` why and when it
    was taken (seconds since 1970). ``actions``: how many there were, by kind (``flip prefill``). ``verdict``: what it
    saw lately, and why it did nothing."""

    controller: str = "off"
    last: str = ""
    reason: str = ""
    last_s: float = 0.0
    actions: dict[str, int] = field(default_factory=dict)
    verdict: str = ""

    def after(self, last: str, kind: str, reason: str, now_s: float) -> ScalingReport:
        """The report after a further action."""
        actions = {**self.actions, kind: self.actions.get(kind, 0) + 1}
        return replace(self, last=last, reason=reason, last_s=now_s, actions=actions, verdict="")

    def message(self) -> pb.ScalingStatus:
        """The report for the status."""
        return pb.ScalingStatus(
            controller=self.controller,
            last_action=self.last,
            reason=self.reason,
            last_action_age_s=max(0.0, time.time() - self.last_s) if self.last else 0.0,
            actions=self.actions,
            verdict=self.verdict,
        )
