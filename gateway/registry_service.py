"""The internal gRPC service that receives the workers' heartbeats."""

from __future__ import annotations

import logging

import grpc

from gateway.worker_directory import WorkerDirectory
from pdserve.core.errors import PdserveError
from pdserve.pb import worker_pb2 as pb
from pdserve.pb import worker_pb2_grpc
from worker.messages import BEATS, BeatAnswer, to_frame

log = logging.getLogger(__name__)


class RegistryService(worker_pb2_grpc.RegistryServicer):
    """Passes heartbeats to the directory. The answers name the links that a worker should have, or have it end."""

    def __init__(self, directory: WorkerDirectory, gateway_epoch: str, service: str) -> None:
        self._directory = directory
        self._service = service
        self._gateway_epoch = gateway_epoch

    async def Heartbeat(self, request: pb.Frame, context: grpc.aio.ServicerContext[pb.Frame, pb.Frame]) -> pb.Frame:
        """Register a worker, or renew its registration. INVALID_ARGUMENT if the message is unreadable."""
        try:
            beat = BEATS.decode(request)
        except PdserveError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # A worker of an earlier service at this address, or of a misconfigured one, may serve another model.
        is_ours = beat.info.service == self._service
        if not is_ours:
            log.warning("worker %s belongs to another service and is told to end", beat.info.worker_id)
        if not (is_ours and self._directory.heard(beat)):
            return to_frame(BeatAnswer(self._gateway_epoch, superseded=True))
        peers = list(self._directory.wanted_links(beat.info.role))
        return to_frame(BeatAnswer(self._gateway_epoch, superseded=False, peers=peers))
