"""The version of this installation, reported by every worker and by `pdserve status`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pdserve")
except PackageNotFoundError:  # not installed
    VERSION = "0+unknown"
