"""The workers of a service. `python -m ops.launch.worker SPEC_JSON` runs one without Ray (see `worker.process`)."""

from __future__ import annotations

from collections.abc import Mapping

import decode_worker.receive
import prefill_worker.push
from contract import control
from pdserve.core.clock import MonotonicClock
from runtime.secret import ServiceSecret
from worker.process import RunnableWorker, serve
from worker.request_table import Handler
from worker.spec import WorkerSpec
from worker.worker import ServicePorts, Worker

HANDLERS: Mapping[type[control.Work], Handler] = {**prefill_worker.push.HANDLERS, **decode_worker.receive.HANDLERS}
"""How a worker serves each kind of request, whatever its role: a role is what the router gives it."""


def make_worker(spec: WorkerSpec, secret: ServiceSecret) -> RunnableWorker:
    """The worker of this spec, with the engine that the configuration names."""
    if spec.config.worker.engine == "pdserve":
        return Worker(spec, HANDLERS, secret)
    # Which pdserve's own workers need not import.
    if spec.config.worker.connector == "pdserve":
        from external_engines.vllm_engine import start_vllm

        clock = MonotonicClock()
        return Worker(spec, HANDLERS, secret, clock, ports=ServicePorts(spec, secret, clock, start_vllm))
    from external_engines.started import StartedServer

    return StartedServer(spec, secret)


if __name__ == "__main__":
    serve(make_worker)
