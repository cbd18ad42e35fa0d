"""What the live page shows: the service's state, running requests, and the breakdowns of the last ones.

A caller sees its own requests; operators see those of all callers."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from gateway.account import account_of
from gateway.admitted_call import AdmittedCall
from gateway.callers import Caller
from gateway.inference import Completion, Inference, Observer
from pdserve.core.timeline import Figure
from pdserve.pb import inference_pb2 as pb
from router.session import Session

FINISHED = 12
"""Finished requests of each caller that are kept, and finished requests that are shown."""
RUNNING = 50
"""Running requests that are shown, the oldest first."""


class LastRequests(Observer):
    """Keeps what the page shows of the last finished requests of each caller, which has no text, and ``counts`` of all:
    first tokens, later tokens with a known gap, and the sums of TTFT and of gaps in seconds."""

    def __init__(self) -> None:
        self.counts = {"first_tokens": 0, "ttft_s": 0.0, "gaps": 0, "itl_s": 0.0}
        self._finished: dict[str, deque[tuple[int, dict[str, Any]]]] = {}  # by caller, with their place among all
        self._count = itertools.count()

    def first(self, record: Session, seconds: float) -> None:
        """Count it."""
        self.counts["first_tokens"] += 1
        self.counts["ttft_s"] += seconds

    def gap(self, seconds: float, index: int) -> None:
        """Count it."""
        self.counts["gaps"] += 1
        self.counts["itl_s"] += seconds

    def finished(self, completion: Completion, call: AdmittedCall) -> None:
        """Keep a finished request, unless it was resumed: its first tokens were not made here."""
        if completion.breakdowns[Figure.TTFT] is not None:
            own = self._finished.setdefault(call.caller.name, deque(maxlen=FINISHED))
            own.append((next(self._count), _finished(completion)))

    def plain(self, caller: Caller) -> list[dict[str, Any]]:
        """The last requests that ``caller`` may see, the newest first."""
        seen = self._finished.values() if caller.sees_all else [self._finished.get(caller.name, ())]
        newest = heapq.nlargest(FINISHED, itertools.chain(*seen), key=itemgetter(0))
        return [finished for _, finished in newest]


def live_view(
    inference: Inference, status: Callable[[], pb.GetStatusResponse], last: LastRequests, caller: Caller
) -> dict[str, Any]:
    """Plain values for the live page, as ``caller`` may see it. Nothing of prompts or outputs, and no address."""
    now = status()
    running = (record for (name, _), record in inference.running.items() if caller.sees_all or name == caller.name)
    return {
        "ready": now.ready,
        "model": now.model,
        "version": now.version,
        "uptime_s": round(now.uptime_s, 1),
        "queued": now.queued,
        "running": now.running,
        "counts": last.counts,
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
                "failures": _failures(record),
            }
            for record in itertools.islice(running, RUNNING)
        ],
        "finished": last.plain(caller),
    }


def _failures(record: Session) -> list[str]:
    """Workers and classes of errors; their texts may have addresses."""
    return [str(failed._replace(text="")) for failed in record.failures]


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
        "failures": _failures(completion.record),
    }
