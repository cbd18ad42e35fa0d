"""The workload that options (of a command, or of an experiment's file) describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.workloads.conversation import Room, Workload
from experiments.workloads.prompt_files import OwnPrompts, ShareGPT, TextLines
from experiments.workloads.synthetic import PUBLISHED_SHAPES, Lengths, Synthetic, parse_lengths, published
from experiments.workloads.trace import TRACE_BLOCK_SIZE, Trace
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest

INPUT_LEN = "256"
OUTPUT_LEN = "32"
DATASETS = ("random", "sharegpt", "sonnet", "jsonl", "trace", *PUBLISHED_SHAPES)

_ALL = frozenset({"dataset_path", "input_len", "output_len", "prefix_len", "num_prefixes", "turns", "pause_s"}) | {
    "scale",
    "block_size",
}
_APPLIES = {
    "random": {"input_len", "output_len", "prefix_len", "num_prefixes", "turns", "pause_s"},
    "sharegpt": {"dataset_path", "output_len", "turns", "pause_s"},
    "sonnet": {"dataset_path", "input_len", "output_len"},
    "jsonl": {"dataset_path", "output_len"},
    "trace": {"dataset_path", "block_size"},
}
_PUBLISHED_APPLIES = {"scale"}


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Options of a workload; None is the dataset's default. Lengths are written ``128`` or ``128:1024``, ``scale``
    ``0.1`` or, for input and output, ``0.1:0.5``."""

    dataset: str = "random"
    dataset_path: Path | None = None
    input_len: str | None = None
    output_len: str | None = None
    prefix_len: int | None = None
    num_prefixes: int | None = None
    turns: int | None = None
    pause_s: float | None = None
    scale: str | None = None
    block_size: int | None = None

    def workload(self) -> Workload:
        """The workload, with its file read. `InvalidRequest` names the option that is wrong or does not apply, or the
        file and line."""
        if self.dataset not in DATASETS:
            raise InvalidRequest(f"dataset: {self.dataset!r} is none of {', '.join(DATASETS)}")
        applies = _APPLIES.get(self.dataset, _PUBLISHED_APPLIES)
        for name in sorted(_ALL - applies):
            if getattr(self, name) is not None:
                raise InvalidRequest(
                    f"{name}: does not apply to the dataset {self.dataset}, which takes {', '.join(sorted(applies))}"
                )
        turns = 1 if self.turns is None else self.turns
        if turns < 1:
            raise InvalidRequest(f"turns: {turns} is below 1")
        if self.pause_s is not None and not 0 <= self.pause_s < float("inf"):
            raise InvalidRequest(f"pause: {self.pause_s:g} is not a number of seconds from 0")
        outputs = parse_lengths("output_len", self.output_len or OUTPUT_LEN)
        inputs = parse_lengths("input_len", self.input_len or INPUT_LEN)
        match self.dataset:
            case "random":
                return self._random(inputs, outputs, turns)
            case "sharegpt":
                given = outputs if self.output_len else None
                return ShareGPT.read(self._path(), turns, given, self.pause_s or 0.0)
            case "sonnet":
                return TextLines.read(self._path(), inputs, outputs)
            case "jsonl":
                return OwnPrompts.read(self._path(), outputs)
            case "trace":
                return Trace.read(self._path(), TRACE_BLOCK_SIZE if self.block_size is None else self.block_size)
        return published(self.dataset, *_scales(self.scale or "1"))

    def _random(self, inputs: Lengths, outputs: Lengths, turns: int) -> Synthetic:
        num_prefixes = 1 if self.num_prefixes is None else self.num_prefixes
        workload = Synthetic(inputs, outputs, self.prefix_len or 0, num_prefixes, turns, self.pause_s or 0.0)
        workload.validate()
        if self.num_prefixes is not None and not self.prefix_len:
            raise InvalidRequest("num_prefixes: there is no prefix; give its length with --prefix-len")
        return workload

    def _path(self) -> Path:
        if self.dataset_path is None:
            raise InvalidRequest(f"dataset_path: the dataset {self.dataset} reads a file; give --dataset-path FILE")
        return self.dataset_path


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


async def fitted(workload: Workload, client: AsyncClient, status: ServiceStatus) -> Workload:
    """``workload`` with requests that fit the service. The characters per token of a text are measured with one
    request. Raises what a request that does not fit would fail with."""
    if isinstance(workload, ShareGPT | TextLines):
        sample = workload.sample[: max(1, Room.of(status).tokens // 8)]  # fits even with several tokens per character
        counted = await client.generate(sample, max_tokens=1, ignore_eos=True).result()
        workload = replace(workload, chars_per_token=len(sample) / counted.prompt_tokens)
    return workload.within(Room.of(status))
