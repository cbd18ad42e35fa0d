"""Runs one worker as a process of its own, without Ray: `python -m prefill_worker SPEC_JSON` (or `decode_worker`).

Ray's actors do the same and add placement and supervision. Ends on SIGTERM, and with its parent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping

from pdserve.core.errors import PdserveError
from pdserve.core.process import end_with_parent
from worker import messages
from worker.cores import claim_cores, leave_engine_cores, sharing_notes
from worker.request_table import Role
from worker.spec import WorkerSpec
from worker.worker_thread import WorkerThread


def serve(roles: Mapping[type[messages.Work], Role]) -> None:
    """Serve until SIGTERM; exits with 1 and one line on stderr if the worker cannot start."""
    end_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.set())
    spec, claim = claim_cores(WorkerSpec.from_wire(json.loads(sys.argv[1])))
    for note in sharing_notes(spec, claim.others):
        logging.getLogger(__name__).warning("%s", note)
    leave_engine_cores(spec)
    worker = WorkerThread(spec, roles, on_end=lambda: os._exit(1))
    try:
        worker.wait_ready(spec.config.cluster.start_timeout_s)
    except PdserveError as error:
        sys.exit(f"error: {error}")
    stop.wait()
    worker.stop()
    claim.close()
