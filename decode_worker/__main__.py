"""`python -m decode_worker SPEC_JSON`: a decode worker without Ray (see `worker.main`)."""

from __future__ import annotations

from decode_worker.receive import ROLES
from worker.main import serve

if __name__ == "__main__":
    serve(ROLES)
