"""What tests of workers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_models import save_random_model
from tests.virtual_time import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")
