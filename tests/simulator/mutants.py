"""Faults planted in the product, each of which drops, doubles or reorders one step. Seeds of the simulated world must
find every one: ``python -m tests.simulator.mutants [NAME …]`` says after how many."""
# ruff: noqa: E501

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("pdserve", "contract", "runtime", "checkpoints", "engine", "kv_transfer", "worker", "router"),
    *("prefill_worker", "decode_worker", "gateway", "simulator", "models"),
)
MAX_SEEDS = 2_000

_RUN = """
import json, sys
from simulator.plan import Plan
from simulator.simulation import simulate
for seed in range(int(sys.argv[1])):
    found = simulate(Plan.draw(seed)).violations
    if found:
        print(json.dumps([seed, found[0]]))
        break
else:
    print(json.dumps([-1, ""]))
"""


class Mutant(NamedTuple):
    """A planted fault: in ``file``, ``old``, which is there once, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a second cancellation frees blocks that are still written",
        "worker/kv.py",
        "            await _outlast(self.at_rest)\n",
        "            await self.at_rest\n",
    ),
    Mutant(
        "blocks count without a look at their checksum",
        "kv_transfer/receiver.py",
        "            if link.checksums and await fetch.checksum(header.trailer) != header.checksum:\n",
        "            if False:\n",
    ),
    Mutant(
        "a message does not renew the receiver's lease",
        "kv_transfer/receive_transfer.py",
        "        self.lease.renew()\n",
        "        pass\n",
    ),
    Mutant(
        "an abort is not sent",
        "worker/client.py",
        "            await self._call(Abort(self._next_id(), attempt_id), ABORT_TIMEOUT_S)\n",
        "            pass\n",
    ),
    Mutant(
        "a breaker never closes",
        "router/breaker.py",
        "            return False\n        self.spare()\n        return True\n",
        "            return False\n        return True\n",
    ),
    Mutant(
        "a request counts twice on its worker",
        "router/registered_worker.py",
        "        worker.outstanding_requests += 1\n",
        "        worker.outstanding_requests += 2\n",
    ),
    Mutant(
        "resumed tokens are charged to nobody",
        "gateway/inference.py",
        "spend_prompt(len(prompt) + len(resume))",
        "spend_prompt(len(prompt))",
    ),
    Mutant(
        "the end of a receive does not wait for its fetch",
        "kv_transfer/receive_transfer.py",
        "            await self.fetch.at_rest()\n",
        "            pass\n",
    ),
    Mutant(
        "an ended receive goes on writing",
        "kv_transfer/receiver.py",
        "            transfer.fetch.cancel()\n",
        "            pass\n",
    ),
    Mutant(
        "decode does not wait until its KV is there",
        "decode_worker/receive.py",
        "        received = await transfer.wait()\n",
        "        self._ends.command(KVReady(self.attempt_id, 1))\n        received = await transfer.wait()\n",
    ),
    Mutant(
        "blocks of a pushed prompt are freed before they are sent",
        "prefill_worker/push.py",
        "            await self._transfer.wait()\n",
        "            self._ends.command(Release(self.attempt_id))\n            await self._transfer.wait()\n",
    ),
    Mutant(
        "blocks of a pushed prompt are never freed",
        "prefill_worker/push.py",
        "            self._ends.command(Release(self.attempt_id))\n",
        "            pass\n",
    ),
    Mutant(
        "a retry forgets the tokens so far",
        "router/session.py",
        "request = self.request.attempt(attempt_id, self.output_token_ids, self.deadline.left_s)",
        "request = self.request.attempt(attempt_id, (), self.deadline.left_s)",
    ),
    Mutant(
        "all attempts of a request have the same id",
        "router/session.py",
        'attempt_id = f"{self.request.request_id}#{chance.randbytes(4).hex()}"',
        'attempt_id = f"{self.request.request_id}#1"',
    ),
    Mutant(
        "the cache ignores the salt",
        "engine/scheduling/scheduler.py",
        "seq.prefix = PrefixDigests(submit.request.salt, self.config.block_size)",
        'seq.prefix = PrefixDigests("", self.config.block_size)',
    ),
    Mutant(
        "a lost worker keeps its requests",
        "worker/client.py",
        "            self._fail(attempt_id, error)\n        log.info",
        "            pass\n        log.info",
    ),
    Mutant(
        "a call that has left stays in the queue",
        "router/waiting_line.py",
        "                waiting.placed.cancel()\n                self._queue.left(waiting)\n",
        "                waiting.placed.cancel()\n",
    ),
    Mutant(
        "a request that was placed when it left keeps its place",
        "router/waiting_line.py",
        "                waiting.placed.result().end()\n",
        "                pass\n",
    ),
    Mutant(
        "a request id is not given back",
        "gateway/inference.py",
        "            del self._claims[key]\n",
        "            pass\n",
    ),
    Mutant(
        "a hung engine is left alone",
        "worker/watchdog.py",
        "            self._process.kill()\n        except",
        "            await asyncio.sleep(1e9)\n        except",
    ),
    Mutant(
        "a pinned prefix is not released",
        "worker/serving.py",
        "            self._ends.command(Release(self.attempt_id))\n",
        "            pass\n",
    ),
    Mutant(
        "token 1 is given again by decode",
        "decode_worker/receive.py",
        "    second = await served.sampled()\n",
        "    served.outbox.output(served.attempt_id, TokenOutput(kv.first_token.token_id, None))\n    second = await served.sampled()\n",
    ),
    Mutant(
        "an announcement of what has ended is kept",
        "kv_transfer/sender.py",
        "        elif known is None and attempt_id in self._attempts:\n",
        "        elif False:\n",
    ),
    Mutant(
        "the receiver acknowledges what it has not got",
        "kv_transfer/receiver.py",
        "            fetch = transfer.fetch = link.link.fetch(",
        "            await link.say(Ack(transfer.nonce, header.seq))\n            fetch = transfer.fetch = link.link.fetch(",
    ),
    Mutant(
        "the fault of an engine does not reach its requests",
        "worker/worker.py",
        "            self._table.fail_all(lambda: WorkerLost(why))\n            await self._table.settled()",
        "            await self._table.settled()",
    ),
    Mutant(
        "a worker forgets what an abort was for",
        "worker/request_table.py",
        '            self.fail(served, RequestAborted(f"request {attempt_id} was aborted"))\n',
        "            pass\n",
    ),
    Mutant(
        "the router gives the load back twice",
        "router/registered_worker.py",
        "        if self._open:\n            self._open = False\n            self.worker.decoding",
        "        if True:\n            self._open = False\n            self.worker.decoding",
    ),
    Mutant(
        "the last layers of a block are not awaited",
        "kv_transfer/receive_transfer.py",
        "        every = (1 << layout.num_layers) - 1\n",
        "        every = 1\n",
    ),
    Mutant(
        "bytes of a transfer that was dropped stay in flight",
        "kv_transfer/send_transfer.py",
        "        self._inflight_bytes -= transfer.unacknowledged_bytes\n",
        "        pass\n",
    ),
    Mutant(
        "layers are announced before the end of the step before",
        "engine/core.py",
        "        if not self._in_flight:\n            layers.release()\n",
        "        layers.release()\n",
    ),
    Mutant(
        "the engine is not told that a request has failed",
        "worker/request_table.py",
        "                served.resources.command(Abort(served.attempt_id))\n",
        "                pass\n",
    ),
    Mutant(
        "the blocks of a pushed prompt are given to no one who waits",
        "engine/scheduling/scheduler.py",
        "            self._forget(seq)\n            self._reserve()\n\n    def abort",
        "            self._forget(seq)\n\n    def abort",
    ),
    Mutant(
        "an event that comes before its hand-off is dropped",
        "worker/kv.py",
        "                running.begin(self._ends)\n",
        "                pass\n",
    ),
    Mutant(
        "a block is cached that is partly filled",
        "engine/scheduling/scheduler.py",
        "        num_full = seq.num_computed_tokens // self.config.block_size\n        if num_full",
        "        num_full = -(-seq.num_computed_tokens // self.config.block_size)\n        if num_full",
    ),
    Mutant(
        "a token counts that follows a wrong guess",
        "engine/scheduling/scheduler.py",
        "            if reason is not None or seq.token_ids[-1] != draft:\n",
        "            if reason is not None:\n",
    ),
    Mutant(
        "the KV of wrong guesses counts",
        "engine/scheduling/scheduler.py",
        "            num_tokens = len(part.token_ids) - part.num_drafts\n            any_ended",
        "            num_tokens = len(part.token_ids)\n            any_ended",
    ),
    Mutant(
        "a request is computed ahead while its guesses are verified",
        "engine/scheduling/scheduler.py",
        "            seq.speculation.waits = True  # where",
        "            pass  # where",
    ),
    Mutant(
        "guesses are written beyond a request's blocks",
        "engine/scheduling/scheduler.py",
        "        return min(wanted, len(seq.block_ids) * self.config.block_size - computed)\n",
        "        return wanted\n",
    ),
)


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy the product to ``folder``, with the fault in it."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} has its place {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new))


def seeds_until_found(mutant: Mutant, max_seeds: int = MAX_SEEDS) -> tuple[int, str]:
    """How many seeds it takes to find the fault (0: it was not found), and what was noticed."""
    with tempfile.TemporaryDirectory() as name:
        plant(mutant, Path(name))
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-P", "-c", _RUN, str(max_seeds)]
        done = subprocess.run(command, env=environment, cwd=name, capture_output=True, text=True, check=False)
        assert not done.returncode, f"{mutant.name}: {done.stderr}"
        seed, violation = json.loads(done.stdout.splitlines()[-1])
        return seed + 1, violation


if __name__ == "__main__":
    wanted = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(seeds_until_found, mutant): mutant for mutant in wanted}
        for done in as_completed(running):
            seeds, what = done.result()
            print(f"{seeds or 'NOT FOUND':>9}  {running[done].name}: {what[:150]}", flush=True)  # noqa: T201
