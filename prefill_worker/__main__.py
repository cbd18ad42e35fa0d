"""`python -m prefill_worker SPEC_JSON`: a prefill worker without Ray (see `worker.main`)."""

from __future__ import annotations

from prefill_worker.flow import FLOWS
from worker.main import serve

if __name__ == "__main__":
    serve(FLOWS)
