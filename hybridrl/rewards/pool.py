"""Scores in processes that can be killed, or in threads that wait for I/O. No torch.

Each thread of a pool runs one job after another. The caller receives futures, and waits only for
the futures that it needs. A thread that uses a process enforces a wall-clock limit on each job. If
the process exceeds the limit or dies, it is killed together with all processes in its session. The
sample that the process was scoring receives a failure, and the next job starts a new process.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

from hybridrl.config.files import parse_json
from hybridrl.config.reward import ScorerConfig
from hybridrl.errors import UserError
from hybridrl.parallel import progress
from hybridrl.rewards.outcome import WHERE, Noted, Outcome, ScorerFailure, failed

START_S = 120.0
GRACE_S = 2.0  # additional time for the process to end late calls itself
SEPARATE_OUTPUT = "code that writes only to file descriptors that it opened"
LENGTH = struct.Struct("<Q")
MAX_BYTES = 64 << 20  # maximum size of the answer to one job


class Timed(Protocol):
    """A config section with a time limit per call."""

    @property
    def timeout_s(self) -> float:
        """Time limit of one call, in seconds."""


class NoAnswerError(Exception):
    """Raised if a scoring process wrote bytes that are not an answer."""


C = TypeVar("C", bound=Timed)
R = TypeVar("R")
Run = Callable[[Any], list[R]]
"""Function that takes a job, whose first part is a list, and returns one result per list entry."""


class Pool(Generic[R]):
    """Threads that score by `make()`. Each merges up to `max_jobs` jobs, which run concurrently."""

    def __init__(self, make: Callable[[], Run[R]], num: int, name: str, max_jobs: int = 1) -> None:
        self._make, self._num, self._name, self._max_jobs = make, num, name, max_jobs
        self._jobs: queue.SimpleQueue[tuple[Any, Future[list[R]]] | None]
        self._jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Any) -> Future[list[R]]:
        """Returns a future for the results. The future raises any UserError from users' code."""
        if len(self._threads) < self._num:
            # Threads are never ended early, because a process dies with the thread that started it
            # (PR_SET_PDEATHSIG).
            name = f"reward {self._name}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        future: Future[list[R]] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Ends the threads and their processes after the current jobs. Waits at most one second."""
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        self._threads = []

    def _work(self) -> None:
        run: Run[R] | None = None
        while (item := self._jobs.get()) is not None:
            taken = [
                (job, future)
                for job, future in (item, *self._waiting_jobs())
                if future.set_running_or_notify_cancel()
            ]
            if not taken:
                continue
            jobs, futures = zip(*taken, strict=True)
            try:
                run = run or self._make()
                found = iter(run(jobs[0] if len(jobs) == 1 else _merge_jobs(jobs)))
                results = [list(islice(found, len(job[0]))) for job in jobs]
            except BaseException as error:  # the future raises it in the caller
                for future in futures:
                    future.set_exception(error)
            else:
                for future, result in zip(futures, results, strict=True):
                    future.set_result(result)
                progress.advance()
        if isinstance(run, Worker):
            run.kill()

    def _waiting_jobs(self) -> Iterator[tuple[Any, Future[list[R]]]]:
        for _ in range(self._max_jobs - 1):
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            if item is None:  # the end marker, which this thread must read again later
                self._jobs.put(None)
                return
            yield item


