"""Saves a run (at intervals, at its end and when it is stopped) and resumes it from a checkpoint.

Owns the part of a checkpoint that describes the loop. All ranks make the same decisions, because
decisions about time use rank 0's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hybridrl.algorithms.base import AdaptiveAlgorithm, Algorithm
from hybridrl.checkpoint.folders import SavedState
from hybridrl.checkpoint.run_lock import RunLock
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.identity import run_folder
from hybridrl.config.rules_optimizer import is_written_from_copies
from hybridrl.config.schema import Config
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.copying import Copies
from hybridrl.loop.engine_phases import EnginePhases
from hybridrl.loop.evaluate import Evaluations
from hybridrl.loop.exports import Exports, export_with_tokenizer, model_card
from hybridrl.loop.journal import Journal
from hybridrl.loop.observers import Observer, is_due
from hybridrl.loop.position import Position
from hybridrl.models.score_token import BEFORE_LAST
from hybridrl.parallel.stopping import Notice, StopAsked, stops_on_signals
from hybridrl.roles.roles import Roles
from hybridrl.training.model import ParallelModel

OLD_SCORES = (
    "was trained by an older version of hybridrl and has its score at the token before the last. "
    "Other programs read scores at the last token. Train the model again to move the score there"
)
STOP_FILE = "stop"  # a file with this name in the run folder acts like SIGTERM


class Checkpoints(Observer):
    def __init__(
        self,
        *,
        config: Config,
        lock: RunLock,
        store: CheckpointStore,
        copies: Copies,
        roles: Roles,
        algorithm: Algorithm,
        sampler: Sampler,
        prompts: PromptSource,
        position: Position,
        evaluations: Evaluations,
        phases: EnginePhases,
        journal: Journal,
    ) -> None:
        self._config, self._lock, self.store, self.copies = config, lock, store, copies
        self._roles, self._algorithm, self._sampler = roles, algorithm, sampler
        self._prompts, self._position, self._evaluations = prompts, position, evaluations
        self._phases, self._journal = phases, journal
        self._exports = Exports(config, journal.notify)
        self._since = time.monotonic()
        self._saved_step = 0  # step of the last saved or loaded checkpoint

    def locked(self) -> AbstractContextManager[None]:
        return self._lock.held(self.store.world, self._journal.notify)

    def newest(self, resume: Literal["newest", "previous"]) -> Path | None:
        return self.copies.newest(resume)

    def save_copy(self) -> None:
        """Writes a checkpoint if the state came from a copy in memory, newer than all others."""
        if self.store.copy_in_memory is not None:
            self.save()

    def fit_begins(self, first: int, last: int) -> None:
        self.copies.start(first, last)

    def start_clock(self) -> None:
        """Restarts the clock for `checkpoint.every_s`."""
        self._since = time.monotonic()

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save the run after this step; collective."""
        section = self._config.checkpoint
        if is_due(section.every, step, last):
            return True
        if not section.every_s:
            return False
        is_over = time.monotonic() - self._since >= section.every_s
        return bool(self.store.world.broadcast_object(is_over, 0))

    def weights_changed(self, number: int) -> None:
        roles, timer = self._roles, self._journal.timer
        self.copies.take_due(number, roles.trained, self._state, roles.source.files, timer)

    def step_recorded(self, number: int, metrics: Mapping[str, float]) -> None:
        self.copies.seal(self._evaluations.by_step)

    def step_is_over(self, number: int, last: int, metrics: Mapping[str, float]) -> None:
        self.store.finish_if_written()
        if self.is_due(number, last):
            self.save(waits=number == last)

    def fit_ends(self) -> None:
        self.copies.close()

    @contextmanager
    def saved_at_stop(self, last: int, resume: str) -> Iterator[None]:
        """Completes the checkpoint in progress and saves the run, with the unfinished step's
        responses, if a signal arrives in a `with` block. Saves nothing if nothing changed.
        """

        def save(stop: StopAsked) -> None:
            self._save_at_stop(stop, last, resume)

        notice = Notice(self._config.run.grace_s, run_folder(self._config) / STOP_FILE)
        with self.store.completed(), stops_on_signals(self.store.world, save, notice):
            yield

    def _save_at_stop(self, stop: StopAsked, last: int, resume: str) -> None:
        self._phases.enter_training()
        step, rollouts = self._position.step, self._sampler.has_rollouts
        saved = "nothing has changed since the last checkpoint"
        self._position.rewind()
        try:
            self.store.finish()
            if rollouts or step != self._saved_step:
                saved = f"saved to {self.save()}"
                self._position.has_begun = False  # makes the next `fit` load this checkpoint
            self.copies.close()
        finally:
            self._sampler.drop()
        saved += f", including all responses so far in step {step + 1}" if rollouts else ""
        without = " without --resume" if resume == "previous" else ""
        self._journal.notify(
            f"{stop} after step {step} of {last}: {saved}. Run the same command{without} to "
            "continue."
        )
        self.store.world.arrive("removing old checkpoints")

    def save(self, waits: bool = True) -> Path:
        with self.locked():
            was_rollout, state = self._phases.is_rollout, self._state()
            self._phases.enter_training(frees_memory=True)
            with self._journal.phase("checkpoint"):
                trained, files = self._roles.trained, self._roles.source.files
                waits = waits or not is_written_from_copies(self._config)
                folder = self.store.save(self._position.step, trained, state, files, waits)
                self._exports.write(folder, trained, self._evaluations.by_step)
            self._saved_step = self._position.step
            self.start_clock()
            if was_rollout:
                self._phases.reshard()
            return folder

    def save_hf(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
        was_rollout, roles = self._phases.is_rollout, self._roles
        self._phases.enter_training(frees_memory=True)  # restores released weights
        model = roles.trained.get("policy") or next(iter(roles.trained.values()))
        name = f"step_{self._position.step}"
        card = model_card(self._config, model, name, self._evaluations.by_step)
        export_with_tokenizer(model, path, roles.source.files.side_files, tokenizer, card)
        if was_rollout:
            self._phases.reshard()
        return path

    def load(self, path: Path) -> None:
        self._phases.enter_training(frees_memory=True)  # frees the engine's memory
        position, trained = self._position, self._roles.trained
        state = self.store.load(path, trained)
        self._phases.send_frozen_again()  # loading changed frozen weights
        assert state.step is not None  # the store refuses a checkpoint that contains only weights
        position.has_begun = True
        position.step, position.seconds = state.step, state.seconds
        # A checkpoint of another run does not count as a saved step of this run.
        is_own = [saved.step for saved in self.store.lineage[:1]] == [state.step]
        self._saved_step = state.step if is_own else 0
        self._evaluations.by_step = dict(state.evaluations)
        position.load({"prompts": state.prompts, "mix": state.mix})
        load_run_state(state, self._algorithm, trained, self._journal.notify)
        self._sampler.load_state(state.rollouts, self._prompts)
        self._phases.reshard()

    def _state(self) -> dict[str, Any]:
        return run_state(
            step=self._position.step,
            seconds=self._position.all_seconds(),
            cursors={**self._position.state(), "rollouts": self._sampler.state()},
            algorithm=self._algorithm,
            trained=self._roles.trained,
            evaluations=self._evaluations.by_step,
        )


def run_state(
    step: int,
    seconds: float,
    cursors: Mapping[str, Any],
    algorithm: Algorithm,
    trained: Mapping[str, ParallelModel],
    evaluations: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Returns the loop's state as JSON; `cursors` are those of prompts, terms and rollouts."""
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
    for name, model in trained.items():
        model.num_updates = state.num_updates[name]
        if algorithm.needs.scores:
            model.read_scores(state.score_token)
            if state.score_token == BEFORE_LAST:
                notify(f"the reward model of this checkpoint {OLD_SCORES}")
    if isinstance(algorithm, AdaptiveAlgorithm):
        algorithm.load_state(state.algorithm)
