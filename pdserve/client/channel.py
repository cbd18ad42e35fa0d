"""Gateways that are reached by gRPC: options and credentials of channels, and the translation of statuses into
errors."""

from __future__ import annotations

import socket
import ssl
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from pdserve.client.core import GatewayCore, client_closed
from pdserve.client.request import Ask
from pdserve.client.target import Target
from pdserve.core.address import split_address
from pdserve.core.errors import (
    ERROR_KIND_KEY,
    RETRY_AFTER_KEY,
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LaunchError,
    NotReady,
    PdserveError,
    RequestAborted,
    Unauthenticated,
    from_wire,
    to_wire,
)
from pdserve.core.grpc_pings import ping_options
from pdserve.core.tls_files import read_certificates, read_key_pair
from pdserve.pb import inference_pb2_grpc as pb_grpc

CONNECT_TIMEOUT_S = 10.0
_LOOK_TIMEOUT_S = 2.0

_MAX_MESSAGE_BYTES = 64 * 2**20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A hidden retry would make a request look slow instead of failed.
    ("grpc.enable_retries", 0),
    # The service is within the cluster, not behind a proxy for the outside world.
    ("grpc.enable_http_proxy", 0),
    # Each client has its own connection and back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A request may be silent for minutes: pings keep NATs and load balancers from forgetting its connection, and tell
    # within 20 s that the service no longer answers. It permits one every 10 s (gateway/grpc_api/server_options.py).
    *ping_options(every_ms=10_000, timeout_ms=10_000, other_timeout_ms=10_000),
]

_MAX_RETRY_AFTER_MS = 3_600_000.0

_CLASSES: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: LaunchError,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


