"""When a run is saved, by steps, by time, at its end; whether training waits for it; and what the
loop keeps beside weights.

Invariant: all ranks decide alike. The clock is rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.algorithms.base import AdaptiveAlgorithm, Algorithm
from hybridrl.checkpoint.folders import SavedState
from hybridrl.config.identity import run_folder
from hybridrl.config.schema import CheckpointConfig, Config
from hybridrl.loop.schedule import is_due
from hybridrl.models.score_token import BEFORE_LAST
from hybridrl.parallel.groups import World
from hybridrl.parallel.stopping import Notice
from hybridrl.training.model import ParallelModel

OLD_SCORES = (
    "was trained by an older version, which read its score at the token before the last one: it "
    "keeps that place, at which other programs do not read. Train it anew to have the score at the "
    "last token"
)
STOP_FILE = "stop"  # in a run folder: asks the run to save and end, as SIGTERM


class SaveClock:
    """Says which steps are saved.

    Args:
        section: of the run.
        world: of its ranks.
    """

    def __init__(self, section: CheckpointConfig, world: World) -> None:
        self._section, self._world = section, world
        self._since = time.monotonic()

    def start(self) -> None:
        """Begins to count time: training starts, or the run was saved."""
        self._since = time.monotonic()

    def is_due(self, step: int, last: int) -> bool:
        """Whether the run is saved after this step; collective.

        Args:
            step: that is finished.
            last: with which training ends.
        """
        if is_due(self._section.every, step, last):
            return True
        every_s = self._section.every_s
        if not every_s:
            return False
        is_over = time.monotonic() - self._since >= every_s
        return bool(self._world.broadcast_object(is_over, 0))

    def waits(self, step: int, last: int) -> bool:
        """Whether training waits until the checkpoint after this step is complete: the last one
        is, and all where it is asked for.
        """
        return step == last or not self._section.asynchronous


def when_saved(section: CheckpointConfig, num_steps: int) -> str:
    """Returns when a run is saved, in words.

    Args:
        section: of the run.
        num_steps: with which it ends.
    """
    often = f"every {section.every} steps, " if section.every else ""
    often += f"every {section.every_s:g} s, " if section.every_s else ""
    kept = "the newest stays" if section.keep == 1 else f"the newest {section.keep} stay"
    never = "" if often else "; never before, as checkpoint.every=0 and checkpoint.every_s=0 say"
    return f"{often}after step {num_steps} and on SIGINT or SIGTERM{never}; {kept}"


def stop_notice(config: Config) -> Notice:
    """Returns how a run is asked to stop beside signals."""
    return Notice(config.run.grace_s, run_folder(config) / STOP_FILE)


def again(resume: str) -> str:
    """Returns with which command a run goes on that was started with this `--resume`."""
    return "The same command" + (" without --resume" if resume == "previous" else "")


def run_state(
    step: int,
    seconds: float,
    cursors: Mapping[str, Any],
    algorithm: Algorithm,
    trained: Mapping[str, ParallelModel],
    evaluations: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Returns what a checkpoint keeps of the loop; JSON, as of `SavedState`.

    Args:
        step: finished steps.
        seconds: of training so far.
        cursors: of prompts, of further terms and of rollouts.
        algorithm, trained: of the run.
        evaluations: by step.
    """
    scores = {} if algorithm.needs.policy else {"score_token": trained["critic"].score_token}
    return {
        "step": step,
        **cursors,
        **scores,
        "algorithm": algorithm.state() if isinstance(algorithm, AdaptiveAlgorithm) else {},
        "evaluations": evaluations,
        "seconds": seconds,
        "num_updates": {name: model.num_updates for name, model in trained.items()},
        "freeze": list(next(iter(trained.values())).frozen_parts) if trained else [],
    }


def load_run_state(
    state: SavedState,
    algorithm: Algorithm,
    trained: Mapping[str, ParallelModel],
    notify: Callable[[str], None],
) -> None:
    """Gives algorithm and models what `run_state` kept of them.

    Args:
        state: of the checkpoint.
        algorithm, trained: of the run.
        notify: Tells the user, once.
    """
    for name, model in trained.items():
        model.num_updates = state.num_updates[name]
        if algorithm.needs.scores:
            model.read_scores(state.score_token)
            if state.score_token == BEFORE_LAST:
                notify(f"the reward model of this checkpoint {OLD_SCORES}")
    if isinstance(algorithm, AdaptiveAlgorithm):
        algorithm.load_state(state.algorithm)
