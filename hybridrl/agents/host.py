"""Runs the agents of one engine replica: opens their sessions, starts the programs and collects
their results. Does not import torch.

The rank's loop calls `begin`, `take` and `take_finished` between engine steps and never waits for a
program, except in `wait`. Threads of the runner call back at a program's end. Invariant: every
episode is either returned once by `take_finished` or was ended by `end`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from hybridrl.agents.backend import Arrivals, TurnQueue
from hybridrl.agents.samples import Budgets, Picker, SessionResult
from hybridrl.agents.sessions import Session, Sessions
from hybridrl.agents.tasks import AgentClocks, AgentTask, Report, Runner
from hybridrl.config.files import replace_text
from hybridrl.contracts.prompts import Asked
from hybridrl.errors import UserError, error_text
from hybridrl.rollout.engine import Completion

STATUS_EVERY_S = 1.0


class Endpoint(Protocol):
    """An HTTP server for sessions."""

    @property
    def url(self) -> str:
        """Address, without the part `/v1`."""

    def close(self) -> None:
        """Stops the server."""


@dataclass(frozen=True)
class Assignment:
    """An episode to run; see `AgentTask`."""

    key: int
    step: int
    sample: int
    prompt: Asked
    columns: Mapping[str, Any]

    @property
    def is_evaluation(self) -> bool:
        return self.step < 0


@dataclass(frozen=True)
class Finished:
    """An episode that ended.

    Args:
        failure: What the agent did wrong, and what is allowed; None if nothing went wrong.
        limit: Limit of turns or tokens that the agent reached, if any.
    """

    key: int
    result: SessionResult
    reward: float | None
    failure: tuple[str, str] | None
    limit: Literal["turns", "tokens"] | None
    seconds: float


@dataclass
class _Running:
    session: Session
    began: float
    assignment: Assignment


class AgentHost:
    """Runs agents.

    Args:
        concurrency: Maximum number of programs at the same time. Programs of training and of
            evaluations are counted separately, because programs of training cannot continue while
            an evaluation uses the engine.
        status_file: File for `hybridrl top`.
    """

    def __init__(
        self,
        *,
        sessions: Sessions,
        queue: TurnQueue,
        endpoint: Endpoint,
        runner: Runner,
        clocks: AgentClocks,
        model: str,
        budgets: Budgets,
        picker: Picker,
        concurrency: int,
        status_file: Path,
    ) -> None:
        self._sessions, self._queue, self._endpoint = sessions, queue, endpoint
        self._runner, self._clocks, self._model = runner, clocks, model
        self._budgets, self._picker, self._concurrency = budgets, picker, concurrency
        self._status_file, self._status_at = status_file, 0.0
        self._lock = threading.Lock()
        # The key says whether they belong to evaluations, which go first.
        self._waiting: dict[bool, deque[Assignment]] = {True: deque(), False: deque()}
        self._running: dict[int, _Running] = {}
        self._finished: list[Finished] = []
        self._error: Exception | None = None
        self._num_ended = self._num_failed = 0

    def begin(self, assignment: Assignment) -> None:
        """Starts an episode as soon as the number of running programs permits it."""
        with self._lock:
            self._waiting[assignment.is_evaluation].append(assignment)
        self._fill()

    def end(self, key: int) -> None:
        """Ends an episode whose result is not needed."""
        with self._lock:
            for waiting in self._waiting.values():
                for one in [one for one in waiting if one.key == key]:
                    waiting.remove(one)
            running = self._running.pop(key, None)
            self._finished = [one for one in self._finished if one.key != key]
        if running is not None:
            self._runner.stop(key)
            self._sessions.close(running.session)
        self._fill()

    def take(self) -> Arrivals:
        """Returns the turns that were requested or aborted since the last call."""
        self._write_status()
        return self._queue.take()

    def take_finished(self) -> list[Finished]:
        """Returns the episodes that ended since the last call.

        Raises:
            UserError: The user's function for `agent.rows` returned something wrong.
            Exception: A thread of the runner could not start the next episode.
        """
        with self._lock:
            found, self._finished = self._finished, []
            error = self._error
        if error is not None:
            raise error
        return found

    def finish(self, completions: Iterable[Completion]) -> None:
        self._queue.finish(completions)

    def abort(self, request_id: int) -> None:
        self._queue.abort(request_id)

    def wait(self, timeout_s: float) -> None:
        """Waits until a turn is requested or an episode ends, at most `timeout_s` seconds."""
        with self._lock:
            is_any = bool(self._finished or self._error)
        if not is_any:
            self._queue.wait(timeout_s)

    def end_wait(self) -> None:
        self._queue.wake()

    def sleep(self) -> None:
        """Notes that the engine sleeps; turns are then answered later."""
        self._queue.is_asleep = True
        self._clocks.sleep()

    def wake(self, is_evaluation: bool) -> None:
        """Notes that the engine generates again, for an evaluation or for training."""
        self._queue.is_asleep = False
        self._clocks.wake(is_evaluation)

    def versions(self, keys: Collection[int]) -> dict[int, Counter[int]]:
        """Returns how many tokens of the episodes' turns each version of the weights sampled."""
        with self._lock:
            sessions = {key: one.session for key, one in self._running.items() if key in keys}
        found: dict[int, Counter[int]] = {}
        for key, session in sessions.items():
            counts = found.setdefault(key, Counter())
            for turn in session.turns:
                for version, num in turn.completion.runs:
                    counts[version] += num
        return found

    def close(self) -> None:
        with self._lock:
            for waiting in self._waiting.values():
                waiting.clear()
            running, self._running = list(self._running.values()), {}
        self._queue.close("The run has ended.")
        try:
            self._runner.close()
        finally:
            try:
                for one in running:
                    self._sessions.close(one.session)
            finally:
                self._endpoint.close()
                with suppress(OSError):
                    self._status_file.unlink(missing_ok=True)

    def _fill(self) -> None:
        while True:
            with self._lock:
                if (one := self._next()) is None:
                    return
                session = self._sessions.open(one.key, dict(one.columns), self._budgets)
                began = self._clocks.of(one.is_evaluation).now()
                self._running[one.key] = _Running(session, began, one)
            task = AgentTask(
                key=one.key,
                step=one.step,
                sample=one.sample,
                prompt=one.prompt,
                columns=one.columns,
                base_url=self._endpoint.url,
                api_key=session.token,
                model=self._model,
            )
            self._runner.start(task, partial(self._on_end, one.key))

    def _next(self) -> Assignment | None:
        """Removes and returns the next episode that may start; the caller holds the lock."""
        num_running = Counter(one.assignment.is_evaluation for one in self._running.values())
        for is_evaluation, waiting in self._waiting.items():
            if waiting and num_running[is_evaluation] < self._concurrency:
                return waiting.popleft()
        return None

    def _on_end(self, key: int, report: Report) -> None:
        with self._lock:
            running = self._running.pop(key, None)
            if running is None:  # `end` was called in the meantime
                return
            if report.begins_again:
                one = running.assignment
                self._waiting[one.is_evaluation].appendleft(one)
        if report.begins_again:
            self._sessions.close(running.session)
        else:
            self._finish_episode(key, running, report)
        try:
            self._fill()
        except Exception as error:  # nobody else sees an error of this thread
            self._note(error)
        self._queue.wake()

    def _finish_episode(self, key: int, running: _Running, report: Report) -> None:
        session, limit = running.session, running.session.limit
        # Programs usually end with an error if a request is refused because of a limit. The policy
        # caused this, not the program.
        failure = None if limit is not None else report.failure
        seconds = self._clocks.of(running.assignment.is_evaluation).now() - running.began
        try:
            result = self._sessions.close(session, self._picker)
        except Exception as error:  # the user's picker may raise anything
            self._note(error if isinstance(error, UserError) else _picker_mistake(error))
        else:
            with self._lock:
                self._finished.append(Finished(key, result, report.reward, failure, limit, seconds))
        with self._lock:
            self._num_ended += 1
            self._num_failed += failure is not None

    def _note(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error

    def _write_status(self) -> None:
        if (now := time.monotonic()) < self._status_at:
            return
        self._status_at = now + STATUS_EVERY_S
        with self._lock:
            status = {
                "running": len(self._running),
                "waiting": sum(map(len, self._waiting.values())),
                "turns": self._queue.num_unfinished,
                "ended": self._num_ended,
                "failed": self._num_failed,
            }
        with suppress(OSError):  # a full disk must not end the run here
            self._status_file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._status_file, json.dumps(status) + "\n")


def _picker_mistake(error: Exception) -> UserError:
    return UserError(
        "agent.rows",
        f"a function that raised {type(error).__name__}: {error_text(error)}",
        "a function that returns some of the rows that it receives",
        "Correct the function.",
    )
