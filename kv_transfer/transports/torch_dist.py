"""Transport over torch.distributed: Gloo on CPUs, NCCL on GPUs.

A TCP connection carries headers, and announces the size of each payload. Payloads travel as ``send``/``recv`` of a
process group that belongs to this link alone. So a receive is posted only for a payload that was announced, and a lost
peer shows as the end of the TCP connection. A link whose group fails is closed; the next connect builds another group.

Up to `IN_FLIGHT` payloads are on their way in each direction. One thread gathers payloads and begins operations, in the
order of their headers, and another one waits for their ends. So a payload is gathered while the one before it is sent,
and the next operation follows without a turn of the event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, NOTHING, KVLink, check_sizes
from kv_transfer.fetch import Fetch, Payload, settled
from kv_transfer.memory import Memory
from kv_transfer.pending_peers import MAX_HELLO_BYTES
from kv_transfer.transports.inbox import Content, InboxLink, again
from kv_transfer.transports.tcp import TcpTransport, tune
from pdserve.core.errors import ConfigError, PeerLost, TransferError, TransferTimeout
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

if TYPE_CHECKING:
    from kv_transfer.transports.torch_groups import Backend, ExchangeStore, Groups, Operation

FRAME = struct.Struct("<IQ")  # length of the header, length of the payload
IN_FLIGHT = 2
"""Payloads on their way in one direction of a link: sent and not received, or gathered."""
_QUEUED_FRAMES = 256
_GRACE_S = 1.0
_CLOSE_S = 1.0
T = TypeVar("T")
_log = logging.getLogger(__name__)

_GREETING: dict[Backend, bytes] = {"gloo": b"PDG1", "nccl": b"PDN1"}
_GREETING_BYTES = 4
_READ_AHEAD = 64 * 2**10
_MAX_KEYS = 64  # of the store; a group has a few
_LOOK_S = 0.1
_NCCL_JOIN_S = 90.0  # `torch_groups.JOIN_S`, which importing would import torch
_GROUPS_MODULE = "kv_transfer.transports.torch_groups"


class TorchDistTransport(TcpTransport):
    """Listens on a TCP port. ``timeout_s`` bounds one send or receive of a payload. ``backend`` defaults to
    NCCL for memory on a GPU, and ``on_device`` to whether the backend is NCCL."""

    name = "torch_dist"
    encrypts = False
    max_pending_peers = 16  # fewer than elsewhere: each has a thread that builds its groups

    def __init__(
        self,
        memory: Memory,
        secret: ServiceSecret,
        *,
        backend: Backend | None = None,
        tls: PlaneTls | None = None,
        timeout_s: float = 10.0,
        on_device: bool | None = None,
    ) -> None:
        super().__init__(memory, secret, tls=tls, timeout_s=timeout_s)
        self._backend: Backend = backend or ("nccl" if memory.on_device else "gloo")
        self._on_device = self._backend == "nccl" if on_device is None else on_device
        self._greet_s = _NCCL_JOIN_S if self._backend == "nccl" else 0.0

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections. The groups of each link use ports that the system picks."""
        await _import_groups()
        return await super().listen(host, port)

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a connection and join the groups. ConfigError if the peer uses another backend."""
        await _import_groups()
        return await super().connect(endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        tune(connection)
        limit = _READ_AHEAD if connecting else MAX_HELLO_BYTES
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        link: TorchDistLink | None = None
        try:
            writer.write(_GREETING[self._backend])
            if await reader.readexactly(_GREETING_BYTES) != _GREETING[self._backend]:
                if connecting:
                    raise ConfigError(f"transfer.transport: torch_dist uses {self._backend} here but not at {peer}")
                raise EOFError("the peer speaks another protocol")
            link = await self._join(reader, writer, rank=int(connecting))
            return link
        finally:
            if link is None:
                writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int) -> TorchDistLink:
        """Build the groups in a thread while the keys of their store travel over the connection. An empty key marks the
        end of the keys."""
        loop = asyncio.get_running_loop()
        connection: socket.socket = writer.get_extra_info("socket")
        hosts = connection.getsockname()[0], connection.getpeername()[0]
        module = await _import_groups()

        def publish(key: bytes, value: bytes) -> None:
            loop.call_soon_threadsafe(writer.write, FRAME.pack(len(key), len(value)) + key + value)

        def build() -> Groups:
            groups: Groups = module.create_groups(
                self._backend, store, rank, hosts, self._timeout_s, on_device=self._on_device, memory=self._memory
            )
            publish(b"", b"")
            made.append(groups)
            if abandoned.is_set():
                raise RuntimeError("the peer left")
            groups.connect()
            return groups

        made: list[Groups] = []
        abandoned = threading.Event()

        store: ExchangeStore = module.ExchangeStore(publish, max(self._timeout_s, self._greet_s))
        joined = False
        joining = asyncio.gather(in_thread("kv-torch-join", build), _take_keys(reader, store))
        joining.add_done_callback(lambda done: done.cancelled() or done.exception())
        leaving = asyncio.create_task(_left(reader))
        try:
            waiting: list[asyncio.Future[Any]] = [joining, leaving]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                raise EOFError("the peer left while the two joined")
            groups, _ = joining.result()
            joined = True
        finally:
            leaving.cancel()
            joining.cancel()
            store.close()
            if not joined:  # nothing else ends the thread that connects
                abandoned.set()
                for each in made:
                    each.abort()
        return TorchDistLink(self._memory, reader, writer, groups, self._timeout_s, on_device=self._on_device)


async def _import_groups() -> Any:
    """The module `torch_groups`. Importing torch takes seconds, which must not count towards a peer's timeout."""
    if _GROUPS_MODULE not in sys.modules:
        await in_thread("kv-torch-import", lambda: importlib.import_module(_GROUPS_MODULE))
    return importlib.import_module(_GROUPS_MODULE)


