"""The status as operators see it, with addresses and processes, for a gRPC server that only they can reach."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from gateway.failures import grpc_failure
from pdserve.core.errors import PdserveError
from pdserve.pb import inference_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


def operator_view(status: Callable[[], pb.GetStatusResponse]) -> grpc.GenericRpcHandler:
    """Answers `GetStatus` of the public API with what ``status`` returns, or with the `PdserveError` that it raises."""

    def get_status(request: bytes, context: grpc.ServicerContext) -> pb.GetStatusResponse:
        try:
            return status()
        except PdserveError as error:
            code, message, metadata = grpc_failure(error)
            context.set_trailing_metadata(metadata)
            context.abort(code, message)

    handler: grpc.RpcMethodHandler[bytes, pb.GetStatusResponse] = grpc.unary_unary_rpc_method_handler(
        get_status, response_serializer=pb.GetStatusResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"GetStatus": handler})
