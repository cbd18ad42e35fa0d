"""The version of this installation, told by every worker and by `pdserve status`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("pdserve")
except PackageNotFoundError:  # run from a folder that was never installed
    VERSION = "0+unknown"
