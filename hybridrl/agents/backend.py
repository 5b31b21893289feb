"""Hands turns of agents from the endpoint's thread to a rank's loop, and their completions back.
Does not import torch.

The endpoint's thread calls `submit` and `abort`, and waits for the future that `submit` returned.
The rank's loop calls `take` between engine steps, and `finish` with completions. Neither blocks the
other, so requests that arrive while the engine is asleep are answered after it wakes. Invariant:
every future is completed exactly once, by `finish`, `abort` or `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.prompts import Content
from hybridrl.rollout.engine import Completion


class TurnAborted(Exception):
    """The turn was aborted because no client waits for it, or because its session ended."""


class BackendClosed(Exception):
    """The engine generates no more turns; the text says why."""


@dataclass(frozen=True)
class TurnRequest:
    """A request to sample one turn of an agent.

    Args:
        sample_key: Number that `Sessions.open` received for the session.
        turn: Number of turns that the session requested earlier; with `sample_key`, it determines
            the seed.
        stop_token_ids: Tokens that end the turn, in addition to the run's end tokens.
        temperature, top_p: Values that replace those of the run, if the backend's terms allow it.
        contents: Images, at their places among `tokens`.
    """

    request_id: int
    session_id: str
    sample_key: int
    turn: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    blobs: Blobs = field(default_factory=dict, compare=False)
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True)
class SamplingTerms:
    """Sampling parameters of a run, and what a client may change.

    Args:
        max_context: Maximum number of tokens in a prompt and its completion.
        may_differ: Whether clients may choose another temperature and top_p. False in training,
            which needs samples of the run's own distribution.
        lowest_temperature: Lowest temperature that the engine supports, apart from 0.
    """

    temperature: float
    max_context: int
    top_p: float = 1.0
    top_k: int = 0
    may_differ: bool = False
    takes_stop_strings: bool = True
    lowest_temperature: float = 0.0
    max_stop_tokens: int | None = None


class TurnBackend(Protocol):
    """Samples turns. All members may be used from any thread."""

    @property
    def terms(self) -> SamplingTerms:
        """Sampling parameters, and what a client may change."""

    @property
    def is_asleep(self) -> bool:
        """Whether the engine is idle because the policy trains; requests wait until it wakes."""

    @property
    def num_unfinished(self) -> int:
        """Number of turns that were submitted and have no result yet."""

    def submit(self, request: TurnRequest) -> Future[Completion]:
        """Queues a turn. The future may raise TurnAborted or BackendClosed."""

    def abort(self, request_id: int) -> None:
        """Stops a turn; does nothing if it is finished or unknown."""


@dataclass(frozen=True)
class Arrivals:
    """Changes since the last `TurnQueue.take`; `aborted` are turns that it returned earlier."""

    requests: tuple[TurnRequest, ...] = ()
    aborted: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborted)


class TurnQueue:
    """Implements `TurnBackend` for a rank whose own loop steps the engine.

    Attributes:
        is_asleep: Set by the rank's loop while its engine cannot generate.
    """

    def __init__(self, terms: SamplingTerms) -> None:
        self.terms = terms
        self.is_asleep = False
        self._arrived = threading.Condition()
        self._futures: dict[int, Future[Completion]] = {}
        self._new: dict[int, TurnRequest] = {}
        self._aborted: list[int] = []
        self._closed: str | None = None
        self._is_woken = False

    @property
    def num_unfinished(self) -> int:
        with self._arrived:
            return len(self._futures)

    def submit(self, request: TurnRequest) -> Future[Completion]:
        future: Future[Completion] = Future()
        with self._arrived:
            if request.request_id in self._futures:
                raise ValueError(f"turn {request.request_id} is already submitted")
            if self._closed is not None:
                future.set_exception(BackendClosed(self._closed))
                return future
            future.set_running_or_notify_cancel()  # so that nobody can cancel it
            self._futures[request.request_id] = future
            self._new[request.request_id] = request
            self._arrived.notify_all()
        return future

    def abort(self, request_id: int) -> None:
        with self._arrived:
            future = self._futures.pop(request_id, None)
            if future is None:
                return
            if self._new.pop(request_id, None) is None:
                self._aborted.append(request_id)
                self._arrived.notify_all()
        future.set_exception(TurnAborted(f"turn {request_id} was aborted"))

    def take(self) -> Arrivals:
        with self._arrived:
            found = Arrivals(tuple(self._new.values()), tuple(self._aborted))
            self._new, self._aborted, self._is_woken = {}, [], False
        return found

    def wait(self, timeout_s: float) -> bool:
        """Waits for changes or `wake` since the last `take`; False after `timeout_s` without."""
        with self._arrived:
            return self._arrived.wait_for(
                lambda: bool(self._new or self._aborted or self._is_woken), timeout_s
            )

    def wake(self) -> None:
        """Ends the current or the next `wait`."""
        with self._arrived:
            self._is_woken = True
            self._arrived.notify_all()

    def finish(self, completions: Iterable[Completion]) -> None:
        """Completes the futures of finished turns. Ignores turns that were aborted."""
        for completion in completions:
            with self._arrived:
                future = self._futures.pop(completion.request_id, None)
            if future is not None:
                future.set_result(completion)

    def close(self, reason: str) -> None:
        """Fails all unfinished turns and all later ones with BackendClosed."""
        with self._arrived:
            self._closed = reason
            left = list(self._futures.values())
            self._futures, self._new, self._aborted = {}, {}, []
        for future in left:
            future.set_exception(BackendClosed(reason))
