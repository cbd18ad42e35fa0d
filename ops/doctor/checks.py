"""Checks of the examined nodes, of the gateway's host, and of pairs of workers. `CHECKS` read what was found out;
`check_registry` and `check_control` also connect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

from checkpoints.hub import HubId
from checkpoints.source import tokenizer_note
from gateway.security import security_of
from gateway.tokenizer import load_tokenizer
from ops.doctor.network import REMEDIES, SAME, Obstacle, PingServer, dial, read_clock
from ops.doctor.node_report import NodeReport
from ops.doctor.report import DoctorReport, Endpoints, ExaminedNode, Finding, fail, ok, port_taken, warn
from ops.launch.ports import free_ports, port_base
from pdserve.core.clock import MonotonicClock, clock_id
from pdserve.core.errors import ConfigError, LaunchError, ModelError
from runtime.dtypes import DtypeChoice
from runtime.plane_tls import plane_tls

MOST_MEASURED = 64
"""Most pairs that are measured, at about a second each; the others are only tried."""
_CLOCK_ERROR_S = 0.001
_WALL_S = 1.0
_TIGHT = 0.9
_SLOW_SHARE = 0.25
_SLOW_WIRE_S = 1.0
_ANSWER_S = 5.0
_GATEWAY = "the gateway"
_HERE = "the gateway's host"
_SERVICE = "the service"
Check = Callable[[DoctorReport], Iterator[Finding]]
_SAME_INSTALL = "install the same on every host (`ray up cluster.yaml` does), then restart Ray there"


def check_versions(seen: DoctorReport) -> Iterator[Finding]:
    """Versions have to be those of the gateway's host."""
    here = seen.gateway_host
    for node, report in _reported(seen):
        for name, ours, theirs in (
            ("python", _minor(here.python), _minor(report.python)),
            ("pdserve", here.pdserve, report.pdserve),
            ("ray", here.ray, report.ray),
        ):
            if ours != theirs:
                yield fail("version", node.name, f"{name} {theirs}, but {ours} on {_HERE}", _SAME_INSTALL)
        if here.pdserve == report.pdserve and here.source != report.source:
            what = f"its pdserve has version {report.pdserve}, but its source differs from that of {_HERE}"
            yield fail("version", node.name, what, _SAME_INSTALL)
        if report.torch_error:
            yield fail("version", node.name, report.torch_error, "repair the installation of torch there")
        elif _release(here.torch) != _release(report.torch):
            what = f"torch {report.torch}, but {here.torch} on {_HERE}"
            yield warn("version", node.name, what, "install the same: results and speed may differ between workers")


def check_models(seen: DoctorReport) -> Iterator[Finding]:
    """The gateway needs the tokenizer, and every worker the same weights."""
    here, model = seen.gateway_host, seen.config.model.path
    if here.model_error:
        yield fail("model", _HERE, here.model_error, "put the model there: the gateway reads its tokenizer")
    draft_remedy = "name a smaller model of the same family, on every host, or set engine.speculation to ngram or off"
    if here.draft_error:
        yield fail("model", _HERE, here.draft_error, draft_remedy)
    remedy = f"copy the model to the same path on every host, or name a path that all share (model.path: {model})"
    known = here.model_hash
    for node, report in _reported(seen):
        if report.model_error:
            if HubId.of(model) is not None and not here.model_error:
                later = "none needed if that host reaches the hub: `up` downloads it there before it starts workers"
                yield warn("model", node.name, report.model_error, later)
            elif not here.model_error or node.node.node_id != seen.gateway_node:
                yield fail("model", node.name, report.model_error, remedy)
        elif not known:
            known = report.model_hash
        elif report.model_hash != known:
            what = f"{model} is a different model there: weights {report.model_hash}, elsewhere {known}"
            yield fail("model", node.name, what, remedy)
        if report.draft_error and not here.draft_error:
            finding = fail if HubId.of(seen.config.engine.draft_model) is None else warn  # `up` downloads it
            yield finding("model", node.name, report.draft_error, draft_remedy)


def check_dtype(asked: str, choice: DtypeChoice) -> Iterator[Finding]:
    """Emulated dtypes are several times slower; the dtype that `auto` chooses instead may need more memory."""
    if not choice.note:
        return
    remedy = "set model.dtype to auto or float32"
    if asked == "auto":
        remedy = (
            f"none needed if {choice.dtype} is acceptable; else set model.dtype, or place the workers on hosts that "
            "compute the checkpoint's dtype natively"
        )
    yield warn("dtype", _SERVICE, choice.note, remedy)


