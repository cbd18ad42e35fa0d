"""The closed loops of `experiments.benchmarks.role_flips`."""

from __future__ import annotations

import pytest

from experiments.benchmarks.role_flips import Kind, closed_loop
from pdserve import AsyncClient
from pdserve.core.errors import PdserveError
from tests.local_cluster import free_port
from tests.pdserve.scripted_service import ScriptedService


async def test_a_closed_loop_counts_its_first_answer_however_late_it_is() -> None:
    with ScriptedService() as service:
        async with AsyncClient(service.target) as client:
            assert len(await closed_loop(client, Kind(3, 1000, clients=2), 0.5)) == 1


async def test_a_closed_loop_whose_requests_fail_is_an_error() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(PdserveError):
            await closed_loop(client, Kind(3, 2, clients=1), 0.1)
