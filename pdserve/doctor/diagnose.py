"""The whole of `pdserve doctor`, but for the printing."""

from __future__ import annotations

import contextlib

from core.config import PdserveConfig
from core.errors import LaunchError
from pdserve.doctor.examine import Examination, Progress
from pdserve.doctor.finding import fail
from pdserve.doctor.local_host import LocalHost
from pdserve.doctor.probe_host import ProbeHost
from pdserve.doctor.report import Report
from pdserve.launch.ray_environment import prepare_environment

JOIN_S = 60.0
_REMEDY = (
    "check that Ray runs there (`ray status` on its head), that its port can be reached, and that ~/.ray/auth_token is "
    "the same file on every host (or RAY_AUTH_MODE=disabled everywhere); then restart Ray where it was wrong"
)


def diagnose(config: PdserveConfig, progress: Progress = lambda stage: None) -> Report:
    """Examine where ``config`` would run. A Ray that cannot be joined is a finding, too."""
    try:
        host = _host(config, progress)
    except LaunchError as error:
        return _not_joined(config, str(error))
    with contextlib.closing(host):
        return Examination(config, host, progress).run()


def _host(config: PdserveConfig, progress: Progress) -> ProbeHost:
    address = config.cluster.address
    if address == "local":
        return LocalHost(config.model.path, config.cluster.device)
    progress(f"joining Ray at {address}")
    prepare_environment(address)
    from pdserve.doctor.ray_host import RayHost  # brings in Ray

    return RayHost(address, JOIN_S)


def _not_joined(config: PdserveConfig, why: str) -> Report:
    return Report(
        model=config.model.path,
        device=config.cluster.device,
        address=config.cluster.address,
        transport=config.transfer.transport,
        services=(),
        need=None,
        nodes=(),
        pairs=(),
        findings=(fail("join", config.cluster.address, " ".join(why.split()), _REMEDY),),
    )