def check_cores(seen: DoctorReport) -> Iterator[Finding]:
    """Engines on CPUs need cores of their own, which no other service has claimed."""
    cluster = seen.config.cluster
    if seen.device != "cpu" or cluster.oversubscribe:
        return
    for node, report in _reported(seen):
        allowed = set(report.allowed_cores)
        others = [each for each in report.held_cores if each.core in allowed and each.port != seen.own_port]
        slots = sum(seen.config.engine.slots[seat.role] for seat in node.seats)
        wanted = min(slots * cluster.cores_per_worker, len(allowed))
        free = len(allowed - {each.core for each in others})
        if wanted <= free or not others:
            continue
        holders = "; ".join(f"core {each.core}: {each}" for each in others)
        what = f"its workers need {wanted} cores, and {free} are not claimed by another service ({holders})"
        remedy = "end that service, ask for fewer workers, or expect both services to be slower"
        yield warn("cores", node.name, what, remedy)


def check_devices(seen: DoctorReport) -> Iterator[Finding]:
    """torch has to be able to use the GPUs that Ray assigns."""
    for node, report in _reported(seen) if seen.device == "cuda" else ():
        claimed, usable = int(node.node.num_gpus), len(report.devices)
        if usable >= max(claimed, 1):
            continue
        what = f"Ray has {claimed} GPU(s) there, but torch sees {usable or 'none'}"
        if report.torch_error:
            remedy = f"torch says: {report.torch_error}"
        elif not report.cuda:
            remedy = f"torch {report.torch} is a CPU build: install torch's CUDA build there, or use --device cpu"
        else:
            remedy = (
                "see `nvidia-smi` and CUDA_VISIBLE_DEVICES there; start Ray without --num-gpus; or use --device cpu"
            )
        yield fail("device", node.name, what, remedy)


def check_mps(seen: DoctorReport) -> Iterator[Finding]:
    """Without MPS, the transfers and the steps of a GPU take turns."""
    if seen.device != "cuda" or seen.config.cluster.mps == "off":
        return
    for node, report in _reported(seen):
        if report.mps and report.devices:
            what = f"transfers and steps will take turns on its GPUs, without MPS: {report.mps}"
            yield warn("mps", node.name, what, "see docs/gpu.md; or accept that with cluster.mps: off")


def check_compilers(seen: DoctorReport) -> Iterator[Finding]:
    """Engines on GPUs compile kernels when they start."""
    if not seen.config.has_own_engines:
        return
    for node, report in _reported(seen) if seen.device == "cuda" else ():
        if report.triton_lacks:
            what = f"Triton cannot compile kernels there, without {' and '.join(report.triton_lacks)}"
            yield fail("compilers", node.name, what, "install that in the image or on the host")
        if report.flashinfer_lacks and seen.config.engine.prefill_attention != "triton":
            what = f"FlashInfer cannot compile kernels there, without {' and '.join(report.flashinfer_lacks)}"
            yield warn("compilers", node.name, what, "install that, or set engine.prefill_attention: triton")


def check_affinity(seen: DoctorReport) -> Iterator[Finding]:
    """KV that leaves a host from a GPU whose nearest interface is on another NUMA node crosses the link of the
    sockets."""
    for node, report in _reported(seen) if seen.device == "cuda" else ():
        for index, device in enumerate(report.devices):
            if (place := device.affinity) is None:
                continue
            numa = "unknown" if place.numa_node is None else place.numa_node
            nearest = ", ".join(place.interfaces) or "none"
            what = f"GPU {index}: NUMA node {numa}, nearest network interfaces {nearest}"
            if place.near is False:
                remedy = "place workers that hand KV to other hosts on other GPUs, or expect slower transfers"
                yield warn("affinity", node.name, f"{what}, on another NUMA node", remedy)
            else:
                yield ok("affinity", node.name, what)


def check_server_command(seen: DoctorReport) -> Iterator[Finding]:
    """Workers with another engine start its servers. Unless pdserve moves the KV, links between them are not tried."""
    worker = seen.config.worker
    if seen.config.has_own_engines:
        return
    for node, report in _reported(seen):
        if not report.server_command:
            what = f"there is no program {worker.program!r}, which would start {worker.engine}"
            yield fail("engine", node.name, what, f"install {worker.engine} there, or set worker.command to its path")
    if not seen.config.moves_kv:
        yield ok("engine", _SERVICE, f"{worker.engine} moves the KV by itself, so links were not tried")


