"""How every worker serves a request on its own: prefill and decode in place."""

from __future__ import annotations

from engine.messages import KVRole
from pdserve.core.timeline import EventKind
from worker.prefix_fetch import fetching
from worker.request_table import ServedRequest, finish_reason


async def run(served: ServedRequest) -> None:
    """Prefill and decode on this worker: colocated requests, and requests for a single token."""
    async with fetching(served) as fetch:
        served.submit(KVRole.LOCAL)
        first = await served.sampled()
    reason = finish_reason(first.token)
    served.tell(
        first,
        *served.prefill_events(first),
        *fetch.events,
        finish_reason=reason,
        cached_tokens=first.token.cached_tokens,
        prefix_fetch=fetch.outcome,
    )
    if reason is not None:
        return
    second = await served.sampled()
    reason = finish_reason(second.token)
    served.tell(
        second,
        served.event(EventKind.DECODE_SCHEDULED, second.step.step_started_s),
        served.event(EventKind.TOKEN_2_SAMPLED, second.step.sampled_s),
        finish_reason=reason,
    )
    if reason is None:
        await served.forward_rest()
