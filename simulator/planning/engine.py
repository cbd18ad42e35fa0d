"""An engine whose steps take the time of a prediction: the real `EngineCore` and scheduler, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from contract.engine import CoreCommand
from engine.core import ComputedStep, EngineCore, Outbox, RunningStep
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.kv_layout import KVLayout
from simulator.loop import WorldLoop
from simulator.planning.step_time import StepShape, StepTime

TOKEN_ID = 1
"""Every token that is sampled."""
_TOKEN = (SampledToken(TOKEN_ID),)


class PlannedEngine:
    """Steps on ``loop`` as an engine process does: it takes commands between steps, launches a step, and waits for its
    end, or with ``run_ahead`` for that of the step before. ``between_s`` passes between the end of a step and the next
    one. ``spread``: see `PlannedWorker`."""

    def __init__(
        self,
        loop: WorldLoop,
        config: SchedulerConfig,
        steps: StepTime,
        outbox: Outbox,
        layout: KVLayout,
        *,
        layer_groups: int = 0,
        between_s: float = 0.0,
        run_ahead: bool = False,
        spread: Sequence[float] = (),
    ) -> None:
        self._loop, self._steps, self._layers, self._between_s = loop, steps, layout.num_layers, between_s
        connector = KVConnector(loop.world, layout, layer_groups)
        self.scheduler = Scheduler(config, loop.world, connector)
        self._spread, self._random = spread, loop.world.random
        self._core = EngineCore(self.scheduler, self, loop.world, outbox, run_ahead)
        self._inbox: list[CoreCommand] = []
        self._ends: deque[float] = deque()
        """When the steps on their way end."""
        self._device_free_s = 0.0
        self._at_work = False
        self.is_over = False
        """It has been stopped."""
        self.busy_s = 0.0
        """For how long the device has computed, and will with the steps that are launched."""
        self.num_steps = 0

    def stop(self) -> None:
        """End it at once: it computes and sends nothing more."""
        self.is_over = True

    def occupy(self, seconds: float) -> None:
        """Have something else use the device for so long, once it has computed what it was given."""
        self._device_free_s = max(self._loop.time(), self._device_free_s) + seconds

    def take(self, command: CoreCommand) -> None:
        """Give the engine a command."""
        if self.is_over:
            return
        self._inbox.append(command)
        if not self._at_work:
            self._at_work = True
            self._loop.call_soon(self._turn)

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
        """See `engine.core.Runner`."""
        shape = StepShape.of(seqs)
        seconds = self._steps.seconds(shape)
        if self._spread and not shape.pairs:
            seconds *= self._spread[int(self._random() * len(self._spread))]
        now_s = self._loop.time()
        began_s = max(now_s, self._device_free_s)
        self._device_free_s = began_s + seconds
        self._ends.append(self._device_free_s)
        self.busy_s += seconds
        self.num_steps += 1
        if hook is not None:
            for layers in hook.after:
                self._loop.call_at(began_s + seconds * layers / self._layers, self._layers_done, hook, layers)
        return ComputedStep({seq.attempt_id: _TOKEN for seq in seqs if seq.sample})

    def _layers_done(self, hook: LayerHook, layers: int) -> None:
        if not self.is_over:
            hook.done(layers)

    def _turn(self) -> None:
        """Take the commands, launch a step, and wait for one."""
        if self.is_over:
            return
        commands, self._inbox = self._inbox, []
        for command in commands:
            self._core.take(command)
        began = self._core.begin()
        most = self._core.max_in_flight if began else 0
        if not self._ends:
            self._at_work = bool(self._inbox)
            if self._at_work:
                self._loop.call_soon(self._turn)
        elif len(self._ends) > most:
            self._loop.call_at(self._ends[0], self._finish, most)
        else:
            self._finish(most)

    def _finish(self, most: int) -> None:
        """Steps beyond ``most`` have ended."""
        if self.is_over:
            return
        ended = len(self._ends) > most
        while len(self._ends) > most:
            self._ends.popleft()
        self._core.finish(most)
        if ended and self._between_s:
            self._loop.call_later(self._between_s, self._turn)
        else:
            self._loop.call_soon(self._turn)
