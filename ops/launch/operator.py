"""Operating a running service from its own host: the supervisor's gRPC service on a Unix socket, and its client. Only
the user who started the service can access the socket's folder. The socket also answers `GetStatus` of the public API,
with the addresses and processes that the public port does not tell."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from ops.launch.node_tasks import Report
from pdserve.core.errors import LaunchError, PdserveError, from_wire, to_wire
from pdserve.core.worker import Role
from pdserve.pb import operator_pb2 as pb
from pdserve.pb import operator_pb2_grpc

if TYPE_CHECKING:
    from ops.launch.service import Service
    from ops.launch.shutdown import ServiceShutdown

CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 60.0
SUPERVISOR = "supervisor"
T = TypeVar("T")


def supervisor_log(path: str) -> pb.Log:
    """The log of the supervisor itself."""
    return pb.Log(name=SUPERVISOR, node="here", path=path)


class OperatorServer(operator_pb2_grpc.OperatorServicer):
    """Serves operator calls at ``socket`` until `stop`. ``log`` is the path of the supervisor's log (empty: it logs to
    its terminal). ``on_scaled`` is called after scaling, before the caller gets the answer."""

    def __init__(
        self, service: Service, shutdown: ServiceShutdown, socket: str, on_scaled: Callable[[], None], log: str = ""
    ) -> None:
        from gateway.grpc_api.operator_view import operator_view  # imports the gateway, which clients do not need

        self._service, self._shutdown, self._log = service, shutdown, log
        self._on_scaled = on_scaled
        self.socket = socket
        self._folder = Path(socket).parent
        self._folder.mkdir(mode=0o700)
        self._server = grpc.server(ThreadPoolExecutor(8, "operator"))
        operator_pb2_grpc.add_OperatorServicer_to_server(self, self._server)
        self._server.add_generic_rpc_handlers((operator_view(service.status),))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        """Stop serving, and remove the socket."""
        self._server.stop(0.5).wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> Iterator[pb.StopEvent]:
        """Request the shutdown, and stream its progress until it is complete."""
        self._shutdown.request(request.drain_s)
        for stage in self._shutdown.follow():
            if not context.is_active():
                return
            if stage:
                yield pb.StopEvent(stage=stage)

    def ListLogs(self, request: pb.ListLogsRequest, context: grpc.ServicerContext) -> pb.ListLogsResponse:
        """The logs of supervisor, gateway, and workers."""
        return pb.ListLogsResponse(logs=[supervisor_log(self._log), *self._service.logs()])

    def ReadLog(self, request: pb.ReadLogRequest, context: grpc.ServicerContext) -> pb.ReadLogResponse:
        """A part of the log of the gateway or a worker."""
        try:
            return self._service.read_log(request.name, request.path, request.offset)
        except PdserveError as error:
            return pb.ReadLogResponse(error=str(error))

    def Scale(self, request: pb.ScaleRequest, context: grpc.ServicerContext) -> Iterator[pb.ScaleEvent]:
        """Add or remove workers. Runs on a thread of its own, so that it completes even if the caller disconnects."""
        events: queue.SimpleQueue[pb.ScaleEvent] = queue.SimpleQueue()
        threading.Thread(target=self._scale, args=(request, events.put), name="scale").start()
        while True:
            event = events.get()
            yield event
            if event.WhichOneof("event") != "stage":
                return

    def _scale(self, request: pb.ScaleRequest, send: Callable[[pb.ScaleEvent], None]) -> None:
        wanted = {role: getattr(request, role.value) for role in Role if request.HasField(role.value)}
        urls = {Role.PREFILL: list(request.prefill_urls), Role.DECODE: list(request.decode_urls)}
        try:
            try:
                scaled = self._service.scale(
                    wanted,
                    request.drain_s,
                    lambda stage: send(pb.ScaleEvent(stage=stage)),
                    request.oversubscribe,
                    {role: at for role, at in urls.items() if at},
                )
            finally:
                self._on_scaled()
            send(pb.ScaleEvent(scaled=scaled))
        except Exception as error:  # the caller waits for an answer in any case
            kind, message = to_wire(error)
            send(pb.ScaleEvent(failure=pb.Failure(kind=kind, message=message)))
            if not isinstance(error, PdserveError):
                raise


def request_scale(socket: str, request: pb.ScaleRequest, timeout_s: float, report: Report) -> pb.Scaled:
    """Have the supervisor at ``socket`` change the number of workers. Returns the new counts, the workers that wait for
    a node, and those with another role, or raises the supervisor's error. This and the functions below raise
    LaunchError if the supervisor does not answer."""

    def ask(stub: Any) -> pb.Scaled:
        for event in stub.Scale(request, timeout=timeout_s):
            match event.WhichOneof("event"):
                case "stage":
                    report(event.stage)
                case "scaled":
                    return cast("pb.Scaled", event.scaled)
                case _:
                    raise from_wire(event.failure.kind, event.failure.message)
        raise LaunchError("the service's supervisor ended while it was scaling")

    return _call(socket, ask)


def request_stop(socket: str, drain_s: float, timeout_s: float, report: Report) -> None:
    """Shut the service down. Returns when it has ended, or is about to."""

    def ask(stub: Any) -> None:
        for event in stub.Stop(pb.StopRequest(drain_s=drain_s), timeout=timeout_s):
            report(event.stage)

    _call(socket, ask)


def list_logs(socket: str) -> list[pb.Log]:
    """All logs. The path is empty for a log on a terminal."""
    return list(_call(socket, lambda stub: stub.ListLogs(pb.ListLogsRequest(), timeout=CALL_TIMEOUT_S)).logs)


def read_log_of(socket: str, name: str, path: str, offset: int) -> pb.ReadLogResponse:
    """The part of a log that begins at ``offset``, or its first part if the log is not at ``path`` (any more)."""
    request = pb.ReadLogRequest(name=name, path=path, offset=offset)
    part: pb.ReadLogResponse = _call(socket, lambda stub: stub.ReadLog(request, timeout=CALL_TIMEOUT_S))
    if part.error:
        raise LaunchError(part.error)
    return part


def _call(socket: str, ask: Callable[[Any], T]) -> T:
    if not os.path.exists(socket):
        raise LaunchError(f"the service's supervisor does not listen at {socket}; it may have been killed")
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_TIMEOUT_S)
            return ask(operator_pb2_grpc.OperatorStub(channel))
        except grpc.FutureTimeoutError:
            raise LaunchError(f"the service's supervisor does not answer at {socket}") from None
        except grpc.RpcError as error:
            details = getattr(error, "details", None)  # errors of calls have it
            why = details() if callable(details) else error
            raise LaunchError(f"the service's supervisor gave no answer: {why}") from None
