"""Every error pdserve raises on purpose, in one tree.

    PdserveError
    ├── ConfigError           a configuration key or value is wrong; names its dotted key; fix it and start again
    ├── ModelError            the model folder is missing, unsupported or corrupt; fix the folder
    ├── LaunchError           the service cannot start as asked (port in use, too few device slots)
    ├── InvalidRequest        one field of a request is wrong; names the field; do not retry unchanged
    ├── CapacityExceeded      the request can never fit, or the queue is full; retry later or ask for less
    ├── NotReady              no worker can take the request yet; retry after a while
    ├── DeadlineExceeded      the request's own deadline passed; raise it or reduce the load
    ├── RequestAborted        the client cancelled; nothing to do
    ├── WorkerLost            a worker or its engine died with the request on it; safe to retry
    └── TransferError         the KV hand-off failed; safe to retry
        ├── TransferTimeout   a peer did not answer within the deadline
        ├── PeerLost          the connection to the peer broke
        ├── LayoutMismatch    two workers' KV layouts or models differ; never retry, fix the deployment
        ├── TransferRefused   the receiver refused a message (stale, foreign, malformed, out of bounds)
        └── ChecksumMismatch  the payload arrived changed

Errors cross process borders as ``(kind, message)``: `to_wire` and `from_wire` are the only two places that know how.
``retry_after_s`` does not travel with them; the gateway sends it as metadata of its answer.
"""

from __future__ import annotations

ERROR_KIND_KEY = "pdserve-error"
"""Trailing metadata of a failed gRPC call: the name of the error's class here, which is finer than the status."""

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata of a refused gRPC call: decimal milliseconds after which the service expects to have room."""


class PdserveError(Exception):
    """Base of all errors raised on purpose. ``retryable`` says whether the same request may be sent again."""

    retryable = False


class ConfigError(PdserveError):
    """A configuration key or value is wrong; the message starts with its dotted key."""


class ModelError(PdserveError):
    """The model cannot be loaded; the message names the folder or file and what is wrong with it."""


class LaunchError(PdserveError):
    """The service cannot be started (or found) as asked."""


class InvalidRequest(PdserveError):
    """One field of a request is wrong; the message starts with the field's name."""


class CapacityExceeded(PdserveError):
    """The request does not fit, now or ever; the message says which limit. ``retry_after_s`` is the number of seconds
    after which the service expects to have room; None if it does not say."""

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class NotReady(PdserveError):
    """No worker is ready to take the request. ``retry_after_s`` is as in `CapacityExceeded`."""

    retryable = True

    def __init__(self, *args: object, retry_after_s: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PdserveError):
    """The request's deadline passed before it was finished."""


class RequestAborted(PdserveError):
    """The request was cancelled by its client."""


class WorkerLost(PdserveError):
    """A worker (or its engine process) died while it held the request."""

    retryable = True


class TransferError(PdserveError):
    """The hand-off of KV blocks failed."""

    retryable = True


class TransferTimeout(TransferError):
    """A peer did not answer within the deadline."""


class PeerLost(TransferError):
    """The connection to the peer broke."""


class LayoutMismatch(TransferError):
    """The two ends' KV layouts differ; the message names the field and both values."""

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


def to_wire(error: BaseException) -> tuple[str, str]:
    """``(kind, message)`` of an error; anything outside the tree becomes ``PdserveError`` with its type named."""
    if isinstance(error, PdserveError):
        return type(error).__name__, str(error)
    return PdserveError.__name__, f"{type(error).__name__}: {error}"


def from_wire(kind: str, message: str) -> PdserveError:
    """The error that `to_wire` described; an unknown kind becomes a plain `PdserveError`."""
    return _tree(PdserveError).get(kind, PdserveError)(message)
