"""The scripted service, which commands and benchmarks talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pdserve.scripted_service import ScriptedService


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    with ScriptedService() as service:
        yield service
