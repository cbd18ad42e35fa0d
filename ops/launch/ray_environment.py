"""The environment variables that Ray and gRPC read while they are *imported*: set before that, so nothing here imports
them."""

from __future__ import annotations

import os
from pathlib import Path

TOKEN_FILE = Path.home() / ".ray" / "auth_token"


def prepare_environment(address: str) -> None:
    """Set what is not set yet for a service on the Ray at ``address``."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a late call must not start a Ray of its own
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # every fork is followed by exec; else gRPC remarks on each
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its new behaviour, without its warning
    if address != "local" and TOKEN_FILE.exists():
        # `ray start` uses the token as soon as there is one, a driver only when told to.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
