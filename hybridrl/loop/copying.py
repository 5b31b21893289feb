"""When the training state is copied to host memory, and that a run goes on from there.

Invariant: all ranks decide alike. The clock is rank 0's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from hybridrl.checkpoint.memory_copies import MemoryCopies
from hybridrl.checkpoint.model_state import Saved
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.checkpoint.writing import Content, ModelFiles
from hybridrl.config.identity import run_folder
from hybridrl.config.schema import Config
from hybridrl.metrics.timing import PhaseTimer

COST = 0.03  # of the time, which copies may take
# Of the time, what training may wait for copies where a GPU trains: steps beside the threads that
# write take longer too, since they share memory and the interpreter with them. By 0.46 s after a
# wait of 0.55 (restart_h100.json), by 0.66 after one of 0.51 (restart_h200.json).
WAITING_COST = 0.0125


class Copies:
    """The copies of a run's state; none where it is not started again after a loss.

    Args:
        num_bytes: that this rank writes of the state, about.
        trains: whether the run is trained here; else copies are neither made nor looked for.
    """

    def __init__(
        self,
        config: Config,
        store: CheckpointStore,
        num_bytes: int,
        notify: Callable[[str], None],
        trains: bool = True,
    ) -> None:
        self._every, self._store, self._notify = config.checkpoint.copy_every, store, notify
        self._saves_beside = config.checkpoint.is_written_from_copies
        is_wanted = trains and config.run.max_restarts > 0 and self._every != 0
        made = MemoryCopies(run_folder(config), store.world, notify) if is_wanted else None
        self._copies: MemoryCopies | None = made
        self._has_started, self._is_on, self._last, self._has_said = False, False, 0, False
        self._is_first = True  # copy of this start
        self._num_bytes = num_bytes
        self._next, self._step, self._since = 0, 0, 0.0  # of rank 0: to copy; copied, and when

    def newest(self, resume: Literal["newest", "previous"]) -> Path | None:
        """Returns the checkpoint to go on from, None without one: the newest copy of an earlier
        start if it is newer than those. Collective; the run folder is held.
        """
        self._store.put_back_replaced()
        if resume == "previous":
            return self._store.previous()
        found = None if self._copies is None else self._copies.restore(self._store.root)
        if found is None or found.parent == self._store.root:
            return self._store.newest()
        assert self._copies is not None
        self._store.copy_in_memory = found, self._copies.lineage
        return found

    def start(self, step: int, last: int) -> None:
        """Begins to copy: the run goes on after a step, to the last one. Collective.

        Memory is taken beside the first steps: for copies, and for checkpoints that are written
        beside training, in this order.

        Args:
            step: number of finished steps.
        """
        has_room = True
        if self._copies is not None:
            has_room = self._copies.start(step, self._num_bytes)
            self._has_started, self._is_on, self._last = True, not self._copies.is_off, last
        if has_room or not self._is_on:
            self._reserve_for_checkpoints(self._num_bytes)
        self._next, self._step, self._since = step + 1, step, time.monotonic()
        self._is_first = True

    def _reserve_for_checkpoints(self, num_bytes: int) -> None:
        if self._saves_beside:
            self._store.reserve(num_bytes)

    def _is_due(self, step: int) -> bool:
        """Whether the state after this step is to be copied; collective. That after the last one is
        saved.
        """
        if not self._is_on or step >= self._last:
            return False
        if self._every != "auto":
            return step % self._every == 0
        return bool(self._store.world.broadcast_object(step >= self._next, 0))

    def take_due(
        self,
        step: int,
        models: Mapping[str, Saved],
        state: Callable[[], Mapping[str, Any]],
        files: ModelFiles,
        timer: PhaseTimer,
    ) -> None:
        """Copies the state after a step, if that is due; collective.

        Args:
            step: number of finished steps.
            state: gives what the loop needs besides; JSON.
        """
        if not self._is_due(step):
            return
        assert self._copies is not None
        begun = time.monotonic()
        with timer.phase("checkpoint"):
            lineage = [old for old in self._store.lineage if old.step != step]
            unfinished = self._store.unfinished
            if unfinished not in lineage:
                unfinished = None  # is of this step
            known = step, 0, lineage, self._store.layout, unfinished
            content = Content(models, state(), files, *known)
            reserved = self._store.reserved_bytes
            is_taken = self._copies.take(content, self._every != "auto", reserved)
        self._is_on = not self._copies.is_off
        if is_taken or not self._is_on:
            self._reserve_for_checkpoints(self._copies.num_bytes or self._num_bytes)
        if is_taken:
            self._plan_next(step, begun)

    def _plan_next(self, step: int, begun: float) -> None:
        """Says after how many steps the next copy is due, so that copies take COST of the time."""
        assert self._copies is not None
        now = time.monotonic()
        step_s = (begun - self._since) / max(step - self._step, 1)
        # Where CPUs train, the threads that write take their time.
        is_cpu = self._store.world.platform.is_cpu
        cost_s = now - begun + (self._copies.busy_s if is_cpu else 0.0)
        every = every_steps(cost_s, step_s, COST if is_cpu else WAITING_COST)
        if self._is_first:  # it may have waited for its memory: the next one says what copies take
            self._is_first, every = False, 1
        self._next, self._step, self._since = step + every, step, now
        if self._every == "auto" and not self._has_said and self._copies.busy_s:
            self._has_said = True
            said = f"the state is copied to host memory about every {every} steps"
            self._notify(f"{said}: a copy takes {cost_s:.2g} s, a step {step_s:.2g} s")

    def seal(self, evaluations: Mapping[str, Mapping[str, float]]) -> None:
        """Tells that the last step is in the run's records, with the evaluations by step."""
        if self._copies is not None and self._is_on:
            self._copies.seal(evaluations)

    def close(self) -> None:
        """Removes the copies: all is in a checkpoint. Collective."""
        if self._copies is not None and self._has_started:  # also where no more were made
            self._copies.close()
            self._has_started = self._is_on = False


def every_steps(cost_s: float, step_s: float, share: float) -> int:
    """Returns after how many steps something is done again that may take a share of the time."""
    return max(1, math.ceil(cost_s / (share * max(step_s, 1e-9))))
