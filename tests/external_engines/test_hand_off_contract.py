"""The contract of hand-offs with recorded servers of every kind. `tests/external_engines/test_real_vllm.py` has it with
real ones."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.external_engines import (
    test_connected_servers,
    test_mooncake,
    test_sglang,
    test_started_servers,
    test_vllm_protocol,
)
from tests.external_engines.hand_off_contract import HandOffContract, hold_contract
from tests.external_engines.served import Service


class TestVLLM(HandOffContract):
    def served(self) -> AbstractAsyncContextManager[Service[Any]]:
        return test_vllm_protocol.service()


class TestSGLang(HandOffContract):
    stages = frozenset({"prefill_leg", "decode_leg", "first_decode"})
    proof = "none"

    def served(self) -> AbstractAsyncContextManager[Service[Any]]:
        return test_sglang.service()


class TestMooncake(HandOffContract):
    stages = frozenset({"prefill_leg", "decode_leg", "first_decode"})
    proof = "none"

    @pytest.fixture(autouse=True)
    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def served(self) -> AbstractAsyncContextManager[Service[Any]]:
        return test_mooncake.service(self._monkeypatch)


async def test_servers_that_workers_start(tmp_path: Path) -> None:
    async with test_started_servers.service(tmp_path) as served:
        await hold_contract(served, connected=False)


async def test_servers_with_pdserves_connector(tmp_path: Path) -> None:
    async with test_connected_servers.service(tmp_path) as served:
        await hold_contract(served, connected=True)
        again = await served.generate("colocated")
        assert again.prefill_cached_tokens == 32, "two blocks of the prompt"
