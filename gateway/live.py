"""What the live page shows: the service's state, running requests, and the breakdowns of the last ones."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from gateway.account import account_of
from gateway.inference import Arrival, Completion, Inference
from pdserve.core.errors import PdserveError
from pdserve.core.timeline import Figure
from pdserve.pb import inference_pb2 as pb
from router.request_record import RequestRecord

FINISHED = 12
"""Finished requests that are kept."""
RUNNING = 50
"""Running requests that are shown, the oldest first."""


class LastRequests:
    """Keeps the last finished requests. What `plain` gives of them has no text."""

    def __init__(self) -> None:
        self._finished: deque[Completion] = deque(maxlen=FINISHED)

    def first(self, record: RequestRecord, seconds: float) -> None:
        """Not shown."""

    def gap(self, seconds: float, index: int) -> None:
        """Not shown."""

    def cancelled(self) -> None:
        """Not shown."""

    def failed(self, error: PdserveError, arrival: Arrival | None) -> None:
        """Not shown."""

    def finished(self, completion: Completion, arrival: Arrival) -> None:
        """Keep a finished request, unless it was resumed: its first tokens were not made here."""
        if completion.breakdowns[Figure.TTFT] is not None:
            self._finished.append(completion)

    def plain(self) -> list[dict[str, Any]]:
        """The last requests, the newest first."""
        return [_finished(completion) for completion in reversed(self._finished)]


def live_view(inference: Inference, status: Callable[[], pb.GetStatusResponse], last: LastRequests) -> dict[str, Any]:
    """Plain values for the live page. Nothing of prompts or outputs, and no address."""
    now = status()
    return {
        "ready": now.ready,
        "model": now.model,
        "version": now.version,
        "uptime_s": round(now.uptime_s, 1),
        "queued": now.queued,
        "running": now.running,
        "workers": [
            {
                "id": worker.worker_id,
                "role": worker.role,
                "state": worker.state,
                "device": worker.device,
                "blocks": worker.num_blocks,
                "free": worker.free_blocks,
                "running": worker.running,
                "waiting": worker.waiting,
            }
            for worker in now.workers
        ],
        "links": [
            {"from": worker.worker_id, "to": link.worker_id, "transport": link.transport, "gbs": link.ceiling_gbs}
            for worker in now.workers
            for link in worker.links
        ],
        "requests": [
            {
                "id": record.request.request_id,
                "status": record.status.value,
                "prompt_tokens": len(record.request.prompt_token_ids),
                "output_tokens": len(record.output_token_ids),
                "max_tokens": record.request.sampling.max_tokens,
                "placement": record.placements[-1] if record.placements else "",
            }
            for record in itertools.islice(inference.running.values(), RUNNING)
        ],
        "finished": last.plain(),
    }


def _finished(completion: Completion) -> dict[str, Any]:
    account, timeline = account_of(completion), completion.record.timeline
    figure = Figure.TTFT_DECODE if account["gateway_ttft_decode_ms"] else Figure.TTFT
    return {
        "id": account["request_id"],
        "mode": account["mode"],
        "prefill": account["prefill_worker"],
        "decode": account["decode_worker"],
        "prompt_tokens": account["prompt_tokens"],
        "output_tokens": account["output_tokens"],
        "figure": figure.value,
        "total_ms": timeline.gateway_total_ms(figure),
        "stages_ms": account[f"gateway_{figure.value}_ms"],
        "transport": account["transfer"].get("transport", ""),
        "kv_bytes": account["transfer"].get("kv_bytes", 0),
    }
