"""SGLang with ``--disaggregation-mode``: both servers get the request at once, and find each other by the prefill
server's bootstrap port and a number that pdserve makes of the attempt's id. Prefill answers when decode has the KV.

The servers are started with ``--enable-metrics`` (docs/sglang.md). Written after SGLang's sources of 2026, and tested
with recorded servers alone."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from external_engines.adapter import Abilities, Description, HandOff, KVCounters, Step
from external_engines.answers import error_of
from pdserve.core.address import join_address, split_address
from pdserve.core.errors import InvalidRequest, PdserveError, TransferError, WorkerLost
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason
from pdserve.core.worker import Role, WorkerLoad

_PREFIX = "sglang:"
_QUEUES = (
    "num_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_prealloc_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)
_WANTED = tuple(
    f"{_PREFIX}{name}"
    for name in (*_QUEUES, "num_running_reqs", "token_usage", "prompt_tokens_total", "cached_tokens_total")
)
_ROOM_BITS = 63
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_INFO = "/server_info"
_STRUCTURES = {"json": "json_schema", "regex": "regex"}
"""Kinds of structures, and the parameters that set them."""


class SGLang:
    """See `external_engines.adapter.Adapter`."""

    kind = "sglang"
    path = "/generate"
    transport = "sglang"
    abilities = Abilities(
        "SGLang",
        hand_off="prefill sends it, and answers when decode has it",
        proof="none",
        logprobs=False,
        prompt_logprobs=False,
        structures=tuple(_STRUCTURES),
        speculation="--speculative-algorithm",
    )

    async def describe(self, http: httpx2.AsyncClient) -> Description | None:
        """See `external_engines.adapter.Adapter`."""
        answer = await http.get(_INFO)
        if answer.status_code == 404:
            return None
        info = answer.raise_for_status().json()
        if not isinstance(info, dict) or "disaggregation_mode" not in info:
            return None
        if (await http.get("/metrics")).status_code == 404:
            raise PdserveError("it shows no metrics; start it with --enable-metrics (docs/sglang.md)")
        try:
            role = None if info["disaggregation_mode"] == "null" else Role(info["disaggregation_mode"])
            page = int(info["page_size"])
            return Description(
                kind=self.kind,
                version=info["version"],
                model=info["served_model_name"],
                block_size=page,
                kv_dtype=info["kv_cache_dtype"],
                max_model_len=int(info["context_length"] or info["max_req_input_len"]),
                num_blocks=int(info["max_total_num_tokens"]) // page,
                life=_life(info),
                hands_off=role is not None,
                kv_address=join_address(http.base_url.host, int(info["disaggregation_bootstrap_port"])),
                role=role,
            )
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise PdserveError(f"it does not describe itself as SGLang does ({what})") from None

    async def load(self, http: httpx2.AsyncClient, num_blocks: int) -> tuple[WorkerLoad, KVCounters, str]:
        """See `external_engines.adapter.Adapter`. SGLang counts the origin of KV by intervals of its log alone, so
        nothing is said of it here."""
        info = (await http.get(_INFO)).raise_for_status().json()
        answer = await http.get("/metrics")
        lines = [line for line in answer.raise_for_status().text.splitlines() if line.startswith(_WANTED)]
        sums: defaultdict[str, float] = defaultdict(float)  # over the ranks of a server
        usages = [0.0]
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                sums[name] += sample.value
                if name == "token_usage":
                    usages.append(sample.value)
        load = WorkerLoad(
            free_blocks=round(num_blocks * (1.0 - max(usages))),
            running=int(sums["num_running_reqs"]),
            waiting=int(sum(sums[name] for name in _QUEUES)),
            prompt_tokens_looked_up=int(sums["prompt_tokens_total"]),
            prompt_tokens_cached=int(sums["cached_tokens_total"]),
        )
        return load, KVCounters(), _life(info)

    def alone(self, request: Request, model: str) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        return _body(request) | {"stream": True}

    def meeting(self, attempt_id: str, kv_address: str) -> HandOff | None:
        """See `external_engines.adapter.Adapter`. Attempt ids contain random bits, so no other attempt has the same
        room."""
        host, port = split_address(kv_address)
        digest = int.from_bytes(hashlib.sha256(attempt_id.encode()).digest()[:8], "big")
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": digest >> (64 - _ROOM_BITS)}

    def prefill(self, request: Request, model: str, meeting: HandOff | None) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        return _body(request) | {"stream": False, **(meeting or {})}

    def decode(self, request: Request, model: str, hand_off: HandOff) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        return _body(request) | {"stream": True, **hand_off}

    def hand_off(self, answer: Mapping[str, Any]) -> HandOff:
        """See `external_engines.adapter.Adapter`. Never called, because both requests are sent at once."""
        raise AssertionError("meeting says how the two requests find each other")

    def read(self, part: Mapping[str, Any]) -> Step:
        """See `external_engines.adapter.Adapter`."""
        if "error" in part:
            raise error_of(part["error"], "SGLang")
        about, ids = part["meta_info"], part["output_ids"]
        reason = about["finish_reason"]
        if reason is not None and reason["type"] not in _REASONS:
            raise _abort(reason)
        # By --incremental-streaming-output a part has its own tokens, else all so far, and perhaps some after them.
        start = max(0, about["completion_tokens"] - len(ids))
        tokens = [(int(token_id), None) for token_id in ids]
        finished = None if reason is None else _REASONS[reason["type"]]
        return Step(tokens, finished, about.get("cached_tokens"), start)


def _abort(reason: Mapping[str, Any]) -> PdserveError:
    message, status = str(reason.get("message", ""))[:500], reason.get("status_code")
    if isinstance(status, int) and 400 <= status < 500:
        return InvalidRequest(f"request: SGLang refuses it: {message}")
    if "ransfer" in message or "ootstrap" in message:  # KVTransferError, "Decode bootstrap failed", and the like
        return TransferError(f"SGLang's hand-off failed: {message}")
    return WorkerLost(f"SGLang ended the request ({message or reason['type']})")


def _body(request: Request) -> dict[str, Any]:
    """What all requests have in common."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "sampling_seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if (asked := sampling.structured_outputs) is not None:
        params[_STRUCTURES[asked.kind]] = asked.text
    body: dict[str, Any] = {"rid": request.attempt_id, "input_ids": list(request.token_ids), "sampling_params": params}
    if request.salt:
        body["extra_key"] = request.salt
    return body


def _life(info: Mapping[str, Any]) -> str:
    """SGLang does not say when it was started, but, since 0.5.23, how long that took. Its seed is drawn at each start,
    unless an option sets it."""
    return f"{info.get('random_seed', '')} {info.get('startup_time', '')}".strip()
