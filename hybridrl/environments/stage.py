"""Runs the environments of unfinished responses, here or in processes that can be killed.

A stage contains one environment per response. Every call contains all turns so far, so a stage can
recreate an environment and repeat its turns. Killing a process therefore loses nothing, and a run
can resume at any turn. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.own_code import awaited
from hybridrl.environments.base import (
    EXPECTED,
    Answer,
    Environment,
    EnvironmentCall,
    Turn,
    checked,
    checked_start,
    decoded,
)
from hybridrl.environments.table import find_environment, where
from hybridrl.errors import UserError
from hybridrl.rewards.outcome import WHERE, ScorerFailure, raised
from hybridrl.rewards.pool import Pool, Worker

Job = tuple[list[EnvironmentCall]]


class EnvironmentRunner:
    """Runs environments in this process."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._open: dict[tuple[int, int], tuple[Environment, int]] = {}

    def __call__(self, job: Job) -> list[Answer]:
        """Executes calls and returns their answers. An environment's UserError is passed on."""
        return [self._play(play) for play in job[0]]

    def _play(self, play: EnvironmentCall) -> Answer:
        if play.key is None:
            while self._open:
                _close(self._open.popitem()[1][0])
            return Turn()
        environment, num_done = self._open.pop(play.key, (None, 0))
        try:
            answer: Answer = Turn()
            if environment is None or num_done != len(play.actions) - 1:
                environment = self._make()
                first = checked_start(awaited(environment.reset(play.prompt, play.columns or {})))
                answer = first if isinstance(first, ScorerFailure) else Turn(first)
                for tokens, text in play.actions[:-1]:
                    awaited(environment.step(tokens, text))
            if play.actions:
                answer = checked(awaited(environment.step(*play.actions[-1])))
        except UserError:
            raise
        except BaseException as error:  # user code may raise anything
            answer = raised(error, WHERE, EXPECTED)
        if isinstance(answer, ScorerFailure) or answer.done:
            _close(environment)
        else:
            assert environment is not None
            self._open[play.key] = (environment, len(play.actions))
        return answer


def _close(environment: Any) -> None:
    if hasattr(environment, "close"):
        try:
            environment.close()
        except KeyboardInterrupt:
            raise
        except BaseException:  # user code may raise anything; the last answer is already known
            return


class StageProcess(Worker[EnvironmentConfig, Answer]):
    """A stage in a separate process. The process is killed after a timeout."""

    module, key = "hybridrl.environments.worker", "environment.name"

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._num_done: dict[tuple[int, int], int] = {}  # number of turns of each environment

    def allowed_s(self, job: Job) -> float:
        """Returns the time limit for one turn, or for all turns if they must be repeated."""
        (play,) = job[0]
        if play.key is None:
            self._num_done = {}
            return self._config.timeout_s
        is_current = self._num_done.get(play.key, -1) == len(play.actions) - 1
        self._num_done[play.key] = len(play.actions)
        return self._config.timeout_s * (1 if is_current else len(play.actions) + 1)

    def kill(self) -> str:
        self._num_done = {}
        return super().kill()

    def decoded(self, entry: dict[str, Any]) -> Answer:
        return decoded(entry)


class EnvironmentRunners:
    """All stages of a rank. The same stage receives all turns of a response."""

    def __init__(self, config: EnvironmentConfig) -> None:
        make = find_environment(config)
        self._here = EnvironmentRunner(make) if where(config) == "here" else None
        self._pools: list[Pool[Answer]] = []
        if self._here is None:
            name = str(config.name)
            make_stage = partial(StageProcess, config)
            self._pools = [Pool(make_stage, 1, name) for _ in range(config.workers)]
        self._used: set[int] = set()  # indices of pools that have environments

    def play(self, play: EnvironmentCall, number: int) -> Future[list[Answer]]:
        """Submits a call for the response with this number. Returns a future with the answer."""
        if self._here is None:
            index = number % len(self._pools)
            self._used.add(index)
            return self._pools[index].submit(([play],))
        done: Future[list[Answer]] = Future()
        try:
            done.set_result(self._here(([play],)))
        except UserError as error:
            done.set_exception(error)
        return done

    def clear(self) -> None:
        for index in [0] if self._here is not None else list(self._used):
            self.play(EnvironmentCall(None), index)
        self._used = set()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
