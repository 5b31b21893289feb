"""Scoring beside the calling thread: in processes that can be killed, or in threads that wait.

Each of a pool's threads takes one job after the other; the caller gets futures and waits for whom
it needs. A thread with a process gives it a wall-clock limit a job: one that is over it, or dies,
is killed with all that it started in its session, its sample gets a failure, and the next job a new
process. No torch.
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
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

from hybridrl.config.files import parse_json
from hybridrl.config.reward import ScorerConfig
from hybridrl.errors import UserError
from hybridrl.parallel import progress
from hybridrl.rewards.outcome import WHERE, Noted, Outcome, ScorerFailure, failed

START_S = 120.0
GRACE_S = 2.0  # for a process to end calls that are late
APART = "code that writes to no file descriptor that it did not open"
LENGTH = struct.Struct("<Q")
MOST_BYTES = 64 << 20  # of the answer to one job


class Timed(Protocol):
    """A section of the configuration whose calls have a limit."""

    @property
    def timeout_s(self) -> float:
        """Of one call."""
        ...


class NoAnswerError(Exception):
    """A process wrote something else where it answers."""


C = TypeVar("C", bound=Timed)
R = TypeVar("R")
Run = Callable[[Any], list[R]]
"""Takes a job, whose first part is a list, and returns a result for each of its entries."""


class Pool(Generic[R]):
    """Threads that score.

    Args:
        make: makes what one thread scores with, there.
        num: of threads.
        name: of the scorer.
        most: jobs that a thread hands over together where so many wait, whose calls then wait
            beside each other.
    """

    def __init__(self, make: Callable[[], Run[R]], num: int, name: str, most: int = 1) -> None:
        self._make, self._num, self._name, self._most = make, num, name, most
        self._jobs: queue.SimpleQueue[tuple[Any, Future[list[R]]] | None]
        self._jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Any) -> Future[list[R]]:
        """Returns the results to come; a UserError of the users' code is raised from the future."""
        if len(self._threads) < self._num:
            # The threads stay: a process ends with the thread that started it (PR_SET_PDEATHSIG).
            name = f"reward {self._name}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        future: Future[list[R]] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Ends the threads after the jobs they are at, and their processes with them; waits a
        second for it.
        """
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
                for job, future in (item, *self._more())
                if future.set_running_or_notify_cancel()
            ]
            if not taken:
                continue
            jobs, futures = zip(*taken, strict=True)
            try:
                run = run or self._make()
                found = iter(run(jobs[0] if len(jobs) == 1 else _joined(jobs)))
                results = [list(islice(found, len(job[0]))) for job in jobs]
            except BaseException as error:  # goes to whom waits for the future
                for future in futures:
                    future.set_exception(error)
            else:
                for future, result in zip(futures, results, strict=True):
                    future.set_result(result)
                progress.advance()
        if isinstance(run, Worker):
            run.kill()

    def _more(self) -> Iterator[tuple[Any, Future[list[R]]]]:
        """Yields the jobs that wait already, so many that there are `most` with the one before."""
        for _ in range(self._most - 1):
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            if item is None:  # the end, which this thread has to read again
                self._jobs.put(None)
                return
            yield item


class Worker(Generic[C, R]):
    """A process that runs users' code, started when first needed; a subclass says which.

    Args:
        config: names the code.
    """

    module: str  # what Python runs
    key: str  # what to name when it does not start

    def __init__(self, config: C) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._num_jobs = 0  # of the process, which says to which of them it answers

    def decoded(self, entry: dict[str, Any]) -> R:
        """Returns what the process said of one entry."""
        raise NotImplementedError

    def allowed_s(self, job: Any) -> float:
        """Returns how long the process may take for a job."""
        return self._config.timeout_s

    def __call__(self, job: Any) -> list[R | ScorerFailure]:
        """Returns what the code made of the entries, or for each that it was killed or died."""
        if self._process is None:
            self._start()
        try:
            return self._ask(job)
        except TimeoutError:
            failure = ScorerFailure(f"took longer than {self._config.timeout_s:g} s for {WHERE}")
        except NoAnswerError:
            failure = ScorerFailure(f"wrote what is no answer into its answers on {WHERE}", APART)
        except (OSError, EOFError):
            failure = ScorerFailure(f"{self.kill()} on {WHERE}")
        self.kill()
        return [failure] * len(job[0])

    def kill(self) -> str:
        """Ends the process and its session; returns how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "it had ended"
        try:
            process.wait(timeout=0.2)  # what died says by itself how
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_session(process.pid)
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
                "what does not start",
                f"code whose process starts within {START_S:g} s",
                f"It {ended} ({type(error).__name__}). Look at the lines before this.",
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
        """Returns an answer of `num` results; users' code can write there too, and anything."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if size > MOST_BYTES:
            raise NoAnswerError
        try:
            answer = parse_json(bytes(self._read(size, deadline)), allows_half_pairs=True)
            number = answer["job"]
            if "user_error" in answer:
                name, value, allowed, remedy = map(str, answer["user_error"])
                mistake = UserError(name, value, allowed, remedy)
            else:
                told = answer["outcomes"]
                found = [failed(one) if "got" in one else self.decoded(one) for one in told]
                mistake = None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise NoAnswerError from error
        if number != self._num_jobs:  # or each answer that follows went to the sample before
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
        """Returns the limit of a call. Calls of an async function, which wait beside each other,
        are ended by their own process; one that holds up the others, by the death of that.
        """
        return self._config.timeout_s + GRACE_S * (len(job[0]) > 1)

    def decoded(self, entry: dict[str, Any]) -> Outcome:
        """Returns a score with its note."""
        if not math.isfinite(value := float(entry["value"])):
            raise ValueError(value)
        return Noted(value, str(entry["note"])) if "note" in entry else value


def _joined(jobs: Sequence[Any]) -> Any:
    """Returns one job with the entries of several."""
    return tuple([*chain.from_iterable(parts)] for parts in zip(*jobs, strict=True))


def framed(data: bytes) -> bytes:
    """Returns the data with its length before it."""
    return LENGTH.pack(len(data)) + data


def encoded(outcome: Outcome) -> dict[str, object]:
    """Returns an outcome as JSON, which `Scoring` reads: a process sends back no objects."""
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


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
