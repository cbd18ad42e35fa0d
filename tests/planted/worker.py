"""`python -m tests.planted.worker SPEC_JSON`: a worker with the planted delay ``kv_exposed`` where it receives."""

from __future__ import annotations

import worker.kv
from ops.launch.worker import make_worker
from tests.planted.delays import planted_delays_s
from tests.planted.kv_receiver import DelayedReceiver
from worker.process import serve

if __name__ == "__main__":
    DelayedReceiver.delay_s = planted_delays_s().get("kv_exposed", 0.0)
    setattr(worker.kv, "KVReceiver", DelayedReceiver)  # noqa: B010 - an imported name, which mypy keeps as it is
    serve(make_worker)