class GrpcGateway(GatewayCore):
    """A gateway at ``target``. ``channels`` is the module `grpc` or `grpc.aio`."""

    def __init__(self, target: Target, channels: Any) -> None:
        super().__init__(str(target))
        self._where, self._access = target, target.metadata
        credentials = credentials_of(target)
        self._channel = (
            channels.insecure_channel(target.address, options=CHANNEL_OPTIONS)
            if credentials is None
            else channels.secure_channel(target.address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub: Any = pb_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def start(self, ask: Ask, token_ids: Sequence[int]) -> Any:
        """See `GatewayCore`."""
        with self._while_open():
            message, metadata = ask.message(token_ids), (*ask.metadata, *self._access)
            return self._stub.Generate(message, timeout=ask.timeout_s(), metadata=metadata)

    def failure(self, error: Exception, has_begun: bool = False) -> PdserveError:
        """See `GatewayCore`."""
        if self.is_closed:
            return client_closed(self.target)
        if not isinstance(error, grpc.RpcError):
            return from_wire(*to_wire(error))
        call: Any = error
        return error_from_status(call.code(), call.details(), self.target, call.trailing_metadata(), has_begun)

    @abstractmethod
    def _while_open(self) -> AbstractContextManager[None]:
        """Translate what gRPC raises for calls over a closed channel."""


Trailing = Iterable[Any]
"""Pairs of key and value, for which the type stubs have two types."""


def error_from_status(
    code: grpc.StatusCode,
    details: str | None,
    target: str,
    trailing: Trailing | None = None,
    has_begun: bool = False,
) -> PdserveError:
    """The error for a failed call: the one named in the service's trailing metadata, else the class for the gRPC
    status. ``has_begun`` tells whether the call had received a message.

    For calls that this client did not cancel itself. No status becomes `RequestAborted`, which means just that."""
    details = " ".join((details or "").split())
    metadata = dict(trailing or ())
    kind = metadata.get(ERROR_KIND_KEY, "")
    error = _error(code, details, target, kind, has_begun)
    if isinstance(error, InvalidRequest) and isinstance(kind, str):
        error.kind = kind or error.kind
    if isinstance(error, CapacityExceeded | NotReady):
        error.retry_after_s = _retry_after_s(metadata.get(RETRY_AFTER_KEY))
    return error


def _error(code: grpc.StatusCode, details: str, target: str, kind: Any, has_begun: bool) -> PdserveError:
    if isinstance(kind, str) and details:
        error = from_wire(kind, details)
        if type(error) not in (PdserveError, RequestAborted):
            return error
    if code is grpc.StatusCode.CANCELLED:
        return _cancelled_by_the_server(details, target, has_begun)
    if code is grpc.StatusCode.UNAVAILABLE and is_reset(details):
        return NotReady(
            f"the server at {target} ended the stream ({details}): it is stopping, or accepts no more streams now; try "
            "again later"
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return NotReady(f"the service at {target} is not available: {details or 'no reason given'}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # grpc's own message ("Deadline Exceeded", "Stream removed (Deadline Exceeded)") does not help users.
        own = not details or "deadline exceeded" in details.lower()
        return DeadlineExceeded("the request's deadline passed; raise it or reduce the load" if own else details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PdserveError(f"the server at {target} is not pdserve, or of another version: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and is_reset(details):
        return _overloaded(target, details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details and not details.startswith("CLIENT"):
        return InvalidRequest(
            f"message: it is longer than any request that fits the context of the service at {target} ({details}); "
            "shorten the prompt"
        )
    if code in _CLASSES:
        return _CLASSES[code](details or code.name)
    return PdserveError(f"{code.name}: {details or 'no reason given'} (service at {target})")


def _cancelled_by_the_server(details: str, target: str, has_begun: bool) -> PdserveError:
    """A gRPC server that exceeds its limit of open streams answers CANCELLED without details, or resets the stream with
    the HTTP/2 code CANCEL."""
    unexplained = details in ("", grpc.StatusCode.CANCELLED.name) or is_reset(details)
    if unexplained and not has_begun:
        return _overloaded(target, details or grpc.StatusCode.CANCELLED.name)
    reason = details or "no reason given"
    return NotReady(f"the server at {target} cancelled the request ({reason}); send it again later")


def _overloaded(target: str, details: str) -> CapacityExceeded:
    return CapacityExceeded(
        f"the server at {target} refused the stream, most likely because too many are open ({details}); "
        "send fewer at a time, or try again later"
    )


def is_reset(details: str | None) -> bool:
    """Whether a reachable server ended the stream or the connection at the HTTP/2 level."""
    return any(frame in (details or "") for frame in ("RST_STREAM", "GOAWAY"))


def _retry_after_s(value: Any) -> float | None:
    """Seconds from the metadata's milliseconds; None if they are missing or invalid."""
    try:
        milliseconds = float(value)
    except (TypeError, ValueError):
        return None
    return milliseconds / 1e3 if 0 <= milliseconds <= _MAX_RETRY_AFTER_MS else None


def credentials_of(target: Target) -> grpc.ChannelCredentials | None:
    """The TLS credentials of a channel; None without TLS. `ConfigError` names a file that cannot be used."""
    if not target.tls:
        return None
    cert, key = None, None
    if target.cert is not None and target.key is not None:
        cert, key = read_key_pair(target.cert, target.key, "cert", "key")
    roots = None if target.ca is None else read_certificates(target.ca, "ca")
    return grpc.ssl_channel_credentials(roots, key, cert)


def tls_context(target: Target) -> ssl.SSLContext:
    """What `credentials_of` is to gRPC, for other connections to a target with TLS."""
    roots = None if target.ca is None else read_certificates(target.ca, "ca").decode("ascii")
    context = ssl.create_default_context(cadata=roots)
    if target.cert is not None and target.key is not None:
        read_key_pair(target.cert, target.key, "cert", "key")  # for its error messages
        context.load_cert_chain(target.cert, target.key, password="")
    return context


def silent(target: Target, why: str = "no answer in time") -> NotReady:
    """The error for a target where nothing answers."""
    return NotReady(
        f"nothing answers at {target} ({why}): start the service with `pdserve up`, or name the right host:port as the "
        "target"
    )


def unreachable(target: Target, details: str | None = None) -> NotReady:
    """The error for a target that gRPC cannot connect to, for which ``details`` are gRPC's reason. Finds out what is
    wrong by a connection of its own, which takes a few seconds at most."""
    try:
        host, port = split_address(target.address)
        with socket.create_connection((host, port), _LOOK_TIMEOUT_S) as connection:
            return NotReady(_obstacle(connection, host, target) or _no_grpc(target, details))
    except ValueError:  # a name of gRPC's own, such as unix:/path
        return silent(target, " ".join((details or "no connection").split()))
    except OSError as error:
        return silent(target, error.strerror or str(error))


def _no_grpc(target: Target, details: str | None) -> str:
    why = f" ({' '.join(details.split())})" if details else ""
    return (
        f"nothing answers at {target} in gRPC{why}: what listens there is not pdserve or is overloaded, or the port is "
        "that of the HTTP API; name the port of the gRPC API"
    )


def _obstacle(connection: socket.socket, host: str, target: Target) -> str:
    """Why TLS, or a connection without it, is wrong for the server at the other end; empty if it is right."""
    context = tls_context(target)
    if not target.tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    uses_tls = f"the server at {target} uses TLS: name it as https://{target.address}; --ca names its CA's certificate"
    refuses = (
        f"the server at {target} refuses the client's certificate: name one with its key (cert, key; --cert, --key)"
    )
    try:
        secured = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the server at {target} is not trusted ({error.verify_message}): name the certificate "
            "of its CA (ca, --ca), and the host as the certificate does"
        )
    except OSError as error:
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            return refuses if target.tls else uses_tls
        return f"the server at {target} does not use TLS: leave out https://, --ca and --cert" if target.tls else ""
    with secured:
        if not target.tls:
            return uses_tls
        try:
            return "" if secured.recv(1) else refuses  # a server of gRPC speaks first
        except TimeoutError:
            return ""
        except OSError:
            return refuses
