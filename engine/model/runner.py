"""Runs a step on the device: parts of requests in, sampled tokens out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import torch

from engine.model.attention import Attention
from engine.model.decoder import Decoder, ModelStep
from engine.model.kv_pool import KVPool
from engine.model.sampler import DrawnTokens, draw_tokens, logprobs_of, read_logprobs
from engine.model.token_draw import DrawRows
from engine.scheduling.batch import PENDING, LayerHook, SampledToken, ScheduledSeq, StepTooLarge
from engine.scheduling.sequence import PromptLogprobs
from pdserve.core.sampling import SamplingParams
from runtime.cuda import Cuda, Event, upload

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_WARMUP_TOKENS = 128
_POLL_S = 50e-6
_MAX_REASON_CHARS = 200
T = TypeVar("T")
_LOGITS_BYTES = 8 * 2**20
"""Logits of a prompt that are in memory at a time, as float32: with what is made of them less than sampling a batch
takes, for which a GPU keeps memory."""


class LayerWatch:
    """Calls the hooks of steps when GPU ``index`` has computed their layers, which is long after these were launched.
    It does so in a thread of its own, so that the next layers and steps are launched meanwhile."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda, self._index = cuda, index
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="engine-layers", daemon=True).start()

    def watch(self, hook: LayerHook) -> WatchedLayers:
        """Call ``hook`` for the layers of the next step."""
        return WatchedLayers(hook, partial(self._cuda.record, self._index), self._work.put)

    def _run(self) -> None:
        self._cuda.init(self._index)
        while True:
            self._work.get()()


