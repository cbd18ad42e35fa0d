"""The whole of `pdserve doctor`, but for the printing."""

from __future__ import annotations

import contextlib
import re

from ops.doctor.dial import REMEDIES, Dial, dial
from ops.doctor.examine import Examination, Progress
from ops.doctor.finding import fail
from ops.doctor.local_host import LocalHost
from ops.doctor.report import Report
from ops.launch.ray_environment import prepare_environment
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError

JOIN_S = 60.0
_DIAL_S = 5.0
_REMEDY = (
    "something answers there: ~/.ray/auth_token has to be the same on every host (or RAY_AUTH_MODE=disabled on all), "
    "and python and ray have to be the head's; `ray status` on the head says whether that is well"
)


def diagnose(config: PdserveConfig, progress: Progress = lambda stage: None) -> Report:
    """Examine where ``config`` would run. A Ray that cannot be joined is a finding, too."""
    address = config.cluster.address
    if address == "local":
        return Examination(config, LocalHost(config.model.path, config.cluster.device), progress).run()
    progress(f"joining Ray at {address}")
    if re.fullmatch(r"\S+:\d+", address) and (found := dial(address, _DIAL_S)) is not Dial.OPEN:
        # Ray itself would try for much longer, and say less.
        remedy = "start Ray there (`ray start --head`), or name the address that `ray status` works with"
        if found is not Dial.REFUSED:
            remedy = REMEDIES[found]
        return _not_joined(config, f"there is no Ray at {address}: {found}", remedy)
    prepare_environment(address)
    from ops.doctor.ray_host import RayHost  # brings in Ray

    try:
        host = RayHost(address, JOIN_S)
    except LaunchError as error:
        return _not_joined(config, str(error), _REMEDY)
    with contextlib.closing(host):
        return Examination(config, host, progress).run()


def _not_joined(config: PdserveConfig, why: str, remedy: str) -> Report:
    return Report(
        model=config.model.path,
        device=config.cluster.device,
        address=config.cluster.address,
        transport=config.transfer.transport,
        services=(),
        need=None,
        nodes=(),
        pairs=(),
        findings=(fail("join", config.cluster.address, " ".join(why.split()), remedy),),
    )
