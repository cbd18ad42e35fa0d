"""The status as operators see it, with addresses and processes, for a gRPC server that only they can reach."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from gateway.grpc_api.inference_servicer import SERVICE
from gateway.grpc_api.statuses import status_of
from pdserve.core.errors import ERROR_KIND_KEY, PdserveError, to_wire
from pdserve.pb import inference_pb2 as pb


class OperatorView:
    """Answers `GetStatus` of the public API with what ``status`` returns, or with the `PdserveError` that it raises."""

    def __init__(self, status: Callable[[], pb.GetStatusResponse]) -> None:
        self._status = status

    def add_to(self, server: grpc.Server) -> None:
        """Register with ``server``."""
        handler: grpc.RpcMethodHandler[bytes, pb.GetStatusResponse] = grpc.unary_unary_rpc_method_handler(
            self.GetStatus, response_serializer=pb.GetStatusResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"GetStatus": handler}),))

    def GetStatus(self, request: bytes, context: grpc.ServicerContext) -> pb.GetStatusResponse:
        """The service's workers, with their addresses and processes."""
        try:
            return self._status()
        except PdserveError as error:
            kind, message = to_wire(error)
            context.set_trailing_metadata(((ERROR_KIND_KEY, kind),))
            context.abort(status_of(error), message)


def serve_operators(status: Callable[[], pb.GetStatusResponse], socket: Path) -> grpc.Server:
    """A server of the view alone on a Unix socket, in a folder that only operators can enter."""
    server = grpc.server(ThreadPoolExecutor(1, "operators"))
    OperatorView(status).add_to(server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server