class WatchedLayers:
    """The layers of one step, which is to be launched with ``hook``. ``record`` notes a place in the GPU's work, and
    ``add`` gives work to the thread."""

    def __init__(self, hook: LayerHook, record: Callable[[], Event], add: Callable[[Callable[[], None]], None]) -> None:
        self.hook = LayerHook(hook.after, lambda number: add(partial(self._announce, record(), number)))
        self.sampled = threading.Event()
        """Nothing is announced before this is set."""
        self._done, self._add = hook.done, add
        self._all_announced = threading.Event()
        self._error: BaseException | None = None

    def launched(self) -> None:
        """Note that all of them have been launched."""
        self._add(self._all_announced.set)

    def drop(self) -> None:
        """Announce none of them: the step is given up."""
        self._done = lambda num_layers: None
        self.sampled.set()

    def wait(self) -> None:
        """Wait until all of them were announced. Raises what that has raised."""
        self._all_announced.wait()
        if self._error is not None:
            raise self._error

    def _announce(self, computed: Event, number: int) -> None:
        try:
            while not computed.query():
                time.sleep(_POLL_S)
            self.sampled.wait()
            self._done(number)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens that the last step sampled, ``[rows]`` on its device, and the row of each request."""

    token_ids: torch.Tensor
    rows: Mapping[str, int] = field(default_factory=dict)


class RecordedSteps(Protocol):
    """Recorded steps that can be replayed (`engine.kernels.cuda_graphs.DecodeGraphs`)."""

    def fits(self, seqs: Sequence[ScheduledSeq]) -> bool:
        """Whether there is a recorded step for ``seqs``."""
        ...

    def logits(self, seqs: Sequence[ScheduledSeq], before: LastTokens) -> torch.Tensor:
        """Replay the step; logits ``[rows, vocabulary]``. `PENDING` tokens are those of ``before``."""
        ...

    def capture(self, cuda: Cuda, index: int) -> None:
        """Record them on GPU ``index``."""
        ...


PromptRows = tuple[list[tuple[PromptLogprobs, int]], list[torch.Tensor]]
"""Prompts and how many of their tokens get logprobs by a step, and these, as of `logprobs_of`."""


class LaunchedStep:
    """A step that has been launched, up to the ``logits`` of the parts ``wanted``, or to its end if there are none
    (see `engine.core.RunningStep`). ``prompts``: what it adds to `ScheduledSeq.prompt_logprobs`. ``layers``: those
    that are announced."""

    def __init__(
        self,
        runner: ModelRunner,
        wanted: Sequence[ScheduledSeq],
        logits: torch.Tensor | None,
        prompts: PromptRows,
        layers: WatchedLayers | None = None,
    ) -> None:
        self._runner, self._wanted, self._logits, self._layers = runner, wanted, logits, layers
        self._prompts, self._prompt_tensors = prompts
        self._drawn: DrawnTokens | None = None
        self._copied = None if logits is not None else runner.copy(self._prompt_tensors)

    @torch.inference_mode()
    def sample(self) -> None:
        """Launch the sampling of the tokens, and their copy to the host."""
        if self._logits is not None:
            self._runner.within_memory(self._sample, self._layers)
        if self._layers is not None:
            self._layers.sampled.set()

    def _sample(self) -> None:
        assert self._logits is not None
        wanted = self._wanted
        if any(seq.num_drafts for seq in wanted):
            wanted = [seq for seq in wanted for _ in range(seq.num_drafts + 1)]
            positions = [seq.end - back for seq in self._wanted for back in range(seq.num_drafts, -1, -1)]
        else:
            positions = [seq.end for seq in wanted]
        params, histories = [s.params for s in wanted], [each for s in self._wanted for each in s.histories]
        drawn = draw_tokens(self._logits, params, positions, histories, self._runner.draw_rows)
        self._drawn, self._logits = drawn, None
        self._runner.last = LastTokens(drawn.tensors[0], {seq.attempt_id: row for row, seq in enumerate(wanted)})
        self._copied = self._runner.copy([*self._prompt_tensors, *drawn.tensors])

    def tokens(self) -> dict[str, list[SampledToken]]:
        """The tokens of each request that gets any, by request id."""
        assert self._copied is not None, "sample() comes first"
        copies = self._copied()
        if self._layers is not None:
            self._layers.wait()
        if self._prompts:
            own, ids, values = (copy.tolist() for copy in copies[:3])
            num_top = [prompt.num_top for prompt, count in self._prompts for _ in range(count)]
            told = iter(read_logprobs(num_top, own, ids, values))
            for prompt, count in self._prompts:
                prompt.values += islice(told, count)
        if self._drawn is None:
            return {}
        sampled = self._drawn.read(copies[len(self._prompt_tensors) :])
        if len(sampled) == len(self._wanted):
            return {seq.attempt_id: [token] for seq, token in zip(self._wanted, sampled, strict=True)}
        rows = iter(sampled)
        return {seq.attempt_id: list(islice(rows, seq.num_drafts + 1)) for seq in self._wanted}


class ModelRunner:
    """Combines model, attention, pool and sampler. Of requests it keeps the tokens ``last`` sampled, from which the
    next step goes on before they are known. ``graphs`` run the steps that fit. ``cuda`` is the GPU of the pool (None:
    the pool is on the host), and ``draw_rows`` its way to draw tokens. ``lead`` has the other ranks of a
    tensor-parallel engine `follow` a step, which is in the attention's order."""

    def __init__(
        self,
        model: Decoder,
        attention: Attention,
        pool: KVPool,
        graphs: RecordedSteps | None = None,
        cuda: Cuda | None = None,
        draw_rows: DrawRows | None = None,
        lead: Callable[[Sequence[ScheduledSeq]], None] | None = None,
    ) -> None:
        self._cuda = cuda
        self._lead = lead
        self.draw_rows = draw_rows
        self._graphs = graphs
        self._model = model
        self._attention = attention
        self._pool = self.pool = pool
        self._device = pool.tensor.device
        self._watch: LayerWatch | None = None  # from the first step on that has layers announced
        self.last = LastTokens(torch.zeros(0, dtype=torch.int64, device=self._device))

    @property
    def vocab_size(self) -> int:
        """Ids of its model's tokens."""
        return self._model.vocab_size

    def execute(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None = None) -> dict[str, list[SampledToken]]:
        """`launch` a step, sample, and wait for its tokens."""
        step = self.launch(seqs, hook)
        step.sample()
        return step.tokens()

    @torch.inference_mode()
    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None = None) -> LaunchedStep:
        """Launch ``seqs`` in one pass that writes their keys and values to the pool.

        A GPU may still compute the step before, whose tokens must have been drawn if a part is `PENDING`. ``hook`` is
        called when the keys and values of a group of layers can be read; a step that runs as a recorded graph does not
        call it.
        """
        layers = None
        if hook is not None and self._cuda is not None:
            self._watch = self._watch or LayerWatch(self._cuda, self._device.index or 0)
            layers = self._watch.watch(hook)
            hook = layers.hook
        return self.within_memory(partial(self._launch, seqs, hook, layers), layers)

    def within_memory(self, work: Callable[[], T], layers: WatchedLayers | None) -> T:
        """The result of ``work``. `StepTooLarge` if the GPU has too little memory for it; ``layers`` are not announced
        then."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            why = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        # Not within the handler, because its error keeps the frames of the step, and with them its tensors.
        if layers is not None:
            layers.drop()
        if self._cuda is not None:
            self._cuda.free_cached()
        raise StepTooLarge(why)

    def _launch(
        self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None, layers: WatchedLayers | None
    ) -> LaunchedStep:
        ordered = self._attention.order(seqs)
        tells = any(s.prompt_logprobs is not None and s.prompt_logprobs.missing(s.start, s.end)[0] for s in ordered)
        if self._graphs is not None and not tells and self._graphs.fits(ordered):
            return LaunchedStep(self, ordered, self._graphs.logits(ordered, self.last), ([], []))
        if self._lead is not None:
            self._lead(ordered)
        logits, wanted, prompts = self._compute(ordered, tells, hook)
        if layers is not None:
            layers.launched()
        return LaunchedStep(self, wanted, logits, prompts, layers)

    @torch.inference_mode()
    def follow(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Compute this rank's part of a step of rank 0, which samples its tokens."""
        self._compute(seqs, any(seq.prompt_logprobs is not None for seq in seqs), None)

    def _compute(
        self, ordered: Sequence[ScheduledSeq], tells: bool, hook: LayerHook | None
    ) -> tuple[torch.Tensor | None, list[ScheduledSeq], PromptRows]:
        """Logits, the parts that they are of, and the logprobs of prompts if the step ``tells`` any."""
        step, wanted = self._step(ordered)
        prompts: PromptRows = ([], [])
        if tells:  # the last layer computes all rows, too
            hidden = self._model.forward(replace(step, wanted=None, wanted_attention=None), self._pool, hook)
            prompts = self._prompt_logprobs(ordered, hidden)
            hidden = hidden if step.wanted is None else hidden[step.wanted]
        else:
            hidden = self._model.forward(step, self._pool, hook)
        logits = self._model.logits(hidden) if wanted else None
        self._model.meet()
        return logits, wanted, prompts

    def _prompt_logprobs(self, seqs: Sequence[ScheduledSeq], hidden: torch.Tensor) -> PromptRows:
        """The logprobs that ``seqs``, whose rows ``hidden`` are, add to their prompts. Logits of a few rows at a time
        are in memory."""
        prompts: list[tuple[PromptLogprobs, int]] = []
        rows: list[int] = []
        next_ids: list[int] = []
        begin = 0
        for seq in seqs:
            if seq.prompt_logprobs is not None:
                positions, token_ids = seq.prompt_logprobs.missing(seq.start, seq.end)
                prompts.append((seq.prompt_logprobs, len(positions)))
                rows += [begin + position - seq.start for position in positions]
                next_ids += token_ids
            begin += len(seq.token_ids)
        size = max(1, _LOGITS_BYTES // (4 * self.vocab_size))
        num_top = max(prompt.num_top for prompt, _ in prompts)
        at, ids = upload(rows, torch.int64, self._device), upload(next_ids, torch.int64, self._device)
        parts = [
            logprobs_of(self._model.logits(hidden[at[start : start + size]]), ids[start : start + size], num_top)
            for start in range(0, len(rows), size)
        ]
        return prompts, [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def copy(self, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copy results to the host when they are computed, as is everything before them. Returns what waits for it."""
        return (lambda: tensors) if self._cuda is None else self._cuda.to_host(tensors, self._device.index or 0)

    def _step(self, seqs: Sequence[ScheduledSeq]) -> tuple[ModelStep, list[ScheduledSeq]]:
        """The pass over ``seqs``, and the parts that get a token, in the order of its hidden states."""
        step = ModelStep(
            token_ids=self._token_ids(seqs),
            positions=upload([p for s in seqs for p in range(s.start, s.end)], torch.int64, self._device),
            attention=self._attention.plan(seqs),
        )
        if all(len(s.token_ids) == 1 and s.sample for s in seqs):
            return step, list(seqs)
        # Only the last row of a chunk is wanted, or those from its last known token on if drafts follow. They attend
        # like a shorter chunk, or a decode, in the last layer.
        rows: dict[str, range] = {}
        lasts: dict[str, ScheduledSeq] = {}
        wanted: dict[str, ScheduledSeq] = {}
        end = 0
        for seq in seqs:
            end += len(seq.token_ids)
            if seq.sample:
                count = seq.num_drafts + 1
                rows[seq.attempt_id] = range(end - count, end)
                wanted[seq.attempt_id] = seq
                last_ids = seq.token_ids[-count:]
                lasts[seq.attempt_id] = msgspec.structs.replace(seq, token_ids=last_ids, start=seq.end - count)
        ordered = self._attention.order(list(lasts.values()))
        step = replace(
            step,
            wanted=upload([row for s in ordered for row in rows[s.attempt_id]], torch.int64, self._device),
            wanted_attention=self._attention.plan(ordered),
        )
        return step, [wanted[s.attempt_id] for s in ordered]

    def _token_ids(self, seqs: Sequence[ScheduledSeq]) -> torch.Tensor:
        """The tokens of ``seqs``, with those of the last step in place of `PENDING`: ``[rows]``."""
        token_ids = upload([t for s in seqs for t in s.token_ids], torch.int64, self._device)
        pending: list[tuple[int, int]] = []  # rows of this step and of the last one
        row = -1
        for seq in seqs:
            row += len(seq.token_ids)
            if seq.token_ids[-1] == PENDING:
                pending.append((row, self.last.rows[seq.attempt_id]))
        if pending:
            rows, last_rows = upload(np.array(pending).T, torch.int64, self._device)
            token_ids[rows] = self.last.token_ids[last_rows]
        return token_ids

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was launched: under MPS, an end in its middle disturbs other
        processes."""
        if self._cuda is not None:
            self._cuda.synchronize(self._device.index or 0)

    def warmup(self, max_tokens: int) -> None:
        """Run a prompt chunk and a decode once, so that no request waits for lazy initialisation. Overwrites the first
        blocks of the pool."""
        layout = self._pool.layout
        tokens = min(_WARMUP_TOKENS, max_tokens, self._pool.num_blocks * layout.block_size)
        blocks = list(range(layout.blocks_for(tokens)))
        self.execute([ScheduledSeq("warmup", [0] * tokens, 0, blocks, True, _GREEDY)])
        self.execute([ScheduledSeq("warmup", [0], tokens - 1, blocks, True, _GREEDY)])
