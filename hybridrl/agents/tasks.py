"""Task of an agent, and the interface of runners, which start agents. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # worker processes may lack numpy, which this module imports
    from hybridrl.contracts.prompts import Asked

TOKEN_VARIABLE = "HYBRIDRL_TASK_TOKEN"
# A log that grows beyond this size keeps its beginning, and what is written later.
MAX_LOG_BYTES, KEPT_LOG_BYTES = 16 << 20, 1 << 20


def take_token() -> str | None:
    """Removes the token for tasks from the environment, so that no user's code inherits it."""
    return os.environ.pop(TOKEN_VARIABLE, None) or None


def shorten_log(file: int) -> None:
    """Cuts a log, opened for appending, that is too long, so that it does not fill the disk."""
    with suppress(OSError):  # a log must never fail an episode
        if os.fstat(file).st_size > MAX_LOG_BYTES:
            os.ftruncate(file, KEPT_LOG_BYTES)


@dataclass(frozen=True)
class AgentTask:
    """Task of one agent.

    Args:
        step: Number of the step that began the episode; negative in an evaluation.
        prompt: Prompt of the data row: a text, or chat messages.
        base_url: Address of the endpoint, without the part `/v1`.
    """

    key: int
    step: int
    sample: int
    prompt: Asked
    columns: Mapping[str, Any]
    base_url: str
    api_key: str = field(repr=False)
    model: str

    @property
    def is_evaluation(self) -> bool:
        return self.step < 0

    @property
    def row(self) -> dict[str, Any]:
        """Content of the file that HYBRIDRL_TASK names; it does not contain the secret."""
        return {
            "prompt": self.prompt,
            "columns": dict(self.columns),
            "sample": self.sample,
            "step": self.step,
            "is_evaluation": self.is_evaluation,
        }

    def client(self, **options: Any) -> Any:
        """Returns an `openai.AsyncOpenAI` without a time limit; shared, so do not close it."""
        from openai import AsyncOpenAI

        options = {"timeout": None, "http_client": _connections(), **options}
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.api_key, **options)


@cache
def _connections() -> Any:
    """Returns the connections of this process; creating them takes 30 ms, mostly for TLS."""
    from openai import DefaultAsyncHttpxClient

    return DefaultAsyncHttpxClient(timeout=None)


@dataclass(frozen=True)
class Report:
    """How an agent ended.

    Args:
        failure: What went wrong, as a verb phrase, and what is allowed; None if nothing went wrong.
        begins_again: Whether the episode begins again, without the turns so far, because the
            program that played it was lost.
    """

    reward: float | None = None
    failure: tuple[str, str] | None = None
    begins_again: bool = False


class Runner(Protocol):
    """Runs agents, maybe on other hosts. All members may be called from any thread."""

    def start(self, task: AgentTask, done: Callable[[Report], None]) -> None:
        """Starts an agent without waiting. Calls `done` once at its end, unless it was stopped."""

    def stop(self, key: int) -> None:
        """Ends an agent whose result is not needed; does nothing if it is not running."""

    def close(self) -> None:
        """Ends all agents."""


class AwakeClock:
    """Measures time without the periods in which the engine sleeps."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._slept_s = 0.0
        self._since: float | None = None

    def sleep(self) -> None:
        with self._lock:
            if self._since is None:
                self._since = monotonic()

    def wake(self) -> None:
        with self._lock:
            if self._since is not None:
                self._slept_s += monotonic() - self._since
                self._since = None

    def now(self) -> float:
        """Returns the time in seconds since some fixed moment."""
        with self._lock:
            now = monotonic() if self._since is None else self._since
            return now - self._slept_s


class AgentClocks:
    """Clocks of training and of evaluations: agents of training wait during an evaluation."""

    def __init__(self) -> None:
        self._training, self._evaluation = AwakeClock(), AwakeClock()

    def of(self, is_evaluation: bool) -> AwakeClock:
        return self._evaluation if is_evaluation else self._training

    def sleep(self) -> None:
        """Begins a period that does not count for any agent."""
        self._training.sleep()
        self._evaluation.sleep()

    def wake(self, is_evaluation: bool) -> None:
        """Ends the period that does not count for agents of an evaluation or of training."""
        self.of(not is_evaluation).sleep()
        self.of(is_evaluation).wake()