async def _left(reader: asyncio.StreamReader) -> None:
    """Return when the peer has closed or reset the connection, without reading from it."""
    while not (reader.at_eof() or reader.exception()):  # noqa: ASYNC110 - a stream has no event for it
        await asyncio.sleep(_LOOK_S)


async def _take_keys(reader: asyncio.StreamReader, store: ExchangeStore) -> None:
    left = MAX_HEADER_BYTES
    for _ in range(_MAX_KEYS):
        key_size, size = FRAME.unpack(await reader.readexactly(FRAME.size))
        if not key_size:
            return
        left -= key_size + size
        if left < 0:
            raise OSError(f"the peer sent a key of {key_size} + {size} bytes; all keys have {MAX_HEADER_BYTES} at most")
        key = await reader.readexactly(key_size)
        store.receive(key.decode(errors="replace"), await reader.readexactly(size))
    raise OSError(f"the peer sent more than {_MAX_KEYS} keys")


_Outcome: TypeAlias = "asyncio.Future[Content | str]"
"""The payload of an operation, or why it failed. A raised error would keep the frames of its thread, and with them the
group and its sockets."""


class _Lane:
    """The threads of one direction: one that begins operations, and one that waits for their ends."""

    def __init__(self, name: str) -> None:
        self._begins = ThreadPoolExecutor(1, f"kv-torch-{name}")
        self._ends = ThreadPoolExecutor(1, f"kv-torch-{name}-end")

    async def begun(self) -> None:
        """Wait until all operations so far have begun."""
        await asyncio.get_running_loop().run_in_executor(self._begins, lambda: None)

    def operate(self, begin: Callable[[], Operation]) -> _Outcome:
        """Begin an operation, after those before it. The result is its payload."""
        begun = self._begins.submit(_outcome_of, begin)
        return asyncio.get_running_loop().run_in_executor(self._ends, _end_of, begun)

    def close(self) -> None:
        """Let the threads end with what they do."""
        self._begins.shutdown(wait=False)
        self._ends.shutdown(wait=False)


def _outcome_of(function: Callable[[], T]) -> T | str:
    try:
        return function()
    except (RuntimeError, ValueError) as error:  # of a group, or of memory that is closed
        return str(error)


def _gather_and_send(groups: Groups, payload: Payload, memory: Memory) -> Operation:
    return groups.send(groups.gather(payload, memory))


def _end_of(begun: Future[Operation | str]) -> Content | str:
    operation = begun.result()
    return operation if isinstance(operation, str) else _outcome_of(operation)


