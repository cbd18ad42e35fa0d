"""The internal service that workers report to."""

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
    """Hands heartbeats to the directory, and answers them with what is wanted of the worker."""

    def __init__(self, directory: WorkerDirectory, gateway_epoch: str, service: str) -> None:
        self._directory = directory
        self._service = service
        self._gateway_epoch = gateway_epoch

    async def Heartbeat(self, request: pb.Frame, context: grpc.aio.ServicerContext[pb.Frame, pb.Frame]) -> pb.Frame:
        """Register a worker, or note that it lives."""
        try:
            beat = BEATS.decode(request)
        except PdserveError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # One of an earlier service, or of another that was told this address: it may serve anything.
        is_ours = beat.info.service == self._service
        if not is_ours:
            log.warning("worker %s of another service reports here: it is told to end", beat.info.worker_id)
        if not (is_ours and self._directory.heard(beat)):
            return to_frame(BeatAnswer(self._gateway_epoch, superseded=True))
        peers = list(self._directory.wanted_links(beat.info.role))
        return to_frame(BeatAnswer(self._gateway_epoch, superseded=False, peers=peers))
