"""vLLM servers behind the real gateway, over the recorded protocol: hand-offs, colocated requests, and the ways in
which hand-offs were seen to fail without an error."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from pdserve import (
    DeadlineExceeded,
    EventKind,
    Figure,
    HandOffMissing,
    InvalidRequest,
    LayoutMismatch,
    TransferError,
)
from tests.command_line import PDSERVE
from tests.external_engines.recorded_vllm import RecordedVLLM
from tests.external_engines.served import EXPECTED, PROMPT, Service, service_of


def service(*settings: tuple[str, object], **faults: object) -> AbstractAsyncContextManager[Service[RecordedVLLM]]:
    """A gateway before two servers, 1P1D. ``faults`` are attributes of ``prefill`` or ``decode``."""
    prefill, decode = RecordedVLLM("engine-p"), RecordedVLLM("engine-d")
    decode.peers = {"engine-p": prefill}
    return service_of(prefill, decode, *settings, **faults)


# --- what goes right --------------------------------------------------------------------------------------------------


async def test_a_hand_off_gives_the_tokens_and_the_stages_that_are_seen_from_outside() -> None:
    async with service() as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
        first, second = served.prefill.requests[0], served.decode.requests[0]
        assert first["id"] == second["id"]
        assert second["kv_transfer_params"]["remote_engine_id"] == "engine-p"
        assert first["prompt"] == second["prompt"] == PROMPT
        assert first["cache_salt"] == second["cache_salt"]
        assert first["seed"] == second["seed"]
        assert served.decode.source["local_compute"] == 0
        assert {EventKind.PREFILL_ANSWERED, EventKind.DECODE_SENT, EventKind.DECODE_ANSWERED} <= {
            event.kind for event in result.events
        }
        stages = result.breakdowns[Figure.TTFT_DECODE].stages_ms
        assert {"prefill_leg", "leg_gap", "decode_leg", "first_decode"} <= set(stages)
        assert "prefill" not in stages
        assert result.kv_blocks_sent == 3
        assert result.kv_bytes == result.kv_bytes_expected > 0


async def test_a_colocated_request_is_a_plain_one() -> None:
    async with service() as served:
        result = await served.generate("colocated")
        assert list(result.token_ids) == EXPECTED
        (request,) = served.prefill.requests + served.decode.requests
        assert "kv_transfer_params" not in request
        assert {"prefill_leg", "first_decode"} <= set(result.breakdowns[Figure.TTFT_DECODE].stages_ms)


async def test_a_single_token_needs_no_hand_off() -> None:
    async with service() as served:
        assert list((await served.generate(max_tokens=1)).token_ids) == EXPECTED[:1]
        assert not served.decode.requests


async def test_token_1_is_held_back_where_that_is_configured() -> None:
    async with service(("router.first_token", "decode")) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        stages = result.breakdowns[Figure.TTFT].stages_ms
        assert "decode_leg" in stages


async def test_status_shows_servers_as_workers() -> None:
    async with service() as served:
        await served.ready()
        workers = {worker.worker_id: worker for worker in served.gateway.status().workers}
        assert {worker.state for worker in workers.values()} == {"ready"}
        assert workers["prefill-0"].device == "vllm"
        assert [link.transport for link in workers["prefill-0"].links] == ["nixl"]
        assert served.notes() == ""


async def test_a_client_that_leaves_closes_the_request_to_the_engine() -> None:
    async with service() as served:
        await served.ready()
        stream = served.client.generate(PROMPT, max_tokens=300, mode="pd", ignore_eos=True)
        async for _ in stream:
            if len(served.decode.requests) == 1 and served.decode.running:
                break
        await stream.aclose()
        await served.until(lambda: bool(served.decode.cancelled) and not served.decode.running)


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_a_dropped_field_fails_the_request_with_the_reason() -> None:
    async with service(prefill_drops_params=True) as served:
        with pytest.raises(HandOffMissing, match=r"no kv_transfer_params.*--kv-transfer-config"):
            await served.generate()
        assert not served.decode.requests  # nothing was computed twice
        assert len(served.prefill.requests) == 1  # and nothing was tried again


async def test_a_decode_that_computes_the_prompt_itself_is_called_out() -> None:
    async with service(decode_ignores_params=True) as served:
        assert list((await served.generate()).token_ids) == EXPECTED
        await served.until(lambda: "decode-0 has computed 40 of 40 prompt tokens" in served.notes())


async def test_an_experiment_names_the_cell_in_which_decode_computed_prompts_itself(tmp_path: Path) -> None:
    options = ("--prompt-lens", "16", "--rates", "", "--pairs", "4", "--pairs-s", "0", "--output", str(tmp_path))
    async with service(decode_ignores_params=True) as served:
        await served.ready()
        target = f"127.0.0.1:{served.gateway.port}"
        command = (*PDSERVE, "experiment", "added-ttft", "--target", target, *options, "--json")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    found = json.loads(output)
    (told,) = (each for each in found["caveats"] if "prompt tokens whose KV it should have fetched" in each)
    assert told.startswith("16/nixl/as-configured/idle: decode-0 has computed")
    assert found["cells"][0]["kv_bytes_equal"] is False


async def test_kv_that_is_gone_is_handed_off_again() -> None:
    """Until the last attempt, which needs no hand-off."""
    async with service(prefill_lease_over=True) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert "may have failed to fetch the KV" in result.failures[0].text


async def test_kv_that_is_gone_fails_the_request_where_that_is_configured() -> None:
    async with service(("transfer.on_kv_failure", "fail"), prefill_lease_over=True) as served:
        with pytest.raises(TransferError, match="may have failed to fetch the KV"):
            await served.generate()


async def test_wrong_kv_is_noticed_by_the_token_that_both_compute() -> None:
    async with service(prefill_serves_wrong_blocks=True) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert "decodes another token 1" in result.failures[0].text


@pytest.mark.parametrize(("attribute", "value"), [("version", "0.31.0"), ("block_size", 32)])
async def test_servers_that_differ_are_no_pair(attribute: str, value: object) -> None:
    async with service(**{f"decode_{attribute}": value}) as served:
        await served.until(lambda: len(served.gateway.registry.workers) == 2)
        with pytest.raises(LayoutMismatch, match=rf"{attribute} is .* and .*{value}"):
            await served.client.generate(PROMPT, max_tokens=8, mode="pd", timeout_s=5.0).result()
        assert not served.prefill.requests


async def test_a_server_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async with service(prefill_hangs=True) as served:
        with pytest.raises(DeadlineExceeded):
            await served.generate(timeout_s=0.5)
        served.prefill.hangs = False
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_an_answer_that_breaks_off_is_continued() -> None:
    async with service(decode_breaks_after=4) as served:
        assert list((await served.generate()).token_ids) == EXPECTED
        assert served.prefill.requests[-1]["prompt"] == [*PROMPT, *EXPECTED[:4]]


async def test_what_the_engine_refuses_is_an_invalid_request() -> None:
    async with service(prefill_refuses=(400, "the prompt is too long")) as served:
        with pytest.raises(InvalidRequest, match=r"prefill-0 .vllm. answered 400: the prompt is too long"):
            await served.generate()


async def test_a_server_that_restarts_is_registered_anew() -> None:
    async with service() as served:
        await served.ready()
        served.decode.start_s, served.decode.version = 2.0, "0.31.0"
        await served.until(lambda: served.gateway.problem is not None)
        served.decode.start_s, served.decode.version = 3.0, "0.32.0"
        await served.until(lambda: served.gateway.problem is None)
        assert list((await served.generate()).token_ids) == EXPECTED


def states(served: Service[RecordedVLLM]) -> dict[str, str]:
    """The state of each worker, by worker id."""
    return {worker.worker_id: worker.state for worker in served.gateway.status().workers}


async def test_a_server_that_is_not_there_is_noted() -> None:
    async with service(("cluster.decode_urls", ["http://127.0.0.1:9"])) as served:
        await served.until(lambda: "decode-0: does not answer" in served.notes())
        await served.until(lambda: states(served) == {"prefill-0": "ready", "decode-0": "awaited"})
        alone = served.client.generate(PROMPT, max_tokens=8, mode="colocated", ignore_eos=True, timeout_s=5.0)
        assert list((await alone.result()).token_ids) == EXPECTED
