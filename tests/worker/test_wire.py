"""Nothing is lost between `core`'s values and the control protocol's messages."""

from __future__ import annotations

import pytest

from pdserve.core.errors import LayoutMismatch, WorkerLost
from pdserve.core.handoff import KVDestination, KVEndpoint, PeerLink, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import Role, TokenOutput, Work, WorkerInfo, WorkerLoad
from pdserve.pb import worker_pb2 as pb
from worker import wire

LAYOUT = KVLayout("abc", "bfloat16", 64, 30, 3, 64)
ENDPOINTS = (KVEndpoint("shm", "host/name"), KVEndpoint("tcp", "10.0.0.1:5"))
DESTINATION = KVDestination("decode-0", ENDPOINTS, "e1", "n1", 7, 2)
PROOF = TransferProof("torch_dist", 10, 3, 5, 2, 4, "xxh3-64 verified", 0.5, 1.5, 1.25, 1.75, 2.5, 9.5)
INFO = WorkerInfo(
    "prefill-0", Role.PREFILL, "e1", "10.0.0.1:4", ENDPOINTS, "10.0.0.1", "cpu", 1, 2,
    LAYOUT, 100, 2048, 512, 4096, "0", "0,1", "0.1.0", 3, True, "clock",
)  # fmt: skip


def test_destination() -> None:
    assert wire.destination_from_proto(wire.destination_to_proto(DESTINATION)) == DESTINATION
    assert KVDestination.from_wire(DESTINATION.to_wire()) == DESTINATION


def test_work_leaves_only_the_stop_strings_behind() -> None:
    sampling = SamplingParams(9, 0.5, 40, 0.9, 2**62, ("stop",), (1, 2), True)
    back = wire.work_from_proto(wire.work_to_proto(Work("r", [1, 2, 3], sampling, 12.5, salt="tenant")))
    assert back == Work("r", [1, 2, 3], SamplingParams(9, 0.5, 40, 0.9, 2**62, (), (1, 2), True), 12.5, salt="tenant")


@pytest.mark.parametrize("logprobs", [None, 0, 20])
def test_work_with_everything_that_sampling_has(logprobs: int | None) -> None:
    sampling = SamplingParams(
        9, 0.5, seed=1, min_p=0.1, repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=1.7,
        logit_bias={0: -100.0, 4_000_000: 0.25}, logprobs=logprobs,
    )  # fmt: skip
    work = Work("r", [1, 2, 3], sampling, 12.5, num_prior_outputs=2)
    message = pb.Submit.FromString(wire.work_to_proto(work).SerializeToString())
    assert wire.work_from_proto(message) == work


@pytest.mark.parametrize(
    "output",
    [
        TokenOutput(0),
        TokenOutput(5, FinishReason.LENGTH),
        TokenOutput(5, logprobs=TokenLogprobs(-1.5)),
        TokenOutput(5, logprobs=TokenLogprobs(-0.1, ((5, -0.1), (0, -3.25)))),
        TokenOutput(5, cached_tokens=128),
        TokenOutput(None, FinishReason.STOP, (Event(EventKind.KV_VERIFIED, "w", 1.25),), PROOF),
    ],
)
def test_output(output: TokenOutput) -> None:
    message = pb.Output.FromString(wire.output_to_proto("r", output).SerializeToString())
    assert message.request_id == "r"
    assert wire.output_from_proto("w", message) == output


def test_errors_keep_their_class() -> None:
    for error in (LayoutMismatch("dtype differs"), WorkerLost("gone")):
        back = wire.error_from_proto(wire.error_to_proto(error))
        assert (type(back), str(back)) == (type(error), str(error))


def test_info_and_load() -> None:
    assert wire.info_from_proto(wire.info_to_proto(INFO)) == INFO
    load = WorkerLoad(1, 2, 3, 4, (PeerLink("decode-0", "shm", "because", 9.5),), 2**40, 2**39, 5, {"checksum": 2})
    assert wire.load_from_proto(wire.load_to_proto(load)) == load


def test_unknown_role_is_a_value_error() -> None:
    message = wire.info_to_proto(INFO)
    message.role = "cook"
    with pytest.raises(ValueError, match="cook"):
        wire.info_from_proto(message)