def check_memory(seen: DoctorReport) -> Iterator[Finding]:
    """The workers have to fit into memory: together on a host, one per GPU (or a share of it) on GPUs."""
    if (need := seen.need) is None:
        return
    for node, free, workers in _memories(seen):
        needed, where = need.total_bytes * workers, "free on a GPU" if seen.device == "cuda" else "available"
        parts = (
            f"{workers} × ({_mb(need.weight_bytes)} weights + {_mb(need.pool_bytes + need.blank_bytes)} KV pool + "
            f"{_mb(need.activation_bytes)} activations)"
        )
        what = f"needs {_mb(needed)} = {parts}; {_mb(free)} {where}"
        remedy = "lower engine.kv_memory_mb (or num_blocks), place fewer workers there, or free memory"
        if seen.own_port:
            yield ok("memory", node.name, f"{what}, besides the memory of the service that is running")
        elif needed > free:
            yield fail("memory", node.name, what, remedy)
        elif needed > _TIGHT * free:
            yield warn("memory", node.name, f"{what}: little is left for other processes", remedy)


def check_context(seen: DoctorReport) -> Iterator[Finding]:
    """Requests as long as the context have to be what the model was made for, and to fit a worker's KV pool."""
    need, source = seen.need, seen.source
    if need is None or source is None:
        return
    try:
        source.shape.check_context(seen.config.engine.max_model_len)
    except ConfigError as error:
        yield fail("context", _SERVICE, str(error), "lower it")
        return
    held = need.pool_tokens()
    if not held and not seen.own_port:  # a pool takes what is left of a GPU
        left = [free // workers - need.total_bytes for _, free, workers in _memories(seen)]
        held = max(0, need.pool_tokens(min(left, default=0)))
    if 0 < held < need.context:
        then = "longer requests are refused"
        if not seen.config.has_own_engines:
            then = f"{seen.config.worker.engine} may refuse to start, or may refuse longer requests"
        what = f"a request may have {need.context} tokens, and a KV pool holds {held}: {then}"
        yield warn(
            "context", _SERVICE, what, "raise engine.kv_memory_mb (or num_blocks), or lower engine.max_model_len"
        )


def _memories(seen: DoctorReport) -> Iterator[tuple[ExaminedNode, int, int]]:
    """The nodes with workers, and the bytes that are free for how many of them: on a host, or on its fullest GPU."""
    for node, report in _reported(seen):
        if not node.seats or (seen.device == "cuda" and not report.devices):
            continue
        if seen.device == "cuda":
            free = min(each.free_bytes for each in report.devices)
            yield node, free, -(-len(node.seats) // len(report.devices))
        else:
            yield node, report.memory_bytes, len(node.seats)


def check_clocks(seen: DoctorReport) -> Iterator[Finding]:
    """Breakdowns are corrected by the offsets of monotonic clocks; wall clocks matter only for reading logs."""
    for node, report in _reported(seen):
        clock = node.clock
        if clock is None:
            continue
        if clock.error_s > _CLOCK_ERROR_S:
            what = f"its clock offset is known to ± {clock.error_s * 1e3:.1f} ms only (half the shortest round trip)"
            remedy = "expect this error in stages that span hosts, or use a network with shorter round trips"
            yield warn("clock", node.name, what, remedy)
        if abs(clock.wall_s) > _WALL_S:
            what = f"its wall clock is {clock.wall_s:+.1f} s off that of {_HERE}"
            yield warn("clock", node.name, what, "run chrony or ntpd, so that the logs of both hosts can be compared")
        same_machine = _boot(report.clock_id) and _boot(report.clock_id) == _boot(seen.gateway_host.clock_id)
        if same_machine and abs(clock.offset_s) > clock.error_s + _CLOCK_ERROR_S:
            what = (
                f"its monotonic clock is {clock.offset_s:+.3f} s (± {clock.error_s * 1e3:.3f} ms) off that of {_HERE}, "
                "although both run on one machine: it has a time namespace of its own"
            )
            remedy = (
                "breakdowns are corrected by the measured offset, but times in logs are not: to compare logs, have the "
                "container runtime share the host's time namespace"
            )
            yield warn("clock", node.name, what, remedy)


def check_endpoints(seen: DoctorReport) -> Iterator[Finding]:
    """Probes have to be able to listen as the workers would, on interfaces that connect the hosts."""
    own_port = seen.own_port
    for node in seen.nodes:
        report = node.report
        # Without model or GPU there are no KV ends, which other checks report.
        is_known = report is not None and (bool(report.model_error) or (seen.device == "cuda" and not report.devices))
        found = [finding for each in node.endpoints.values() for finding in each.findings]
        if own_port and any(finding.check == "port" for finding in found):
            what = f"the service on port {own_port} uses its workers' ports, so measurements use others"
            yield ok("port", node.name, what)
        for finding in found:
            if not (finding.check == "port" and own_port) and not (finding.check == "kv" and is_known):
                yield finding
        for each in node.endpoints.values():
            if each.interface is not None and not each.interface.is_up:
                what = f"{each.interface.device} ({each.interface.address}) has no carrier"
                yield fail("interface", node.name, what, "connect it, or name another with transfer.interface")
    # Each node needs an address of its own: a shared one (of a bridge, or loopback) leads every node to itself.
    owners: dict[str, ExaminedNode] = {}
    for node in seen.nodes:
        for interface in node.interfaces:
            other = owners.setdefault(interface.address, node)
            if other.node.ip != node.node.ip:  # else both are one host
                what = f"KV would listen on {interface.address}, which {other.name} has as well: each would call itself"
                remedy = "name a device or network that connects the hosts with transfer.interface"
                yield fail("interface", node.name, what, remedy)


def _reported(seen: DoctorReport) -> Iterator[tuple[ExaminedNode, NodeReport]]:
    return ((node, node.report) for node in seen.nodes if node.report is not None)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release(version: str) -> str:
    return version.partition("+")[0]


def _boot(clock_id: str) -> str:
    return clock_id.partition("/")[0]


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def check_gateway_port(seen: DoctorReport) -> Iterator[Finding]:
    """The public ports have to be free, unless the examined service itself runs."""
    gateway = seen.config.gateway
    if seen.own_port:
        yield ok("port", _GATEWAY, f"the service on port {gateway.port} runs; a second one needs other ports")
        return
    ports = {"gateway.port": gateway.port, "gateway.http_port": gateway.served_http_port}
    for key, port in ports.items():
        try:
            if port:
                free_ports(gateway.host, port, gateway.replicas, key)
        except LaunchError as error:
            yield fail("port", _GATEWAY, str(error), f"end the process that holds it, or choose another {key}")


def check_access(seen: DoctorReport) -> Iterator[Finding]:
    """The files for TLS and tokens have to be there, and others must not reach the service unprotected."""
    checks = partial(security_of, seen.config.gateway, MonotonicClock()), partial(plane_tls, seen.config.cluster)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield fail("access", _GATEWAY, str(error), "see docs/security.md")


def check_tokenizer(seen: DoctorReport) -> Iterator[Finding]:
    """The gateway needs the ``tokenizer.json`` of the model's folder to accept text."""
    folder = None if seen.source is None else seen.source.folder
    try:
        if note := tokenizer_note(folder):
            yield warn("tokenizer", _GATEWAY, note, "convert the tokenizer, or have clients send token ids")
        else:
            load_tokenizer(folder)
    except ModelError as error:
        yield fail("tokenizer", _GATEWAY, str(error), "download the file again")


def check_registry(seen: DoctorReport, host: str, timeout_s: float, pool: Executor) -> Iterator[Finding]:
    """Every node has to reach the workers' registry on the gateway's ``host``: all of them dial a listener."""
    port = port_base(seen.config.cluster)
    try:
        server = PingServer(host, port)
    except OSError as error:
        if not seen.own_port:  # else the examined service listens there
            yield port_taken(_GATEWAY, f"cannot listen on {host}:{port} (registry): {error.strerror}", port)
        return
    answers: dict[str, Obstacle] = {}

    def reach(node: ExaminedNode) -> None:
        arguments = {"address": server.address, "timeout_s": timeout_s}
        with node.noting(node.name):
            answers[node.node.node_id] = node.any_probe.call("dial", arguments, timeout_s + _ANSWER_S, Obstacle)

    with contextlib.closing(server):
        list(pool.map(reach, [node for node, _ in _reported(seen)]))
        address = server.address
    for node in seen.nodes:
        found = answers.get(node.node.node_id, Obstacle.NONE)
        if found is not Obstacle.NONE:
            what = f"cannot reach the gateway's registry at {address}: {found}"
            yield fail("control", node.name, what, REMEDIES[found])


def check_control(seen: DoctorReport, timeout_s: float, pool: Executor) -> Iterator[Finding]:
    """The gateway has to reach every worker's control port. Sets the nodes' clocks, which are compared one after the
    other, because concurrent work in this process would increase the error."""
    ends = [(node, each) for node in seen.nodes for each in node.endpoints.values() if each.control]
    dialled = pool.map(lambda end: dial(end[1].control, timeout_s), ends)
    open_by_node: dict[str, str] = {}
    for (node, each), found in zip(ends, dialled, strict=True):
        if found is Obstacle.NONE:
            open_by_node.setdefault(node.node.node_id, each.control)
        else:
            what = f"the gateway cannot reach it at {each.control} (control): {found}"
            yield fail("control", f"{each.worker_id} on {node.name}", what, REMEDIES[found])
    for node in seen.nodes:
        address = open_by_node.get(node.node.node_id)
        if address is None:
            continue
        if node.report is not None and node.report.clock_id and node.report.clock_id == clock_id():
            node.clock = SAME
            continue
        with contextlib.suppress(OSError):  # the clock stays unknown
            node.clock = read_clock(address, timeout_s)


def check_reach(seen: DoctorReport) -> Iterator[Finding]:
    """Pairs that cannot connect. An end that could not listen has a finding of its own."""
    for pair in seen.pairs:
        meeting = pair.meeting
        if meeting.figures is not None or meeting.obstacle is Obstacle.NOT_TRIED:
            continue
        at = f" at {meeting.address} ({meeting.transport})" if meeting.address else ""
        what = f"{pair.prefill.node.ip} cannot send KV to {pair.decode.node.ip}{at}: {meeting.obstacle}: {meeting.what}"
        yield fail("reach", pair.name, what, REMEDIES[meeting.obstacle])


def check_speed(seen: DoctorReport) -> Iterator[Finding]:
    """Links that are much slower than others of their kind, or too slow for this model."""
    endpoints = {worker_id: each for node in seen.nodes for worker_id, each in node.endpoints.items()}
    best: dict[tuple[str, bool], float] = {}
    for pair in seen.pairs:
        kind = (pair.meeting.transport, pair.across)
        best[kind] = max(best.get(kind, 0.0), pair.gbs)
    for pair in seen.pairs:
        if not pair.gbs:
            continue
        fastest = best[pair.meeting.transport, pair.across]
        longest = max(pair.predictions, default=0)
        what = f"{pair.gbs * 8:.3g} Gbit/s by {pair.meeting.transport}"
        if pair.gbs < _SLOW_SHARE * fastest:
            what += f", while another pair reaches {fastest * 8:.3g}"
        elif longest and (wire_s := pair.predictions[longest].wire_s) > _SLOW_WIRE_S:
            what += f": the KV of {longest} tokens takes {wire_s:.1f} s"
        else:
            continue
        claims = [_claim(seat.worker_id, endpoints.get(seat.worker_id)) for seat in (pair.prefill, pair.decode)]
        remedy = f"it runs over {' and '.join(claims)}; if there is a faster network, name it with transfer.interface"
        yield warn("link", pair.name, what, remedy)


def check_measured(seen: DoctorReport) -> Iterator[Finding]:
    """Pairs beyond `MOST_MEASURED`."""
    left = sum(pair.meeting.figures is not None and not pair.gbs for pair in seen.pairs)
    if left:
        what = f"{left} of {len(seen.pairs)} pairs were tried but not measured: at most {MOST_MEASURED} are"
        yield ok("link", _SERVICE, what)


def _claim(worker_id: str, ends: Endpoints | None) -> str:
    interface = ends.interface if ends is not None else None
    if interface is None or not interface.device:
        return f"an unknown interface ({worker_id})"
    speed = f"claims {interface.mbits} Mbit/s" if interface.mbits else "states no speed"
    return f"{interface.device} {interface.address} ({worker_id}; {speed})"


AT_GATEWAY: Sequence[Check] = (check_gateway_port, check_access, check_tokenizer)
CHECKS: Sequence[Check] = (
    check_versions, check_models, check_devices, check_compilers, check_server_command, check_affinity, check_mps,
    check_cores, check_endpoints, check_memory, check_context, check_clocks, check_reach, check_speed, check_measured,
)  # fmt: skip
