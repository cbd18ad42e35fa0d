"""`python -m decode_worker SPEC_JSON`: a decode worker without Ray (see `worker.process`)."""

from __future__ import annotations

from decode_worker.receive import ROLES
from worker.process import serve

if __name__ == "__main__":
    serve(ROLES)
