"""How a running service is changed from its own host: the supervisor's small gRPC service on a Unix socket, and its
client. The socket lies in a folder that only the user who started the service can enter."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from core.errors import LaunchError, PdserveError, from_wire, to_wire
from core.worker import Role
from pb import operator_pb2 as pb
from pb import operator_pb2_grpc
from pdserve.launch.leftovers import OPERATOR_FOLDER_PREFIX

CONNECT_TIMEOUT_S = 5.0
Report = Callable[[str], None]


class Scalable(Protocol):
    """A service whose workers can be added and removed."""

    @property
    def counts(self) -> Mapping[Role, int]:
        """Workers of each role."""
        ...

    def scale(self, wanted: Mapping[Role, int], drain_s: float, report: Report) -> list[str]:
        """See `pdserve.launch.service.Service.scale`."""
        ...


class OperatorServer(operator_pb2_grpc.OperatorServicer):
    """Serves one service's operator calls until `stop`."""

    def __init__(self, service: Scalable) -> None:
        self._service = service
        self._folder = Path(tempfile.mkdtemp(prefix=OPERATOR_FOLDER_PREFIX, dir="/tmp"))
        self.socket = str(self._folder / "socket")
        self._server = grpc.server(ThreadPoolExecutor(2, "operator"))
        operator_pb2_grpc.add_OperatorServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        """End it; nothing of it is left."""
        self._server.stop(0.5).wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def Scale(self, request: pb.ScaleRequest, context: grpc.ServicerContext) -> Iterator[pb.ScaleEvent]:
        """Scale on a thread of its own: a caller that goes away must not leave it half done."""
        events: queue.SimpleQueue[pb.ScaleEvent] = queue.SimpleQueue()
        threading.Thread(target=self._scale, args=(request, events.put), name="scale").start()
        while True:
            event = events.get()
            yield event
            if event.WhichOneof("event") != "stage":
                return

    def _scale(self, request: pb.ScaleRequest, tell: Callable[[pb.ScaleEvent], None]) -> None:
        wanted = {}
        if request.HasField("prefill"):
            wanted[Role.PREFILL] = request.prefill
        if request.HasField("decode"):
            wanted[Role.DECODE] = request.decode
        try:
            waiting = self._service.scale(wanted, request.drain_s, lambda stage: tell(pb.ScaleEvent(stage=stage)))
            counts = self._service.counts
            scaled = pb.Scaled(prefill=counts[Role.PREFILL], decode=counts[Role.DECODE], waiting=waiting)
            tell(pb.ScaleEvent(scaled=scaled))
        except Exception as error:  # whatever it is: the caller waits for an answer
            kind, message = to_wire(error)
            tell(pb.ScaleEvent(failure=pb.Failure(kind=kind, message=message)))
            if not isinstance(error, PdserveError):
                raise


@dataclass(frozen=True, slots=True)
class Scaled:
    """How many workers there are now, and which of them wait for a node."""

    prefill: int
    decode: int
    waiting: tuple[str, ...]


def scale(socket: str, wanted: Mapping[Role, int], drain_s: float, timeout_s: float, report: Report) -> Scaled:
    """Ask the supervisor at ``socket`` for so many workers. Raises what kept it from having them; LaunchError if it
    does not answer."""
    if not os.path.exists(socket):
        raise LaunchError(f"the service's supervisor does not listen at {socket}; was it killed?")
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        request = pb.ScaleRequest(drain_s=drain_s)
        if Role.PREFILL in wanted:
            request.prefill = wanted[Role.PREFILL]
        if Role.DECODE in wanted:
            request.decode = wanted[Role.DECODE]
        try:
            grpc.channel_ready_future(channel).result(CONNECT_TIMEOUT_S)
            for event in stub.Scale(request, timeout=timeout_s):
                match event.WhichOneof("event"):
                    case "stage":
                        report(event.stage)
                    case "scaled":
                        return Scaled(event.scaled.prefill, event.scaled.decode, tuple(event.scaled.waiting))
                    case _:
                        raise from_wire(event.failure.kind, event.failure.message)
        except grpc.FutureTimeoutError:
            raise LaunchError(f"the service's supervisor does not answer at {socket}") from None
        except grpc.RpcError as error:
            details = getattr(error, "details", None)  # a call's errors have it
            why = details() if callable(details) else error
            raise LaunchError(f"the service's supervisor gave no answer: {why}") from None
    raise LaunchError("the service's supervisor ended while it scaled")
