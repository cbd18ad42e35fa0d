"""The service's status, from the registry and the router."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from contract.scaling import ScalingReport
from external_engines.directory import EngineDirectory
from gateway.validation import Limits
from pdserve.core.clock import Clock
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from router.auto_mode import describe_break_even
from router.registered_worker import RegisteredWorker
from router.registry import WorkerRegistry
from router.router import Router
from worker.cores import sharing_note


class StatusReport:
    """The answer of `GetStatus`, and the limits that requests are checked against. ``settings`` of the configuration
    are told to everyone. ``problem``: what is wrong with the configuration now, for operators. ``engines``: the servers
    of other engines."""

    def __init__(
        self,
        registry: WorkerRegistry,
        router: Router,
        clock: Clock,
        model: str,
        version: str,
        ready: Callable[[], bool],
        checkpoint_dtype: str,
        settings: Mapping[str, Any],
        model_notes: Sequence[str],
        problem: Callable[[], str],
        engines: EngineDirectory | None = None,
    ) -> None:
        self._registry = registry
        self._router = router
        self._clock = clock
        self._model = model
        self._version = version
        self._ready = ready
        self._checkpoint_dtype = checkpoint_dtype
        self._settings = {key: json.dumps(value) for key, value in settings.items()}
        self._model_notes = tuple(model_notes)
        self._problem = problem
        self._engines = engines
        self._started_s = clock.now()
        self._limits: Limits | None = None
        self._limits_are_old = True
        registry.subscribe_workers(self._workers_changed)
        self.expected: dict[str, Role] = {}
        """The service's workers by id, registered or not."""
        self.notes: tuple[str, ...] = ()
        """Notes from the launcher about the service's hosts."""
        self.scaling: ScalingReport | None = None
        """What the controller of roles and workers has done; None without one."""

    def limits(self) -> Limits | None:
        """The limits of the present workers, or of the last ones; None if there never was a worker."""
        if self._limits_are_old:
            self._limits_are_old = False
            workers = self._registry.workers
            infos = [w.info for w in workers if not w.lost] or [w.info for w in workers]
            if infos:
                self._limits = Limits(
                    context_length=max(info.max_model_len for info in infos),
                    pool_tokens=max(info.num_blocks * info.layout.block_size for info in infos),
                    vocab_size=min(info.vocab_size for info in infos),
                    eos_token_ids=frozenset(infos[0].eos_token_ids),
                )
        return self._limits

    def _workers_changed(self) -> None:
        self._limits_are_old = True

    def public(self) -> pb.GetStatusResponse:
        """The current status without internals of the service: addresses that only its own parts connect to, and
        process ids."""
        status = self.message()
        status.ClearField("pid")
        if (problem := self._problem()) in status.notes:
            status.notes.remove(problem)
        for worker in status.workers:
            worker.ClearField("address")
            worker.ClearField("kv_addresses")
            worker.ClearField("pid")
            worker.ClearField("engine_pid")
        return status

    def message(self) -> pb.GetStatusResponse:
        """The current status, for operators."""
        registered = {worker.worker_id for worker in self._registry.workers}
        engines = self._engines
        awaited = [
            pb.WorkerStatus(worker_id=worker_id, role=role, state="awaited")
            for worker_id, role in sorted(self.expected.items())
            if worker_id not in registered
        ]
        costs = self._registry.cost_model.refit()
        shared = sharing_note({w.worker_id: w.load.shared_cores for w in self._registry.workers if not w.lost})
        break_even_tokens, in_words = describe_break_even(self._registry.view().workers, costs)
        status = pb.GetStatusResponse(
            ready=self._ready(),
            version=self._version,
            model=self._model,
            workers=[*(self._worker(worker) for worker in self._registry.workers), *awaited],
            queued=self._router.queued,
            running=self._router.running,
            pid=os.getpid(),
            uptime_s=self._clock.now() - self._started_s,
            checkpoint_dtype=self._checkpoint_dtype,
            settings=self._settings,
            costs=[*costs.describe(), *([in_words] if in_words else [])],
            notes=[
                *self._model_notes,
                *self.notes,
                *filter(None, (shared, self._problem())),
                *(worker.load.note for worker in self._registry.workers if worker.load.note and not worker.lost),
                *(engines.notes if engines else ()),
            ],
        )
        if self.scaling is not None:
            status.scaling.CopyFrom(_scaling_status(self.scaling))
        limits = self.limits()
        if limits is not None and self._registry.workers:
            info = next((w for w in self._registry.workers if not w.lost), self._registry.workers[0]).info
            layout = info.layout
            status.context_length = limits.context_length
            if break_even_tokens is not None:
                status.break_even_tokens = min(break_even_tokens, limits.context_length)
            status.vocab_size = limits.vocab_size
            status.block_size = layout.block_size
            status.kv_bytes_per_token = layout.token_bytes
            status.dtype = info.dtype
            status.model_hash = layout.model_hash
        return status

    def _worker(self, worker: RegisteredWorker) -> pb.WorkerStatus:
        info, load = worker.info, worker.load
        if worker.lost:  # what ran there does not run any more
            load = replace(load, running=0, waiting=0, others_tokens=0)
        return pb.WorkerStatus(
            worker_id=info.worker_id,
            role=info.role,
            state=worker.state,
            node=info.node,
            device=info.device,
            address=info.control_address,
            pid=info.pid,
            engine_pid=info.engine_pid,
            num_blocks=info.num_blocks,
            free_blocks=load.free_blocks,
            running=load.running,
            waiting=load.waiting,
            outstanding_tokens=worker.outstanding_tokens + load.others_tokens,
            transports=[endpoint.transport for endpoint in info.kv_endpoints],
            heartbeat_age_s=self._registry.age_s(worker),
            engine_restarts=info.engine_restarts,
            worker_restarts=self._registry.restarts[info.worker_id],
            preemptions=load.preemptions,
            links=[pb.PeerLink(**asdict(link)) for link in self._registry.links(worker)],
            cuda_visible_devices=info.cuda_visible_devices,
            cores=info.cores,
            kv_refused=load.kv_refused,
            prompt_tokens_looked_up=load.prompt_tokens_looked_up,
            prompt_tokens_cached=load.prompt_tokens_cached,
            cached_blocks=load.cached_blocks,
            draft_tokens=load.draft_tokens,
            accepted_draft_tokens=load.accepted_draft_tokens,
            steps=load.steps,
            busy_s=load.busy_s,
            failing=worker.breaker.explanation,
            engine=dict(info.engine) | dict(info.declares),
            kv_addresses={endpoint.transport: endpoint.address for endpoint in info.kv_endpoints},
        )


def _scaling_status(report: ScalingReport) -> pb.ScalingStatus:
    return pb.ScalingStatus(
        controller=report.controller,
        last_action=report.last,
        reason=report.reason,
        last_action_age_s=max(0.0, time.time() - report.last_s) if report.last else 0.0,
        actions=report.actions,
        verdict=report.verdict,
    )
