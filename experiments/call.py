"""`python -m experiments.call MODULE:FUNCTION ARGUMENTS` calls a function, or awaits a coroutine, in a process of its
own, which ends with the one that started it (`experiments.child_process.call`). ARGUMENTS are a JSON list. What the
function returns is a message `Done`; whatever else is printed goes to standard error."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys

from experiments.messages import Done, reserve_output, say
from runtime.process import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    reserve_output()
    module, _, name = sys.argv[1].partition(":")
    value = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    say(Done(asyncio.run(value) if asyncio.iscoroutine(value) else value))
