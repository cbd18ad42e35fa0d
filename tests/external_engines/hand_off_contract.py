"""What servers of every other engine do behind the gateway, recorded ones and real ones: a class of tests whose
subclasses say which servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import pytest

from pdserve import Figure, InvalidRequest
from pdserve.client.generation import Generation
from tests.external_engines.served import EXPECTED, PROMPT, Service

TOKENS = 8


class HandOffContract:
    """A prefill and a decode server, as ``served`` gives them."""

    stages = frozenset({"prefill_leg", "leg_gap", "decode_leg", "first_decode"})
    """Those that a hand-off has at least."""
    proof = "requests that run alone"
    """Which requests prove their bytes, by the status. A busy machine may read the counters of one too late."""

    def served(self) -> AbstractAsyncContextManager[Service[Any]]:
        """A gateway before them."""
        raise NotImplementedError

    async def alone(self, served: Service[Any]) -> Sequence[int]:
        """The greedy tokens after ``PROMPT`` of a server alone."""
        return EXPECTED[:TOKENS]

    async def test_tokens_stages_and_bytes(self) -> None:
        async with self.served() as served:
            result = await served.generate(max_tokens=TOKENS)
            assert list(result.token_ids) == list(await self.alone(served))
            assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
            assert (result.attempts, result.finish_reason) == (1, "length")
            assert self.stages <= set(result.breakdowns[Figure.TTFT_DECODE].stages_ms)
            if self.proof.startswith("every request"):
                assert result.kv_bytes == result.kv_bytes_expected > 0
            else:
                assert result.kv_bytes in (0, result.kv_bytes_expected * (self.proof != "none"))
            assert "should have fetched" not in served.notes()  # they may also tell of cores that tests share

    async def test_one_token(self) -> None:
        async with self.served() as served:
            result = await served.generate(max_tokens=1)
            assert list(result.token_ids) == list(await self.alone(served))[:1]
            assert result.finish_reason == "length"

    async def test_token_1_that_ends_the_request(self) -> None:
        async with self.served() as served:
            first, *_ = await self.alone(served)
            result = await served.generate(stop_token_ids=[first])
            assert (list(result.token_ids), result.finish_reason) == ([first], "stop")

    async def test_several_requests_at_once(self) -> None:
        async with self.served() as served:
            alone = list(await self.alone(served))
            results: list[Generation] = await asyncio.gather(*(served.generate(max_tokens=TOKENS) for _ in range(6)))
            assert [list(result.token_ids) for result in results] == [alone] * 6
            assert {result.attempts for result in results} == {1}

    async def test_a_client_that_leaves_harms_no_other(self) -> None:
        async with self.served() as served:
            await served.ready()
            stream = served.client.generate(PROMPT, max_tokens=300, mode="pd", ignore_eos=True, timeout_s=60.0)
            async for _ in stream:
                break
            await stream.aclose()
            assert list((await served.generate(max_tokens=TOKENS)).token_ids) == list(await self.alone(served))

    async def test_what_the_engine_lacks_is_refused_by_name(self) -> None:
        async with self.served() as served:
            with pytest.raises(InvalidRequest, match="logprobs"):
                await served.generate(prompt_logprobs=1)
            with pytest.raises(InvalidRequest, match="speculation"):
                await served.generate(speculation=False)

    async def test_status_says_what_the_engine_is_and_can_do(self) -> None:
        async with self.served() as served:
            await served.ready()
            for worker in served.workers().values():
                said = dict(worker.engine)
                assert said["kind"]
                assert said["version"]
                assert said["proof"] == self.proof
                assert said["layer_events"] == ("yes" if "prefill" in self.stages else "no")
                assert said["prefix_announcements"] == "no"


class _OfOneService(HandOffContract):
    def __init__(self, service: Service[Any], stages: frozenset[str], proof: str) -> None:
        self._service, self.stages, self.proof = service, stages, proof

    def served(self) -> AbstractAsyncContextManager[Service[Any]]:
        return nullcontext(self._service)

    async def alone(self, served: Service[Any]) -> Sequence[int]:
        return (await served.generate("colocated", max_tokens=TOKENS)).token_ids


async def hold_contract(service: Service[Any], *, connected: bool) -> None:
    """All of the contract with the servers of one service, because others take long to start. ``connected``: they have
    pdserve's connector."""
    contract = _OfOneService(service, HandOffContract.stages, HandOffContract.proof)
    if connected:
        contract = _OfOneService(service, frozenset({"prefill", "first_decode"}), "every request, checksums")
    for name in [name for name in dir(contract) if name.startswith("test_")]:
        await getattr(contract, name)()
