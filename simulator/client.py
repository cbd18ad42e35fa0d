"""Clients of the world: the real client's streams, over connections of the world to the gateways' API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import msgspec

from pdserve.client.core import GatewayCore
from pdserve.client.request import Ask
from pdserve.core.errors import NotReady, PdserveError, from_wire, to_wire
from pdserve.pb import inference_pb2 as pb
from router.attempt import ABORT_TIMEOUT_S
from simulator.engine import Violation
from simulator.loop import Mailbox
from simulator.model import prompt_logprobs
from simulator.network import API, KEEPALIVE_S, Network, Process, StreamWire
from simulator.service import ERROR, Asked, Call

DEADLINE_GRACE_S = KEEPALIVE_S + ABORT_TIMEOUT_S + 1.0
"""How long after its deadline a client knows how its request ended. The gateway waits for a worker that does not answer
its abort; then the connection may take until its keepalive fails."""
WINDOW = 2
"""So many messages are sent to a slow reader before it has read the first of them."""
UNANSWERED = "unanswered"
"""The kind of error of a call that neither the gateway nor the network has ended."""


class WorldGatewayApi(GatewayCore):
    """The way of the client ``process`` to a gateway's API, for the request ``asked``. It waits ``read_s`` before it
    reads each message. ``on_begin`` is told how many tokens a call has sent once the gateway answers it with more than
    an error."""

    def __init__(
        self,
        network: Network,
        process: Process,
        name: str,
        asked: Asked,
        read_s: float,
        on_begin: Callable[[int], None],
    ) -> None:
        super().__init__(name)
        self.network, self.process, self.asked, self.read_s, self.on_begin = network, process, asked, read_s, on_begin
        self.failed = False
        """Whether it was not ready, or was lost, since the last token came from any gateway."""

    async def connect(self, timeout_s: float) -> None:
        """See `GatewayCore`."""
        try:
            await self.network.reach(self.process, self.address, timeout_s)
        except PdserveError as error:
            self.failed = True
            raise NotReady(str(error)) from None

    def start(self, ask: Ask, token_ids: Sequence[int]) -> WorldCall:
        """See `GatewayCore`."""
        message, timeout_s = ask.message(token_ids), ask.timeout_s()
        assert timeout_s is not None, "requests of a plan have deadlines"
        if self.asked.prompt_logprobs:  # no option of the client, but of the API
            message.sampling.prompt_logprobs = 0
        window = WINDOW if self.read_s else 0
        call = Call(self.asked.tenant, timeout_s, window, message.SerializeToString())
        return WorldCall(self, call, len(message.token_ids.ids) + len(token_ids))

    def failure(self, error: Exception, has_begun: bool) -> PdserveError:
        """See `GatewayCore`."""
        found = error if isinstance(error, PdserveError) else from_wire(*to_wire(error))
        self.failed |= isinstance(found, NotReady)
        return found

    def check_prompt(self, completion: pb.Completion) -> None:
        """Raise `Violation` unless the log-probabilities of the prompt are those that the model has."""
        expected = [each.logprob for each in prompt_logprobs(self.asked.model_salt, self.asked.prompt)]
        found = [token.logprob for token in completion.prompt_logprobs[1:]]
        if found != expected:
            raise Violation(f"{self.asked.request_id}: log-probabilities of its prompt are {found}, not {expected}")

    @property
    def address(self) -> str:
        """Where the API is."""
        return f"{self.target}{API}"


class WorldCall:
    """A call of `Generate`: an iterator of its messages, as gRPC's is."""

    def __init__(self, api: WorldGatewayApi, call: Call, tokens: int) -> None:
        self._api, self._call, self._tokens = api, call, tokens
        self._reader: asyncio.Task[object] | None = None
        self._cancelled = False
        self._read: Mailbox[bytes] = Mailbox()

    def cancel(self) -> None:
        """End it: the one who reads it is cancelled."""
        self._cancelled = True
        if self._reader is not None:
            self._reader.cancel()

    async def __aiter__(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        api, call = self._api, self._call
        self._reader = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        wire = StreamWire(api.network, api.process, api.address)
        error: PdserveError | None = None
        began = completed = False
        try:
            async with asyncio.timeout(call.timeout_s + DEADLINE_GRACE_S):
                answers = await wire.open(self._requests(), timeout_s=call.timeout_s)
                async with aclosing(answers):  # type: ignore[type-var]
                    async for data in answers:
                        if data.startswith(ERROR):
                            error = from_wire(*msgspec.msgpack.decode(data[1:]))
                            break
                        if not began:
                            began = True
                            api.on_begin(self._tokens)
                        if api.read_s:
                            await asyncio.sleep(api.read_s)
                            self._read.put(b"")
                        response = pb.GenerateResponse.FromString(data)
                        completed = response.HasField("completion")
                        if completed and api.asked.prompt_logprobs:
                            api.check_prompt(response.completion)
                        yield response
        except TimeoutError:
            error = PdserveError()
            error.kind = UNANSWERED
        except PdserveError as lost:
            error = NotReady(str(lost))
        finally:
            await wire.aclose()
        if error is None and not completed:
            error = NotReady("the connection ended during the call")
        if error is not None:
            raise error

    async def _requests(self) -> AsyncIterator[bytes]:
        """The request, then an empty message for each one that a slow reader has read."""
        yield msgspec.msgpack.encode(self._call)
        while True:
            yield await self._read.get()