class TorchDistLink(InboxLink):
    """See `KVLink`. `send` returns when the payload is announced; if sending it fails, the link ends."""

    def __init__(
        self,
        memory: Memory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        groups: Groups,
        timeout_s: float,
        *,
        on_device: bool,
    ) -> None:
        super().__init__("torch_dist", memory)
        self.on_device = on_device
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._groups: Groups | None = groups
        self._peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        self._why = ""
        self._out, self._in = _Lane("send"), _Lane("recv")
        self._changed = asyncio.Event()
        self._num_out = self._num_in = 0  # payloads on their way
        self._sent: asyncio.Queue[_Outcome] = asyncio.Queue()
        self._unsent: set[_Outcome] = set()
        self._announced: asyncio.Queue[tuple[bytes, int] | None] = asyncio.Queue(_QUEUED_FRAMES)
        self._arriving: asyncio.Queue[tuple[bytes, _Outcome | None] | None] = asyncio.Queue(IN_FLIGHT)
        work = (self._read_frames(), self._begin_receives(), self._end_receives(), self._end_sends())
        self._tasks = [asyncio.create_task(each) for each in work]

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Announce the payload, and have it gathered and sent. Waits while `IN_FLIGHT` payloads are on their way."""
        size = check_sizes(header, payload)
        while size and self._num_out >= IN_FLIGHT and self.ended is None:
            self._changed.clear()
            await self._changed.wait()
        if self.ended is not None:
            raise again(self.ended)
        if self._groups is None:
            raise PeerLost(f"{self._peer}: the link is down (torch_dist)")
        self._writer.write(FRAME.pack(len(header), size) + header)
        if size:
            self._num_out += 1
            sent = self._out.operate(partial(_gather_and_send, self._groups, payload, self.memory))
            self._unsent.add(sent)
            sent.add_done_callback(self._unsent.discard)
            self._sent.put_nowait(sent)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} took nothing for {self._timeout_s} s (torch_dist)") from None
        except OSError as error:
            raise self._fail(error) from None

    async def drained(self) -> None:
        """Wait until the payloads are gathered."""
        if self._unsent and self.ended is None:
            await self._out.begun()

    async def _move(self, fetch: Fetch) -> None:
        """Copy the payload. On a device, wait for the copy, because the payload's memory is reused."""
        with fetch.writing():
            payload = self._payload
            await super()._move(fetch)
            await settled(self.memory)
            del payload

    def cut(self, why: str) -> None:
        """Close the connection and the groups."""
        self._fail(why)

    async def aclose(self) -> None:
        """Wait for payloads on their way, but not for long. Then close the connection and the groups, and let the
        threads end."""
        try:
            if self._unsent and self.ended is None:
                await asyncio.wait(self._unsent, timeout=_CLOSE_S)
        finally:
            self._end(PeerLost(f"the link to {self._peer} was closed here (torch_dist)"), discard=True)
            self._changed.set()
            self._writer.close()
            self._drop_groups()
            self._out.close()
            self._in.close()
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:
                self._tasks.clear()  # their errors keep this link
                self.introduced()
                self.on_closed(self)

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _read_frames(self) -> None:
        try:
            for number in itertools.count():
                header_size, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                what = f"message {number}, of {header_size} + {size} bytes"
                if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
                    self._why = f"the peer announced {what}"
                    break
                if self._pending_peer is not None and (number or header_size > MAX_HELLO_BYTES or size):
                    self._why = f"the peer announced {what}, before its introduction"
                    break
                await self._announced.put((await self._reader.readexactly(header_size), size))
        except (OSError, asyncio.IncompleteReadError):
            self._why = "the peer closed the link"
        # Receives in progress may complete with the peer's last messages; if not, Gloo ends them by itself.
        if self._groups is not None and not (self._num_in and self._groups.fails_alone):
            self._drop_groups()
        await self._announced.put(None)

    async def _begin_receives(self) -> None:
        while (frame := await self._announced.get()) is not None:
            header, size = frame
            received: _Outcome | None = None
            if size:
                while self._num_in >= IN_FLIGHT:
                    self._changed.clear()
                    await self._changed.wait()
                if self._groups is None:  # the peer is gone, and has not sent this payload
                    break
                self._num_in += 1
                received = self._in.operate(partial(self._groups.recv, size))
            await self._arriving.put((header, received))
        await self._arriving.put(None)

    async def _end_receives(self) -> None:
        while (arriving := await self._arriving.get()) is not None:
            header, received = arriving
            payload: Content | None = b""
            if received is not None:
                payload = await self._outcome(received, "it did not arrive")
            if payload is None:
                return
            try:
                await self._put((header, payload))
            except TransferError:
                return  # closed here
            if received is not None:
                self._num_in -= 1
                self._changed.set()
        self._fail(self._why)

    async def _end_sends(self) -> None:
        while await self._outcome(await self._sent.get(), "it was not received") is not None:
            self._num_out -= 1
            self._changed.set()

    async def _outcome(self, operation: _Outcome, late: str) -> Content | None:
        """Wait for an operation, after those before it have ended. Returns its payload, or None if it has failed, and
        with it the link."""
        done, _ = await asyncio.wait([operation], timeout=self._timeout_s)
        if not done:
            self._fail(f"a payload timed out: {late} within {self._timeout_s} s")
            return None
        outcome = operation.result()
        if isinstance(outcome, str):
            self._fail(self._why or outcome)
            return None
        return outcome

    # --- the end -----------------------------------------------------------------------------------------------------

    def _fail(self, why: BaseException | str) -> TransferError:
        """End the link and its groups. The peer ends its own when the connection closes."""
        timed_out = "timed out" in str(why).lower()
        error = (TransferTimeout if timed_out else PeerLost)(f"{self._peer}: {why} (torch_dist)")
        self._end(error)
        self._changed.set()
        self._drop_groups()
        self._writer.close()
        return again(error)

    def _drop_groups(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.abort()
            for sent in self._unsent:
                self._log_if_stuck(sent)

    def _log_if_stuck(self, sent: _Outcome) -> None:
        """Log an error if a send does not end. NCCL ends it by the abort. Gloo ends it when the peer closes its group,
        or by the group's timeout."""
        why = "a send to %s does not end; its thread stays (torch_dist)"
        timer = asyncio.get_running_loop().call_later(self._timeout_s + _GRACE_S, _log.error, why, self._peer)
        sent.add_done_callback(lambda _: timer.cancel())
