"""The status as operators see it, with addresses and processes, for a gRPC server that only they can reach."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from gateway.grpc_api.failures import failure_of
from pdserve.core.errors import PdserveError
from pdserve.pb import inference_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class OperatorView:
    """Answers `GetStatus` of the public API with what ``status`` returns, or with the `PdserveError` that it raises."""

    def __init__(self, status: Callable[[], pb.GetStatusResponse]) -> None:
        self._status = status

    def add_to(self, server: grpc.Server) -> None:
        """Register with ``server``."""
        handler: grpc.RpcMethodHandler[bytes, pb.GetStatusResponse] = grpc.unary_unary_rpc_method_handler(
            self.GetStatus, response_serializer=pb.GetStatusResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"GetStatus": handler}),))

    def GetStatus(self, request: bytes, context: grpc.ServicerContext) -> pb.GetStatusResponse:
        """The service's workers, with their addresses and processes."""
        try:
            return self._status()
        except PdserveError as error:
            failure = failure_of(error)
            context.set_trailing_metadata(failure.trailing_metadata)
            context.abort(failure.code, failure.message)


def serve_operators(status: Callable[[], pb.GetStatusResponse], socket: Path) -> grpc.Server:
    """A server of the view alone on a Unix socket, in a folder that only operators can enter."""
    server = grpc.server(ThreadPoolExecutor(1, "operators"))
    OperatorView(status).add_to(server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server
