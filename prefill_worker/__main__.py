"""`python -m prefill_worker SPEC_JSON`: a prefill worker without Ray (see `worker.process`)."""

from __future__ import annotations

from prefill_worker.push import ROLES
from worker.process import serve

if __name__ == "__main__":
    serve(ROLES)
