"""Between the control protocol's protobuf messages and `core`'s plain values: the only file that knows both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from pdserve.core.errors import PdserveError, from_wire, to_wire
from pdserve.core.handoff import KVDestination, KVEndpoint, PeerLink, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import Role, TokenOutput, Work, WorkerInfo, WorkerLoad
from pdserve.pb import worker_pb2 as pb


def endpoints_to_proto(endpoints: Iterable[KVEndpoint]) -> list[pb.Endpoint]:
    """`KVEndpoint`s as messages."""
    return [pb.Endpoint(transport=each.transport, address=each.address) for each in endpoints]


def endpoints_from_proto(messages: Iterable[pb.Endpoint]) -> tuple[KVEndpoint, ...]:
    """`KVEndpoint`s from messages."""
    return tuple(KVEndpoint(each.transport, each.address) for each in messages)


def destination_to_proto(destination: KVDestination) -> pb.Destination:
    """`KVDestination` as a message."""
    return pb.Destination(
        worker_id=destination.worker_id,
        endpoints=endpoints_to_proto(destination.endpoints),
        epoch=destination.epoch,
        nonce=destination.nonce,
        num_blocks=destination.num_blocks,
        num_skipped=destination.num_skipped,
    )


def destination_from_proto(message: pb.Destination) -> KVDestination:
    """`KVDestination` from a message."""
    return KVDestination(
        worker_id=message.worker_id,
        endpoints=endpoints_from_proto(message.endpoints),
        epoch=message.epoch,
        nonce=message.nonce,
        num_blocks=message.num_blocks,
        num_skipped=message.num_skipped,
    )


def work_to_proto(work: Work) -> pb.Submit:
    """`Work` as a message. Stop strings stay behind: they are the gateway's business."""
    sampling = work.sampling
    return pb.Submit(
        request_id=work.request_id,
        token_ids=work.token_ids,
        sampling=pb.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed or 0,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
            logprobs=sampling.logprobs,
        ),
        timeout_s=work.timeout_s,
        num_prior_outputs=work.num_prior_outputs,
        salt=work.salt,
    )


def work_from_proto(message: pb.Submit) -> Work:
    """`Work` from a message."""
    sampling = message.sampling
    return Work(
        request_id=message.request_id,
        token_ids=list(message.token_ids),
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        ),
        timeout_s=message.timeout_s,
        num_prior_outputs=message.num_prior_outputs,
        salt=message.salt,
    )


def error_to_proto(error: BaseException) -> pb.Error:
    """An error as ``(kind, message)``."""
    kind, message = to_wire(error)
    return pb.Error(kind=kind, message=message)


def error_from_proto(message: pb.Error) -> PdserveError:
    """The error that `error_to_proto` described."""
    return from_wire(message.kind, message.message)


def output_to_proto(request_id: str, output: TokenOutput) -> pb.Output:
    """`TokenOutput` as a message; the events' worker is implied by the stream."""
    message = pb.Output(
        request_id=request_id, finish_reason=output.finish_reason or "", cached_tokens=output.cached_tokens
    )
    if output.token_id is not None:
        message.token_id = output.token_id
    for event in output.events:
        message.events.append(pb.Event(kind=event.kind, time_s=event.time_s))
    if output.proof is not None:
        message.proof.CopyFrom(pb.Proof(**asdict(output.proof)))
    if (logprobs := output.logprobs) is not None:
        message.logprobs.logprob = logprobs.logprob
        message.logprobs.top_token_ids.extend(token_id for token_id, _ in logprobs.top)
        message.logprobs.top_logprobs.extend(logprob for _, logprob in logprobs.top)
    return message


def output_from_proto(worker_id: str, message: pb.Output) -> TokenOutput:
    """`TokenOutput` from a message of ``worker_id``'s stream."""
    return TokenOutput(
        token_id=message.token_id if message.HasField("token_id") else None,
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        events=tuple(Event(EventKind(e.kind), worker_id, e.time_s) for e in message.events),
        proof=TransferProof(**_values(TransferProof, message.proof)) if message.HasField("proof") else None,
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        cached_tokens=message.cached_tokens,
    )


def info_to_proto(info: WorkerInfo) -> pb.WorkerInfo:
    """`WorkerInfo` as a message."""
    plain = {f.name: getattr(info, f.name) for f in fields(info) if f.name not in ("kv_endpoints", "layout")}
    return pb.WorkerInfo(
        **plain, kv_endpoints=endpoints_to_proto(info.kv_endpoints), layout=pb.Layout(**info.layout.to_wire())
    )


def info_from_proto(message: pb.WorkerInfo) -> WorkerInfo:
    """`WorkerInfo` from a message; ValueError on an unknown role."""
    values = _values(WorkerInfo, message)
    values["role"] = Role(message.role)
    values["kv_endpoints"] = endpoints_from_proto(message.kv_endpoints)
    values["layout"] = KVLayout(**_values(KVLayout, message.layout))
    return WorkerInfo(**values)


def load_to_proto(load: WorkerLoad) -> pb.WorkerLoad:
    """`WorkerLoad` as a message."""
    return pb.WorkerLoad(**{**asdict(load), "links": [pb.PeerLink(**asdict(link)) for link in load.links]})


def load_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    """`WorkerLoad` from a message."""
    links = tuple(PeerLink(**_values(PeerLink, link)) for link in message.links)
    return WorkerLoad(**{**_values(WorkerLoad, message), "links": links, "kv_refused": dict(message.kv_refused)})


def _logprobs(message: pb.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))


def _values(kind: type[Any], message: Any) -> dict[str, Any]:
    """The fields of a dataclass, from the message whose fields have the same names."""
    return {f.name: getattr(message, f.name) for f in fields(kind)}
