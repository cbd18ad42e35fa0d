"""What is checked and chosen before a service starts anything. This module imports neither Ray nor the gateway's
servers, so that a Ray of the service's own can start while they are imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoints.draft import resolve_draft
from checkpoints.source import ModelSource, check_weight_files, resolve_model, tokenizer_note
from gateway.chat_template import load_chat_template
from gateway.security import security_of
from ops.launch.plan import roles_of
from ops.launch.ports import free_ports
from ops.launch.ray_head import RayHead
from ops.launch.state import cache_key, last_report
from ops.model_memory import ServedModel
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError
from router.forecast import Forecaster
from runtime.plane_tls import plane_tls

OTHER_ENGINE_START_S = 900.0
"""Time limit of the start-up of servers of another engine, unless `cluster.start_timeout_s` sets one."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """A service that can be started."""

    config: PdserveConfig  # with the ports and the report that were chosen, and paths of models for all hosts
    source: ModelSource
    head: RayHead | None  # the Ray of its own that is to be started; None: it joins one
    cache_key: bytes | None  # of the KV that is kept in `engine.offload_folder`; None: none is
    notes: tuple[str, ...]  # for the user
    forecaster: Forecaster | None = None  # of the controller of roles


def prepare(
    config: PdserveConfig,
    report: Callable[[str], None] = lambda stage: None,
    check: Callable[[], None] = lambda: None,
) -> Preparation:
    """Check the configuration and the model's files, and choose the port and Ray's folder, so that the state file can
    name them before anything is started. A model of the Hugging Face Hub is downloaded: ``report`` gets the progress,
    ``check`` may raise to end that. PdserveError if the service cannot start."""
    source = resolve_model(config.model.path, report, check, served=config.has_own_engines)
    source.shape.check_context(config.engine.max_model_len)
    sources, engine = [source], config.engine
    if engine.draft_model:
        sources.append(resolve_draft(engine.draft_model, source, report, check))
        engine = engine.model_copy(update={"speculation": sources[-1].path})
    head = RayHead() if config.cluster.address == "local" else None
    if head is not None and not config.cluster.servers:  # on a cluster, each host has its own files
        for folder in [each.folder for each in sources if each.folder is not None]:
            check_weight_files(folder)
    cluster = config.cluster
    if config.worker.engine != "pdserve":
        if source.folder is None:
            raise ConfigError(f"model.path: {config.model.path} has no files that {config.worker.engine} could load")
        if cluster.start_timeout_s is None:
            cluster = cluster.model_copy(update={"start_timeout_s": OTHER_ENGINE_START_S})
    note = tokenizer_note(source.folder)  # the gateway adds it to its status itself
    notes = [note] if note else []
    if len(roles := set(roles_of(config.cluster))) == 1:
        (role,) = roles
        notes.append(f"all workers are {role} workers: mode pd cannot run, and auto means colocated")
    gateway = config.gateway
    security_of(gateway, MonotonicClock())  # its files are read again by the gateway, and so is the template
    load_chat_template(source.folder, config.model.chat_template)
    plane_tls(config.cluster)  # those of this host; each worker reads its own
    port = free_ports(gateway.host, gateway.port, gateway.replicas)
    if gateway.served_http_port:
        free_ports(gateway.host, gateway.served_http_port, gateway.replicas, "gateway.http_port")
    settled = {"port": port, "report": gateway.report or last_report()}
    model = config.model.model_copy(update={"path": source.path})
    chosen = config.model_copy(
        update={"gateway": gateway.model_copy(update=settled), "model": model, "engine": engine, "cluster": cluster}
    )
    kept = cache_key() if config.engine.offload_folder is not None else None
    forecaster = _forecaster(config, source)
    return Preparation(chosen, source, head, kept, tuple(notes), forecaster)


def _forecaster(config: PdserveConfig, source: ModelSource) -> Forecaster | None:
    """What the controller of roles asks, if there is one with a profile. ConfigError or InvalidRequest if that cannot
    be used."""
    if config.scaling.controller == "off" or config.scaling.profile is None:
        return None
    # Few services have one, and the others start without importing the planner.
    from simulator.planning.forecast import SimulatedForecaster
    from simulator.planning.profile import Profiled

    if config.worker.engine != "pdserve" or config.cluster.servers:
        raise ConfigError("scaling.profile: forecasts are of pdserve's own engines; leave it out")
    profiled = Profiled.read(Path(config.scaling.profile), "scaling.profile")
    if profiled.model != config.model.path:
        raise ConfigError(f"scaling.profile: it is of the model {profiled.model}, and not of {config.model.path}")
    if max(config.engine.slots.values()) > 1:
        raise ConfigError("scaling.profile: a profile is of one device; set engine.tensor_parallel to 1")
    served = ServedModel.of(source, config, config.cluster.device)
    return SimulatedForecaster(profiled, served.layout, config, served.context)
