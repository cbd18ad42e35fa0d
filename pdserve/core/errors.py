"""The errors that pdserve raises deliberately, as one tree.

    PdserveError
    ├── ConfigError           a configuration key or value is wrong; names its dotted key
    ├── ModelError            the model folder is missing, unsupported or corrupt
    ├── LaunchError           the service cannot start as requested (port in use, too few device slots)
    ├── InvalidRequest        one field of a request is wrong; names the field; do not retry unchanged
    ├── Unauthenticated       the call has no token that the service knows; do not retry with the same one
    ├── CapacityExceeded      the request does not fit, or the queue is full; retry later or ask for less
    ├── NotReady              no worker can take the request yet; retry later
    ├── DeadlineExceeded      the request's own deadline passed; raise it or reduce the load
    ├── RequestAborted        the client cancelled the request
    ├── WorkerLost            a worker or its engine died with the request on it; safe to retry
    └── TransferError         the KV transfer failed; safe to retry
        ├── TransferTimeout   a peer did not answer within the deadline
        ├── PeerLost          the connection to the peer broke
        ├── LayoutMismatch    two workers' KV layouts or models differ; never retry, fix the deployment
        ├── HandOffMissing    prefill's engine does not hand its KV over; never retry, fix the deployment
        ├── TransferRefused   the receiver refused a message (stale, foreign, malformed, out of bounds)
        └── ChecksumMismatch  the payload was changed on the way

Errors travel between processes as ``(kind, message)``, made by `to_wire` and read by `from_wire`. ``retry_after_s`` is
not included; the gateway sends it as metadata of its answer.
"""

from __future__ import annotations

ERROR_KIND_KEY = "pdserve-error"
"""Trailing metadata of a failed gRPC call: the error's kind, which is more specific than the status."""

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata of a refused gRPC call: decimal milliseconds after which the service expects to have room."""


class PdserveError(Exception):
    """Base of all errors raised on purpose."""

    retryable = False
    """Whether the same request may be sent again."""

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        self.kind = type(self).__name__
        """Its name on the wire, in metrics and in traces."""
        self.retry_after_s = retry_after_s
        """Seconds until the service expects to have room (None: unknown)."""


class ConfigError(PdserveError):
    """A configuration key or value is wrong; the message starts with its dotted key."""


class ModelError(PdserveError):
    """The model cannot be loaded; the message names the folder or file and the problem."""


class LaunchError(PdserveError):
    """The service cannot be started, or found, as requested."""


class InvalidRequest(PdserveError):
    """One field of a request is wrong; the message starts with the field's name. Those that have an HTTP status of
    their own have a ``kind`` of their own, too (`gateway.failures.INVALID`)."""

    def __init__(self, *args: object, kind: str = "InvalidRequest") -> None:
        super().__init__(*args)
        self.kind = kind


class Unauthenticated(PdserveError):
    """The call has no token, or one that the service does not know or that has expired."""


class CapacityExceeded(PdserveError):
    """The request does not fit, now or at all; the message names the limit."""


class NotReady(PdserveError):
    """No worker is ready for the request."""

    retryable = True


class DeadlineExceeded(PdserveError):
    """The request's deadline passed before it was finished."""


class RequestAborted(PdserveError):
    """The request was cancelled by its client."""


class WorkerLost(PdserveError):
    """A worker, or its engine process, died while it was serving the request."""

    retryable = True


class TransferError(PdserveError):
    """The KV transfer failed."""

    retryable = True


class TransferTimeout(TransferError):
    """A peer did not answer within the deadline."""


class PeerLost(TransferError):
    """The connection to the peer broke."""


class LayoutMismatch(TransferError):
    """The two ends' KV layouts differ; the message names the field and both values."""

    retryable = False


class HandOffMissing(TransferError):
    """The engine of a prefill worker has answered without what decode needs to fetch the KV."""

    retryable = False


class TransferRefused(TransferError):
    """The receiver refused a message; the message says which check failed."""


class ChecksumMismatch(TransferError):
    """A payload's checksum differs from its header's."""


def _tree(root: type[PdserveError]) -> dict[str, type[PdserveError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds |= _tree(child)
    return kinds


def field_of(error: BaseException) -> str | None:
    """The field that a request has to change, which the message of a refusal starts with. None for errors that no other
    value would avoid."""
    if isinstance(error, InvalidRequest) or (isinstance(error, CapacityExceeded) and error.retry_after_s is None):
        field, separator, _ = str(error).partition(": ")
        return field if separator else None
    return None


def to_wire(error: BaseException) -> tuple[str, str]:
    """``(kind, message)`` of an error; anything outside the tree becomes ``PdserveError`` with its type named."""
    if isinstance(error, PdserveError):
        return error.kind, str(error)
    return PdserveError.__name__, f"{type(error).__name__}: {error}"


def from_wire(kind: str, message: str) -> PdserveError:
    """The error that `to_wire` described; an unknown kind becomes a plain `PdserveError`."""
    return _tree(PdserveError).get(kind, PdserveError)(message)
