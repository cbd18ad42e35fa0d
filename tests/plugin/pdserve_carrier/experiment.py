"""``pdserve experiment carrier``: which transport and which workers the requests of a running service use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from experiments.experiment import Bench, Cell, Experiment, Options, option
from experiments.report.page import Report, setup_of
from experiments.run_folder import RunData
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest


class CarrierOptions(Options):
    """Options of `Carrier`."""

    requests: int = option(4, ge=1, quick=2, description="requests to send")


class Carrier(Experiment):
    """See the module."""

    name: ClassVar[str] = "carrier"
    question: ClassVar[str] = "Which transport do hand-offs use?"
    options_type: ClassVar[type[Options]] = CarrierOptions
    options: CarrierOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        if attached is None:
            raise InvalidRequest("--target: give a running service")
        return [Cell("requests", {}, work=self.options.requests)]

    async def measure(self, bench: Bench) -> None:
        async with AsyncClient(bench.target) as client:
            for index in range(self.options.requests):
                await bench.send(client, [index + 1] * 40, arm="pd", repeat=0, index=index, mode="pd", max_tokens=2)
                bench.advance(1)

    def summarise(self, run: RunData) -> dict[str, Any]:
        return {
            "transports": sorted({row.transport for row in run.rows}),
            "decode_workers": sorted({row.decode_worker for row in run.rows}),
            "failed": [row.error for row in run.rows if row.error is not None],
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        answer = f"{len(run.rows)} requests by {', '.join(summary['transports'])}."
        return Report("Carrier", self.question, answer, setup_of(run, "Requests, one at a time."))
