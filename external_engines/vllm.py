"""vLLM with its NixlConnector: decode fetches the KV from prefill after prefill has answered.

Both servers are started with ``--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both",
"kv_load_failure_policy": "fail"}'`` (docs/vllm.md). Tested with vLLM 0.32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx2
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from external_engines.adapter import Abilities, Description, HandOff, KVCounters, Step
from external_engines.answers import error_of
from pdserve.core.errors import HandOffMissing, PdserveError, WorkerLost
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.core.worker import WorkerLoad

_PREFIX = "vllm:"
_WANTED = (
    "process_start_time_seconds",
    *(
        f"{_PREFIX}{name}"
        for name in (
            "cache_config_info",
            "kv_cache_usage_perc",
            "num_requests_running",
            "num_requests_waiting{",  # and not the same by reason
            "num_preemptions_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_by_source_total",
            "nixl_bytes_transferred_sum",
            "nixl_xfer_time_seconds_sum",
        )
    ),
)
_MOVED = f"{_PREFIX}nixl_bytes_transferred_sum"
_NEEDED = ("remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
_ASKS_FOR_HAND_OFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NO_HAND_OFF = "vLLM's prefill answered without a hand-off, so decode would compute the prompt again"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_TOKEN = "token_id:"


class VLLM:
    """See `external_engines.adapter.Adapter`. ``kv_address`` is the ``host:port`` at which decode finds the server's
    KV, if it is known."""

    kind = "vllm"
    path = "/v1/completions"
    transport = "nixl"
    abilities = Abilities(
        "vLLM",
        hand_off="decode fetches it after prefill has answered",
        proof="requests that run alone",
        logprobs=True,
        prompt_logprobs=False,
        structures=("json", "regex", "grammar"),
        speculation="--speculative-config",
    )

    def __init__(self, kv_address: str | None = None) -> None:
        self._kv_address = kv_address

    async def describe(self, http: httpx2.AsyncClient) -> Description | None:
        """See `external_engines.adapter.Adapter`."""
        answers = [await http.get(path) for path in ("/version", "/v1/models", "/metrics")]
        if any(answer.status_code == 404 for answer in answers):
            return None
        version, models, metrics = (answer.raise_for_status() for answer in answers)
        samples = _samples(metrics.text)
        cache = next((sample.labels for sample in samples if sample.name == f"{_PREFIX}cache_config_info"), None)
        if cache is None:
            return None
        try:
            model = models.json()["data"][0]
            return Description(
                kind=self.kind,
                version=version.json()["version"],
                model=model["id"],
                block_size=int(cache["block_size"]),
                kv_dtype=cache["cache_dtype"],
                max_model_len=int(model["max_model_len"]),
                num_blocks=int(cache["num_gpu_blocks"]),
                life=_life(samples),
                hands_off=any(sample.name == _MOVED for sample in samples) or None,
                kv_address=self._kv_address,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PdserveError(f"it does not describe itself as vLLM does ({type(error).__name__}: {error})") from None

    async def load(self, http: httpx2.AsyncClient, num_blocks: int) -> tuple[WorkerLoad, KVCounters, str]:
        """See `external_engines.adapter.Adapter`."""
        answer = await http.get("/metrics")
        samples = _samples(answer.raise_for_status().text)
        usages = [sample.value for sample in samples if sample.name == f"{_PREFIX}kv_cache_usage_perc"]
        usage = sum(usages) / len(usages) if usages else 0.0
        sums: defaultdict[str, float] = defaultdict(float)  # over the engines of a server with data parallelism
        for sample in samples:
            name = sample.name.removeprefix(_PREFIX)
            sums[f"{name} {sample.labels['source']}" if "source" in sample.labels else name] += sample.value
        load = WorkerLoad(
            free_blocks=round(num_blocks * (1.0 - usage)),
            running=int(sums["num_requests_running"]),
            waiting=int(sums["num_requests_waiting"]),
            preemptions=int(sums["num_preemptions_total"]),
            prompt_tokens_looked_up=int(sums["prefix_cache_queries_total"]),
            prompt_tokens_cached=int(sums["prefix_cache_hits_total"]),
        )
        computed, cached, received = (
            int(sums[f"prompt_tokens_by_source_total {source}"])
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        )
        moved, seconds = sums["nixl_bytes_transferred_sum"], sums["nixl_xfer_time_seconds_sum"]
        source = KVCounters(computed, cached, received, int(moved), seconds * 1e3)
        return load, source, _life(samples)

    def alone(self, request: Request, model: str) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        return body_of(request, model) | {"stream": True, "stream_options": {"include_usage": True}}

    def meeting(self, attempt_id: str, kv_address: str) -> HandOff | None:
        """See `external_engines.adapter.Adapter`."""
        return None

    def prefill(self, request: Request, model: str, meeting: HandOff | None) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        return body_of(request, model) | {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKS_FOR_HAND_OFF}

    def decode(self, request: Request, model: str, hand_off: HandOff) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        return body_of(request, model) | {"stream": True, "kv_transfer_params": hand_off}

    def hand_off(self, answer: Mapping[str, Any]) -> HandOff:
        """See `external_engines.adapter.Adapter`."""
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict):
            raise HandOffMissing(f"{_NO_HAND_OFF} (no kv_transfer_params); start it with --kv-transfer-config")
        if missing := [name for name in _NEEDED if not params.get(name)]:
            raise HandOffMissing(f"{_NO_HAND_OFF} (kv_transfer_params without {', '.join(missing)})")
        return params

    def read(self, part: Mapping[str, Any]) -> Step:
        """See `external_engines.adapter.Adapter`."""
        if "error" in part:
            raise error_of(part["error"], "vLLM")
        usage = part.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not part["choices"]:  # the last part, which has the usage alone
            return Step([], None, cached)
        choice = part["choices"][0]
        ids = choice["token_ids"] or []
        logprobs = _logprobs(choice["logprobs"]) if choice.get("logprobs") else [None] * len(ids)
        reason = choice["finish_reason"]
        if reason is not None and reason not in _REASONS:
            raise WorkerLost(f"vLLM ended the request ({reason})")
        return Step(list(zip(ids, logprobs, strict=True)), None if reason is None else _REASONS[reason], cached)


def body_of(request: Request, model: str) -> dict[str, Any]:
    """What all requests have in common. Every parameter is given, because vLLM takes its defaults from the model's
    folder."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "return_token_ids": True,
    }
    if request.salt:
        body["cache_salt"] = request.salt
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.structured_outputs is not None:
        body["structured_outputs"] = _structure(sampling)
    return body


def _structure(sampling: SamplingParams) -> dict[str, Any]:
    asked = sampling.structured_outputs
    assert asked is not None
    return {asked.kind: msgspec.json.decode(asked.text) if asked.kind == "json" else asked.text}


def _logprobs(logprobs: Mapping[str, Any]) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = []
    for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        # The sampled token comes in addition if it is not among the likeliest ones, and then last.
        likeliest = sorted(((int(name.removeprefix(_TOKEN)), value) for name, value in top.items()), key=_by_logprob)
        found.append(TokenLogprobs(logprob, tuple(likeliest)))
    return found


def _by_logprob(entry: tuple[int, float]) -> tuple[float, int]:
    token_id, logprob = entry
    return -logprob, token_id


def _samples(text: str) -> list[Sample]:
    """The metrics that are read here. A server has ten times as many."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_WANTED))
    return [sample for family in text_string_to_metric_families(f"{lines}\n") for sample in family.samples]


def _life(samples: list[Sample]) -> str:
    return next((str(sample.value) for sample in samples if sample.name == "process_start_time_seconds"), "")
