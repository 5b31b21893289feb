"""Generation ahead: where engines have ranks of their own, what is under way goes on while the
policy trains (`steps.max_policy_lag`; docs/adr/0011).

Who waits for whom: an engine generates on a thread of its own. The main threads of all ranks go
through the training together, and those of ranks with an engine have nothing to do there but to
answer. The threads that generate look, in a process group of their own, how many samples are
unfinished, and pause at the same step of their engines on all ranks; then the new weights come, and
the rest is as on shared ranks (lagged.py), with less to wait for. Which side does what in which
order is in timeline.py, and checked on the way.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from hybridrl.data.prompts import PromptSource
from hybridrl.generation.beside import Beside
from hybridrl.generation.idle import Clock, added, idle_shares
from hybridrl.generation.in_flight import Limits, num_new
from hybridrl.generation.lagged import LaggedSampler
from hybridrl.generation.looks import Looks
from hybridrl.generation.pool import known_states
from hybridrl.generation.timeline import Timeline
from hybridrl.metrics.timing import Span
from hybridrl.parallel.replica import EngineGroup

# For a thread that generates to see, two looks later at most, that what it does is not wanted.
CANCEL_S = 60.0
logger = logging.getLogger(__name__)


class AheadSampler(LaggedSampler):
    """Samples responses also while the policy trains.

    Args:
        limits: of what is under way, with `ahead_until`.
        parts, named: as of Sampler.
    """

    def __init__(self, limits: Limits, *parts: Any, **named: Any) -> None:
        super().__init__(limits, *parts, **named)
        if limits.ahead_until is None:
            raise ValueError(f"{limits}: ahead_until is the number of samples to pause at")
        self._ahead_until = limits.ahead_until
        self._is_engine = self.world.rank in self.layout.ranks
        self._engines = EngineGroup(self.layout, self.world.rank, self.world.heartbeat)
        self._beside, self._is_cancelled = Beside(self.world.platform.device), False
        self._is_awaited = False  # whether the training is done and waits for what is generated
        self._busy_ahead_s = 0.0  # seconds that this rank's engine generated ahead
        self._clocks: Sequence[Clock] = ()  # of earlier rounds of the step
        self._idle: dict[str, float] = {}
        self.timeline = Timeline("rollout" if self._is_engine else "training")

    @contextmanager
    def ahead(
        self, source: PromptSource, waits: AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """Generates ahead while the block runs, with what is under way and further prompts;
        arguments as of Sampler. Collective.
        """
        try:
            self._begin_ahead(source)
            self.timeline.take("train", self.engine.version)
            yield
        except BaseException:
            self.cancel()
            raise
        with waits or nullcontext():
            self._end_ahead()
        self.timeline.take("weights", self.engine.version + 1)

    def _begin_ahead(self, source: PromptSource) -> None:
        """Hands what is under way to the engines again, with further prompts, and lets them go."""
        self.timeline.take("generate_ahead", self.engine.version)
        self._drop_late(self._step)
        prompts = self._take(source, num_new(len(self._pool.groups), self._limits, is_ahead=True))
        with self.world.all_agree("beginning to generate ahead"):
            self._begin(prompts, self._step, self._has_greedy)
        self._is_cancelled = self._is_awaited = False
        if self._is_engine:
            self._beside.start(self._generate_ahead, "generate ahead")

    def _generate_ahead(self) -> None:
        """Takes steps of the engine until few samples of all replicas are unfinished; on a thread
        of its own, on the ranks with an engine. One that fails tells the others by the next look.
        """
        failure: Exception | None = None

        def counts() -> list[int]:
            num_left = sum(self._left.values()) if self._replica.is_first else 0
            return [int(failure is not None or self._gives_up()), num_left]

        looks = Looks(
            self._engines.begin_sum, lambda found: bool(found[0]) or found[1] <= self._ahead_until
        )
        for num_steps in itertools.count():
            if looks.may_end(num_steps, counts):
                break
            try:
                if failure is None:
                    self._advance(num_steps, self._gives_up)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _gives_up(self) -> bool:
        """Whether this rank wants generation to end now: nobody will use its samples, or a signal
        asks to stop and training is done. While the policy trains, generation goes on after a
        signal: if it ends by itself, the run that goes on has the same samples.
        """
        return self._is_cancelled or (self._is_awaited and self.world.heartbeat.stop_signal != 0)

    def _end_ahead(self) -> None:
        """Waits until the engines pause, and takes their samples out."""
        began = time.perf_counter()
        self._is_awaited = True
        with self.world.all_agree("generating ahead") as agreement:
            self._beside.join(self.world.check)
            agreement.value = self._leave_engine()
        self._waits.waited_s += time.perf_counter() - began
        # Of the next step, also where an evaluation comes before it.
        self._busy_ahead_s, self._busy_s = self._busy_s, 0.0
        told = self._pool.told(known_states(agreement.values))
        self._pool = replace(self._pool, groups=told)

    @property
    def ahead_span(self) -> Span | None:
        """When this rank's engine last generated ahead."""
        return self._beside.span

    def cancel(self) -> None:
        """Ends what is generated ahead, if anything is, for nobody to use; all ranks with an engine
        call it, or end.
        """
        self._is_cancelled = True
        try:
            self._beside.join(self.world.check, CANCEL_S)
        except Exception as error:  # what ended the step is told, not what came of it here
            logger.warning("generating ahead: %s: %s", type(error).__name__, error)

    def _begun_from(self, step: int) -> None:
        super()._begun_from(step)
        self._clocks = ()

    def _clock(self) -> Clock:
        if self._is_evaluation:
            return super()._clock()
        busy_s, self._busy_ahead_s = self._busy_s + self._busy_ahead_s, 0.0
        return self._waits.take(busy_s)

    def _note_busy(self, clocks: Sequence[Clock]) -> None:
        super()._note_busy(clocks)
        if not self._is_evaluation:
            self._clocks = added(self._clocks, clocks)
            self._idle = idle_shares(self._clocks, self.layout.ranks)

    def metrics(self) -> dict[str, float]:
        """Returns what LaggedSampler does, and how long the sides wait for each other."""
        return super().metrics() | self._idle
