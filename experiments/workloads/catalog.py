"""The workload that options (of a command, or of an experiment's file) describe."""

from __future__ import annotations

from dataclasses import replace

from experiments.workloads.conversation import LoadTarget, Room, Workload
from experiments.workloads.options import WorkloadOptions
from experiments.workloads.prompt_files import OwnPrompts, ShareGPT, TextLines
from experiments.workloads.synthetic import PUBLISHED_SHAPES, Synthetic, parse_lengths, published
from experiments.workloads.trace import Trace
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest

DATASETS = ("random", "sharegpt", "sonnet", "jsonl", "trace", *PUBLISHED_SHAPES)
_APPLIES = {
    "random": {"input_len", "output_len", "prefix_len", "num_prefixes", "turns", "pause_s"},
    "sharegpt": {"dataset_path", "output_len", "turns", "pause_s"},
    "sonnet": {"dataset_path", "input_len", "output_len"},
    "jsonl": {"dataset_path", "output_len"},
    "trace": {"dataset_path", "block_size"},
}


def workload_of(options: WorkloadOptions) -> Workload:
    """The workload, with its file read. `InvalidRequest` names the option that is wrong or does not apply, or the file
    and line."""
    dataset, fields = options.dataset, WorkloadOptions.model_fields
    if dataset not in DATASETS:
        raise InvalidRequest(f"dataset: {dataset!r} is none of {', '.join(DATASETS)}")
    applies = _APPLIES.get(dataset, {"scale"})
    for name in sorted(fields.keys() - applies - {"dataset"}):
        if getattr(options, name) != fields[name].default:
            raise InvalidRequest(
                f"{name}: does not apply to the dataset {dataset}, which takes {', '.join(sorted(applies))}"
            )
    if options.turns < 1:
        raise InvalidRequest(f"turns: {options.turns} is below 1")
    if not 0 <= options.pause_s < float("inf"):
        raise InvalidRequest(f"pause: {options.pause_s:g} is not a number of seconds from 0")
    inputs = parse_lengths("input_len", options.input_len)
    outputs = parse_lengths("output_len", options.output_len or "32")
    if dataset == "random":
        prefixes = options.prefix_len, options.num_prefixes
        workload = Synthetic(inputs, outputs, *prefixes, options.turns, options.pause_s)
        workload.validate()
        if options.num_prefixes > 1 and not options.prefix_len:
            raise InvalidRequest("num_prefixes: there is no prefix; give its length with --prefix-len")
        return workload
    if dataset in PUBLISHED_SHAPES:
        return published(dataset, *_scales(options.scale))
    if (path := options.dataset_path) is None:
        raise InvalidRequest(f"dataset_path: the dataset {dataset} reads a file; give --dataset-path FILE")
    if dataset == "sharegpt":
        return ShareGPT.read(path, options.turns, outputs if options.output_len else None, options.pause_s)
    if dataset == "trace":
        return Trace.read(path, options.block_size)
    return TextLines.read(path, inputs, outputs) if dataset == "sonnet" else OwnPrompts.read(path, outputs)


def _scales(text: str) -> tuple[float, float]:
    """Factors of input and output lengths."""
    parts = text.split(":")
    try:
        scales = [float(part) for part in parts]
    except ValueError:
        scales = []
    if not 1 <= len(scales) <= 2 or not all(0 < scale < float("inf") for scale in scales):
        raise InvalidRequest(f"scale: {text!r} is no positive factor; write 0.1, or 0.1:0.5 for input and output")
    return scales[0], scales[-1]


async def fitted(workload: Workload, client: LoadTarget, status: ServiceStatus) -> Workload:
    """``workload`` with requests that fit the service. The characters per token of a text are measured with one
    request. Raises what a request that does not fit would fail with."""
    if isinstance(workload, ShareGPT | TextLines):
        sample = workload.sample[: max(1, Room.of(status).tokens // 8)]  # fits even with several tokens per character
        counted = await client.generate(sample, max_tokens=1, ignore_eos=True).result()
        workload = replace(workload, chars_per_token=len(sample) / counted.prompt_tokens)
    return workload.within(Room.of(status))
