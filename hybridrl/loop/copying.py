"""Copies the training state to host memory at intervals, and finds a copy to resume from. All ranks
make the same decisions, because only rank 0's clock is used.
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
from hybridrl.config.rules_optimizer import is_written_from_copies
from hybridrl.config.schema import Config
from hybridrl.metrics.timing import PhaseTimer

COST = 0.03  # fraction of the training time that copies may take on CPUs
# Fraction of the training time that a GPU may wait for copies. A copy also slows down the steps
# during which threads write it, because the threads compete for memory bandwidth and the Python
# interpreter. A copy that blocked the GPU for 0.55 s slowed down later steps by 0.46 s in total
# (restart_h100.json). Another copy blocked the GPU for 0.51 s and slowed down later steps by 0.66 s
# (restart_h200.json).
WAITING_COST = 0.0125


class Copies:
    """In-memory copies of a run that may restart after a rank fails (`run.max_restarts` > 0).
    `num_bytes` is the approximate size of this rank's part. Without `trains`, there are no copies.
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
        self._saves_from_copies = is_written_from_copies(config)
        is_wanted = trains and config.run.max_restarts > 0 and self._every != 0
        self._copies = MemoryCopies(run_folder(config), store.world, notify) if is_wanted else None
        self._has_started, self._is_on, self._last, self._is_reported = False, False, 0, False
        self._is_first = True  # whether the next copy is the first of this start
        self._num_bytes = num_bytes
        # On rank 0: step of the next copy, step of the last copy, and time of the last copy.
        self._next, self._step, self._since = 0, 0, 0.0

    def newest(self, resume: Literal["newest", "previous"]) -> Path | None:
        """Returns the newest checkpoint or copy, or None. The run must be locked; collective."""
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
        """Starts making copies of a run that has finished `step` and ends with `last`; collective.
        Reserves memory in the background during the first steps, for copies and then for
        checkpoints that are written during training.
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
        if self._saves_from_copies:
            self._store.reserve(num_bytes)

    def _is_due(self, step: int) -> bool:
        """Whether to copy the state after this step, unless a checkpoint saves it; collective."""
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
        """Copies the state after a step if a copy is due; `state` is the loop's. Collective."""
        if not self._is_due(step):
            return
        assert self._copies is not None
        start = time.monotonic()
        with timer.phase("checkpoint"):
            lineage = [old for old in self._store.lineage if old.step != step]
            unfinished = self._store.unfinished
            if unfinished not in lineage:
                unfinished = None  # it is a checkpoint of this step
            content = Content(
                models, state(), files, step, 0, lineage, self._store.layout, unfinished
            )
            reserved = self._store.reserved_bytes
            is_taken = self._copies.take(content, self._every != "auto", reserved)
        self._is_on = not self._copies.is_off
        if is_taken or not self._is_on:
            self._reserve_for_checkpoints(self._copies.num_bytes or self._num_bytes)
        if is_taken:
            self._plan_next(step, start)

    def _plan_next(self, step: int, start: float) -> None:
        """Chooses the step of the next copy, to spend at most the allowed share of time."""
        assert self._copies is not None
        now = time.monotonic()
        step_s = (start - self._since) / max(step - self._step, 1)
        # On CPUs, the threads that write copies compete with training for cores.
        is_cpu = self._store.world.platform.is_cpu
        cost_s = now - start + (self._copies.busy_s if is_cpu else 0.0)
        every = every_steps(cost_s, step_s, COST if is_cpu else WAITING_COST)
        if self._is_first:  # it may have waited for memory, so the next is timed
            self._is_first, every = False, 1
        self._next, self._step, self._since = step + every, step, now
        if self._every == "auto" and not self._is_reported and self._copies.busy_s:
            self._is_reported = True
            self._notify(
                f"the state is copied to host memory about every {every} steps: a copy takes "
                f"{cost_s:.2g} s, a step {step_s:.2g} s"
            )

    def seal(self, evaluations: Mapping[str, Mapping[str, float]]) -> None:
        """Marks the last copy as valid, with its evaluations, once its step has been recorded."""
        if self._copies is not None and self._is_on:
            self._copies.seal(evaluations)

    def close(self) -> None:
        """Removes the copies once a checkpoint contains the whole state; collective."""
        if self._copies is not None and self._has_started:  # even if copies were turned off
            self._copies.close()
            self._has_started = self._is_on = False


def every_steps(cost_s: float, step_s: float, share: float) -> int:
    """Returns the fewest steps between events of `cost_s` such that these take at most `share`."""
    return max(1, math.ceil(cost_s / (share * max(step_s, 1e-9))))
