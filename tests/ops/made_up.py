"""Hand-made generations with round numbers."""

from __future__ import annotations

import random

from pdserve.client.generation import Generation, TransferDetails
from pdserve.core.timeline import Breakdown, Figure


def made_up(
    prompt_tokens: int = 70, mode: str = "pd", second_token: bool = True, seed: int = 0, request_id: str = "req-1"
) -> Generation:
    """A generation whose stages follow from the prompt's length, with a little of ``seed``'s noise."""
    noise = random.Random(seed)

    def around(value_ms: float) -> float:
        return value_ms * noise.uniform(0.8, 1.2) if seed else value_ms

    before = {
        "network": around(1.0),
        "gateway": around(0.5),
        "route": around(0.25 + 4.0 * bool(seed)),
        "dispatch": around(1.0),
        "prefill_queue": around(0.25 + 6.0 * bool(seed)),
        "prefill": around(prompt_tokens * 0.1),
    }
    pd = mode == "pd"
    after = {"kv_exposed": around(1.5)} if pd else {}
    after |= {"decode_queue": around(0.75), "first_decode": around(3.0)}
    blocks = -(-prompt_tokens // 16) if pd and second_token else 0
    breakdowns = {}
    for figure, stages in ((Figure.TTFT, before), (Figure.TTFT_DECODE, before | after)):
        if figure is Figure.TTFT or second_token:
            stages_ms = {**stages, "unattributed": -0.25 if figure is Figure.TTFT else 0.25}
            breakdowns[figure] = Breakdown(figure, sum(stages_ms.values()), stages_ms, 0.125)
    ttft_ms = breakdowns[Figure.TTFT].total_ms
    ttft_decode_ms = breakdowns[Figure.TTFT_DECODE].total_ms if second_token else None
    return Generation(
        request_id=request_id,
        text="once upon a time",
        token_ids=(5, 6, 7) if second_token else (5,),
        finish_reason="length",
        mode=mode,
        prefill_worker="prefill-0",
        decode_worker="decode-0" if pd else "prefill-0",
        prompt_tokens=prompt_tokens,
        attempts=1,
        transport="grpc_stream" if blocks else "",
        block_size=16,
        kv_bytes=blocks * 16 * 16_384,
        kv_bytes_expected=blocks * 16 * 16_384,
        kv_blocks_sent=blocks,
        kv_blocks_skipped=0,
        prefill_cached_tokens=0,
        draft_tokens=0,
        accepted_draft_tokens=0,
        transfer=TransferDetails(
            export_ms=0.5,
            wire_ms=2.0,
            import_ms=0.4,
            span_ms=8.0,
            exposed_ms=1.5,
            room_wait_ms=0.0,
            request_to_ready_ms=12.0,
            gbs=1.25,
            ceiling_gbs=2.5,
            checksum="xxh3-64 verified" if blocks else "",
            messages=2 if blocks else 0,
            kv_bytes_retried=0,
            wire_bytes=blocks * 16 * 16_384,
        ),
        ttft_ms=ttft_ms,
        ttft_decode_ms=ttft_decode_ms,
        breakdowns=breakdowns,
        itl_ms=(ttft_decode_ms - ttft_ms, 3.0) if ttft_decode_ms is not None else (),
        total_ms=(ttft_decode_ms or ttft_ms) + 3.0,
    )
