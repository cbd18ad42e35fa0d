"""The command line, and the scripted service that commands and benchmarks talk to."""

from __future__ import annotations

from tests.command_line import pdserve, service

__all__ = ["pdserve", "service"]