class Worker(Generic[C, R]):
    """A process that runs users' code, which subclasses choose. It starts when first needed."""

    module: str  # module that the process runs
    key: str  # configuration key shown if the process fails to start

    def __init__(self, config: C) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._num_jobs = 0  # jobs sent to this process; each answer contains its job's number

    def decoded(self, entry: dict[str, Any]) -> R:
        raise NotImplementedError

    def allowed_s(self, job: Any) -> float:
        return self._config.timeout_s

    def __call__(self, job: Any) -> list[R | ScorerFailure]:
        """Returns one result per entry, or failures if the process was killed or died."""
        if self._process is None:
            self._start()
        try:
            return self._ask(job)
        except TimeoutError:
            failure = ScorerFailure(f"took longer than {self._config.timeout_s:g} s for {WHERE}")
        except NoAnswerError:
            failure = ScorerFailure(f"wrote to the pipe for answers on {WHERE}", SEPARATE_OUTPUT)
        except (OSError, EOFError):
            failure = ScorerFailure(f"{self.kill()} on {WHERE}")
        self.kill()
        return [failure] * len(job[0])

    def kill(self) -> str:
        process, self._process = self._process, None
        if process is None:
            return "it had ended"
        try:
            process.wait(timeout=0.2)  # if the process has died, read its exit code first
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return f"died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

    def _start(self) -> None:
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._num_jobs = 0
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            self._send(self._config, time.monotonic() + START_S)
            self._receive(0, time.monotonic() + START_S)
        except (OSError, EOFError, TimeoutError, NoAnswerError) as error:
            ended = self.kill()
            raise UserError(
                self.key,
                "code whose process does not start",
                f"code whose process starts within {START_S:g} s",
                f"It {ended} ({type(error).__name__}). Read the lines above.",
            ) from error

    def _ask(self, job: Any) -> list[R | ScorerFailure]:
        deadline = time.monotonic() + self.allowed_s(job)
        self._num_jobs += 1
        self._send((self._num_jobs, (*job,)), deadline)
        return self._receive(len(job[0]), deadline)

    def _send(self, value: object, deadline: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        data = memoryview(framed(pickle.dumps(value)))
        file = self._process.stdin.fileno()
        while data:
            _wait(file, select.POLLOUT, deadline)
            data = data[os.write(file, data) :]

    def _receive(self, num: int, deadline: float) -> list[R | ScorerFailure]:
        """Reads and checks `num` results, because users' code can write to the same pipe."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if size > MAX_BYTES:
            raise NoAnswerError
        try:
            answer = parse_json(bytes(self._read(size, deadline)), allows_half_pairs=True)
            number = answer["job"]
            if "user_error" in answer:
                name, value, allowed, remedy = map(str, answer["user_error"])
                mistake = UserError(name, value, allowed, remedy)
            else:
                entries = answer["outcomes"]
                found = [
                    failed(entry) if "got" in entry else self.decoded(entry) for entry in entries
                ]
                mistake = None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise NoAnswerError from error
        if number != self._num_jobs:  # otherwise later answers would reach the wrong samples
            raise NoAnswerError
        if mistake is not None:
            raise mistake
        if len(found) != num:
            raise NoAnswerError
        return found

    def _read(self, size: int, deadline: float) -> bytearray:
        assert self._process is not None and self._process.stdout is not None
        file, data = self._process.stdout.fileno(), bytearray()
        while len(data) < size:
            _wait(file, select.POLLIN, deadline)
            part = os.read(file, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


class Scoring(Worker[ScorerConfig, Outcome]):
    """A process that calls one reward function."""

    module, key = "hybridrl.rewards.worker", "reward.function"

    def allowed_s(self, job: Any) -> float:
        """Returns a job's time limit, which the process enforces unless a call blocks it."""
        return self._config.timeout_s + GRACE_S * (len(job[0]) > 1)

    def decoded(self, entry: dict[str, Any]) -> Outcome:
        if not math.isfinite(value := float(entry["value"])):
            raise ValueError(value)
        return Noted(value, str(entry["note"])) if "note" in entry else value


def _merge_jobs(jobs: Sequence[Any]) -> Any:
    return tuple([*chain.from_iterable(parts)] for parts in zip(*jobs, strict=True))


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def encoded(outcome: Outcome) -> dict[str, object]:
    """Encodes an outcome as JSON for `Scoring`; processes must not exchange Python objects."""
    if isinstance(outcome, ScorerFailure):
        return outcome.as_json()
    note = {"note": outcome.note} if isinstance(outcome, Noted) else {}
    return {"value": float(outcome), **note}


def _wait(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError
