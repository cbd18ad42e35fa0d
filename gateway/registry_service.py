"""The internal gRPC service that receives the workers' heartbeats."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from gateway.worker_directory import WorkerDirectory
from pdserve.core.errors import PdserveError
from worker.authentication import Context
from worker.messages import BEATS, Beat, BeatAnswer, encode

log = logging.getLogger(__name__)


class RegistryService:
    """Passes heartbeats to the directory. The answers name the role and the links that a worker should have, or have
    it end."""

    def __init__(self, directory: WorkerDirectory, gateway_epoch: str, service: str) -> None:
        self._directory = directory
        self._service = service
        self._gateway_epoch = gateway_epoch

    async def serve(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
        """Serve one worker's stream: each heartbeat registers the worker, or renews its registration, and is answered.
        INVALID_ARGUMENT if a message is unreadable."""
        async for data in requests:
            try:
                beat = BEATS.decode(data)
            except PdserveError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            yield encode(self._answer(beat))

    def _answer(self, beat: Beat) -> BeatAnswer:
        # A worker of an earlier service at this address, or of a misconfigured one, may serve another model.
        is_ours = beat.info.service == self._service
        if not is_ours:
            log.warning("worker %s belongs to another service and is told to end", beat.info.worker_id)
        if not (is_ours and self._directory.heard(beat)):
            return BeatAnswer(self._gateway_epoch, superseded=True)
        peers = list(self._directory.wanted_links(beat.info.role))
        blocks_after = self._directory.blocks_after(beat.info.worker_id)
        role, version = self._directory.wanted_role(beat.info.worker_id)
        return BeatAnswer(
            self._gateway_epoch, superseded=False, peers=peers, blocks_after=blocks_after, role=role, version=version
        )
