from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import msgspec
import pytest

from gateway.tokenizer import NUM_THREADS, Tokenizer
from pdserve.core.errors import TransferError
from pdserve.core.prefix_digests import keyed_salt
from pdserve.core.sampling import TokenLogprobs
from pdserve.core.timeline import EXTERNAL_EVENTS, EventKind
from pdserve.core.worker import TokenOutput
from pdserve.pb import inference_pb2 as pb
from tests.fake_worker import FakeWorker, Point
from tests.gateway.conftest import PROMPT, Service, StartService
from tests.loopback import SECRET


def speaks(service: Service, token_ids: Sequence[int], prompt_tokens: int) -> None:
    """Let all workers answer with these tokens."""
    for worker in service.fleet.values():
        worker._next_token = lambda tokens: token_ids[len(tokens) - prompt_tokens]


async def refused(service: Service, code: grpc.StatusCode, **fields: Any) -> tuple[str, str]:
    """The message and the error's class of a call that fails with ``code``."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.generate(**fields)
    assert caught.value.code() is code, caught.value.details()
    metadata: Any = caught.value.trailing_metadata()
    return caught.value.details() or "", dict(metadata)["pdserve-error"]


async def test_the_salt_reaches_the_workers_and_their_finds_the_client(service: Service) -> None:
    service.fleet["p0"].cached_tokens = 4
    _, completion = await service.generate(max_tokens=2, salt="tenant")
    assert completion.prefill_cached_tokens == 4
    salt = keyed_salt("tenant", SECRET.cache_key)
    assert [request.salt for worker in service.fleet.values() for _, request in worker.requests] == [salt] * 2


async def test_tokens_then_one_complete_account(service: Service) -> None:
    tokens, completion = await service.generate(request_id="mine", max_tokens=4, mode=pb.MODE_PD)
    assert [(token.token_id, token.index) for token in tokens] == [(6, 0), (7, 1), (8, 2), (9, 3)]
    (placement,) = completion.placements
    assert placement.startswith("prefill on p0: the only one free; decode on d0: the only one free")
    assert completion.text == "".join(token.text for token in tokens)
    assert list(completion.token_ids) == [6, 7, 8, 9]
    assert (completion.request_id, completion.finish_reason, completion.mode) == ("mine", "length", pb.MODE_PD)
    assert (completion.prefill_worker, completion.decode_worker, completion.attempts) == ("p0", "d0", 1)
    assert (completion.prompt_tokens, completion.output_tokens) == (5, 4)
    transfer = completion.transfer
    assert transfer.kv_bytes == transfer.kv_bytes_expected == 1024
    assert (transfer.transport, transfer.block_size, transfer.blocks_sent, transfer.messages) == ("loopback", 4, 2, 1)
    assert transfer.request_to_ready_ms > 0
    # Only of tokens that were held back, of prompts of which KV was fetched, and beside requests with a draft model.
    others = {EventKind.DECODE_READY, EventKind.PREFIX_AWAITED, EventKind.PREFIX_READY, EventKind.DRAFTED}
    expected = set(EventKind) - EXTERNAL_EVENTS - others
    assert {event.kind for event in completion.events} == {str(kind) for kind in expected}
    assert {clock.worker for clock in completion.clocks} == {"p0", "d0"}
    assert 0 <= transfer.room_wait_ms <= transfer.exposed_ms
    stages = {"gateway", "route", "dispatch", "prefill_queue", "prefill", "unattributed"}
    assert set(completion.gateway_ttft_ms) == stages
    assert set(completion.gateway_ttft_decode_ms) == stages | {"kv_exposed", "decode_queue", "first_decode"}
    service.check_idle()


async def test_text_goes_in_and_comes_out(service: Service, tokenizer: Tokenizer) -> None:
    prompt, answer = tokenizer.encode("the quick"), tokenizer.encode("größer 日本語 😀")
    speaks(service, answer, len(prompt))
    tokens, completion = await service.generate(text="the quick", max_tokens=len(answer))
    assert completion.text == "größer 日本語 😀" == "".join(token.text for token in tokens)
    assert not any("�" in token.text for token in tokens)
    assert completion.prompt_tokens == len(prompt)


@pytest.mark.parametrize("mode", [pb.MODE_PD, pb.MODE_COLOCATED])
async def test_a_stop_string_ends_text_and_work(
    service: Service, tokenizer: Tokenizer, mode: pb.Mode.ValueType
) -> None:
    answer = tokenizer.encode("the lazy dog jumps over the brown fox and on and on")
    speaks(service, answer, 5)
    sampling = pb.Sampling(max_tokens=len(answer), stop=["nothing", "g jum"])
    tokens, completion = await service.generate(sampling=sampling, mode=mode)
    assert completion.text == "the lazy do" == "".join(token.text for token in tokens)
    assert completion.finish_reason == "stop"
    assert completion.output_tokens == len(tokens) < len(answer)
    kept = list(completion.token_ids)
    assert kept == [token.token_id for token in tokens][: len(kept)]
    assert tokenizer.decode(kept).startswith("the lazy do")
    assert len(tokenizer.decode(kept[:-1])) < len("the lazy do")
    service.check_idle()
    assert service.gateway.router.running == 0


async def test_a_stop_string_within_token_1_calls_the_hand_off_off(service: Service, tokenizer: Tokenizer) -> None:
    service.fleet["d0"].hangs = {"decode"}
    answer = tokenizer.encode("the lazy dog")
    speaks(service, answer, 5)
    sampling = pb.Sampling(max_tokens=len(answer), stop=[tokenizer.decode(answer[:1])])
    _, completion = await service.generate(sampling=sampling)
    assert (completion.finish_reason, completion.output_tokens) == ("stop", 1)
    assert completion.transfer.kv_bytes == completion.transfer.kv_bytes_expected == 0


async def test_cancelling_aborts_on_the_workers(service: Service) -> None:
    service.fleet["d0"].hangs = {"decode_more"}
    call = service.stub.Generate(pb.GenerateRequest(request_id="gone", token_ids=PROMPT))
    await call.read()
    call.cancel()
    await service.until(lambda: service.fleet["d0"].aborted)
    (dropped,) = service.fleet["d0"].aborted
    assert dropped.startswith("gone#")
    await service.until(lambda: service.is_idle)
    service.check_idle()
    assert service.gateway.router.running == 0
    service.fleet["d0"].hangs.clear()
    tokens, _ = await service.generate(request_id="gone", max_tokens=2)
    assert len(tokens) == 2, "its name is free again"


async def test_a_bug_is_internal_and_the_service_lives_on(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    setattr(service.fleet["p0"], "push", lambda *_: 1 // 0)  # noqa: B010 - a method
    details, kind = await refused(service, grpc.StatusCode.INTERNAL)
    assert (details, kind) == ("ZeroDivisionError: integer division or modulo by zero", "PdserveError")
    assert "unexpected error in a request" in caplog.text
    delattr(service.fleet["p0"], "push")
    await service.generate()


async def test_the_clients_deadline_ends_the_request(service: Service) -> None:
    service.fleet["p0"].hangs = {"prefill"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT), timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await service.until(lambda: service.fleet["p0"].aborted and service.fleet["d0"].aborted)
    await service.until(lambda: service.is_idle)
    service.check_idle()


async def test_a_request_id_in_use_is_refused(service: Service) -> None:
    service.fleet["p0"].hangs = {"prefill"}
    call = service.stub.Generate(pb.GenerateRequest(request_id="a", token_ids=PROMPT))
    await service.until(lambda: service.fleet["p0"].requests)
    other = pb.TokenIds(ids=[5])
    details, _ = await refused(service, grpc.StatusCode.INVALID_ARGUMENT, request_id="a", token_ids=other)
    assert "in use" in details
    more = pb.Sampling(max_tokens=3)
    await refused(service, grpc.StatusCode.INVALID_ARGUMENT, request_id="a", sampling=more)
    call.cancel()


@pytest.mark.parametrize("point", ["room", "decode", "decode_more"])
async def test_a_call_that_repeats_a_running_one_takes_it_over(service: Service, point: Point) -> None:
    """A client whose connection broke does not wait until the gateway has noticed."""
    service.fleet["d0"].hangs = {point}
    fields: dict[str, Any] = {
        "request_id": "a",
        "token_ids": PROMPT,
        "sampling": pb.Sampling(max_tokens=4, temperature=1.0),
    }
    first = service.stub.Generate(pb.GenerateRequest(**fields), timeout=60)
    await service.until(lambda: service.fleet["d0"].stuck)
    service.fleet["d0"].hangs = set()
    tokens, completion = await service.generate(**fields)
    assert [token.token_id for token in tokens] == [6, 7, 8, 9]
    assert completion.request_id == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in first:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a later call has 'a' and asks for the same; it gets the answer" in (caught.value.details() or "")
    seeds = {request.sampling.seed for worker in service.fleet.values() for _, request in worker.requests}
    assert len(seeds) == 1, "the same draws"
    await service.until(lambda: service.is_idle)
    # Many at once: the last one gets the answer.
    service.fleet["d0"].delay_s = {"decode": 0.05}
    answers = await asyncio.gather(*(service.generate(**fields) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(answer, tuple) for answer in answers) == 1
    codes = [answer.code() for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 7, "also those that were just writing their first token"
    await service.until(lambda: service.is_idle)


async def test_models_without_a_tokenizer_take_token_ids_only(start_service: StartService) -> None:
    service = await start_service("p0", "d0", folder=None)
    details, _ = await refused(service, grpc.StatusCode.INVALID_ARGUMENT, text="hello")
    assert details.startswith("prompt: this model has no tokenizer; send token ids (")
    tokens, completion = await service.generate(max_tokens=3)
    assert [token.text for token in tokens] == ["", "", ""]
    assert (completion.text, list(completion.token_ids)) == ("", [6, 7, 8])


def tells_logprobs(worker: FakeWorker) -> None:
    """Have a worker report a high log-probability for each token, and a lower one for token 0."""

    def tell(output: TokenOutput) -> TokenOutput:
        token_id = output.token_id
        top = None if token_id is None else TokenLogprobs(-0.25, ((token_id, -0.25), (0, -2.0)))
        return msgspec.structs.replace(output, logprobs=top)

    worker.change_output = tell


@pytest.mark.parametrize("mode", [pb.MODE_PD, pb.MODE_COLOCATED])
async def test_logprobs_come_with_their_tokens(service: Service, tokenizer: Tokenizer, mode: pb.Mode.ValueType) -> None:
    """Log-probabilities stay aligned with the tokens, although a stop string holds back text and trims the last
    tokens."""
    answer = tokenizer.encode("the lazy dog jumps over the brown fox and on and on")
    speaks(service, answer, 5)
    for worker in service.fleet.values():
        tells_logprobs(worker)
    sampling = pb.Sampling(max_tokens=len(answer), stop=["g jum"], logprobs=2)
    tokens, completion = await service.generate(sampling=sampling, mode=mode)
    requests = [request for worker in service.fleet.values() for _, request in worker.requests]
    assert [request.sampling.logprobs for request in requests] == [2] * (2 if mode == pb.MODE_PD else 1)
    assert [token.token_id for token in tokens] == list(answer[: len(tokens)])
    assert list(completion.token_ids) == list(answer[: len(completion.token_ids)])
    for token in tokens:
        assert token.logprob == -0.25
        own, other = token.top_logprobs
        assert (own.token_id, own.logprob) == (token.token_id, -0.25)
        assert own.text == tokenizer.decode([token.token_id])
        assert (other.token_id, other.text, other.logprob) == (0, "<s>", -2.0)


async def test_a_prompt_that_waits_to_be_tokenized_has_a_deadline_and_a_place(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tokenizer.IN_THREAD_CHARACTERS", 8)
    gateway = {"host": "127.0.0.1", "port": 0, "default_timeout_s": 0.5}
    service = await start_service("p0", "d0", gateway=gateway, router={"max_queue": 1})
    tokenizer = service.gateway._inference.tokenizer
    assert tokenizer is not None
    free = threading.Event()
    try:
        for _ in range(NUM_THREADS):
            tokenizer._threads._threads.submit(free.wait, 60.0)
        waiting = service.stub.Generate(pb.GenerateRequest(text="a text of many characters"))
        first = asyncio.create_task(waiting.read())
        await service.until(lambda: service.gateway._inference._being_read.total() == 1)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 request is waiting" in (await refused(service, code, text="another text of many characters"))[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "its prompt was tokenized" in str(caught.value.details())
    finally:
        free.set()
    await service.generate(text="a text of many characters", max_tokens=1)
    service.check_idle()


async def test_a_storm_of_cancels_leaves_no_error_unretrieved(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that are cancelled while the reason of their failure is being sent."""
    service = await start_service("p0", "d0", router={"max_attempts": 1, "heartbeat_timeout_s": 60.0})

    async def call(number: int) -> None:
        stream = service.stub.Generate(
            pb.GenerateRequest(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=9), mode=pb.MODE_PD)
        )
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await stream.read()
            await asyncio.sleep(0.0005 * (number % 20))
        stream.cancel()

    for _ in range(2):
        service.fleet["d0"].fail("decode_step", *[TransferError("broken")] * 100)
        await asyncio.gather(*(call(number) for number in range(100)))
        await service.until(lambda: service.is_idle)
        gc.collect()
        await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
