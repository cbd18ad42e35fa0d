"""What every worker of a service serves. `python -m ops.launch.worker SPEC_JSON` runs a worker without Ray (see
`worker.process`)."""

from __future__ import annotations

from collections.abc import Mapping

import decode_worker.receive
import prefill_worker.push
from contract import control
from worker.process import serve
from worker.request_table import Handler

HANDLERS: Mapping[type[control.Work], Handler] = {**prefill_worker.push.HANDLERS, **decode_worker.receive.HANDLERS}
"""How a worker serves each kind of request, whatever its role: a role is what the router gives it."""

if __name__ == "__main__":
    serve(HANDLERS)
