"""Runs agents as calls of a user's async function in worker processes. Does not import torch.

`start` queues a task for a worker and returns. One thread per process writes the queued tasks;
another reads the reports and ends calls that are late. A worker process that does not end a late
call, or that dies, is killed with all its calls, and the next task starts a new process. It sees
only the environment variables of command.py, and in another Python environment none of this one's
packages except hybridrl.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hybridrl.agents.command import (
    GRACE_S,
    POLL_S,
    EpisodeLogs,
    checked_report,
    scrubbed_environment,
)
from hybridrl.agents.own_environment import MODULE, OwnEnvironment
from hybridrl.agents.tasks import AgentClocks, AgentTask, Report
from hybridrl.config.files import parse_json
from hybridrl.rewards.outcome import WHERE

MAX_LINE_BYTES = 1 << 20
FUNCTION = "an async function that returns a reward or None"

Lines = SimpleQueue[bytes | None]  # lines for the standard input of a process; None is the end


@dataclass
class _Call:
    task: AgentTask
    done: Callable[[Report], None]
    deadline: float
    log: Path | None
    is_cancelled: bool = False

    @property
    def where(self) -> str:
        return WHERE if self.log is None else f"{WHERE} (output: {self.log})"


class FunctionRunner:
    """Calls a function for each episode.

    Args:
        python: Interpreter of the environment in which the function runs; None for this one.
        timeout_s: Time limit of one episode, in seconds of `clocks`, which stand still while agents
            cannot get answers.
    """

    def __init__(
        self,
        *,
        path: str,
        python: str | None = None,
        options: Mapping[str, Any],
        workers: int,
        timeout_s: float,
        clocks: AgentClocks,
        logs: EpisodeLogs,
    ) -> None:
        self._environment = None if python is None else OwnEnvironment(python)
        make = _Worker(path, self._environment, dict(options), timeout_s, clocks, logs)
        self._workers = [make.another() for _ in range(workers)]
        self._lock = threading.Lock()
        self._worker_of: dict[int, _Worker] = {}  # by key of a running call

    def start(self, task: AgentTask, done: Callable[[Report], None]) -> None:
        def ended(report: Report) -> None:
            with self._lock:
                self._worker_of.pop(task.key, None)
            done(report)

        with self._lock:
            num_calls = Counter(self._worker_of.values())
            worker = min(self._workers, key=lambda one: num_calls[one])
            self._worker_of[task.key] = worker
        worker.start(task, ended)

    def stop(self, key: int) -> None:
        with self._lock:
            worker = self._worker_of.pop(key, None)
        if worker is not None:
            worker.stop(key)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        if self._environment is not None:
            self._environment.close()


class _Worker:
    def __init__(
        self,
        path: str,
        environment: OwnEnvironment | None,
        options: dict[str, Any],
        timeout_s: float,
        clocks: AgentClocks,
        logs: EpisodeLogs,
    ) -> None:
        self._given = path, environment, options, timeout_s, clocks, logs
        self._environment = environment
        self._path, self._options, self._timeout_s = path, options, timeout_s
        self._clocks, self._logs = clocks, logs
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: Lines | None = None  # None while no process is needed
        self._calls: dict[int, _Call] = {}

    def another(self) -> _Worker:
        return _Worker(*self._given)

    def start(self, task: AgentTask, done: Callable[[Report], None]) -> None:
        log = self._logs.file(task)
        line = _line({"task": asdict(task), "log": None if log is None else str(log)})
        deadline = self._clocks.of(task.is_evaluation).now() + self._timeout_s
        with self._lock:
            self._calls[task.key] = _Call(task, done, deadline, log)
            if self._lines is None:
                self._lines = self._begin()
            self._lines.put(line)

    def stop(self, key: int) -> None:
        with self._lock:
            if self._calls.pop(key, None) is not None and self._lines is not None:
                self._lines.put(_line({"cancel": key}))

    def close(self) -> None:
        with self._lock:
            self._calls = {}
            process = self._process
        if process is not None:
            _kill(process)

    def _begin(self) -> Lines:
        """Starts a process. Returns its queue, which holds the options of the function."""
        lines: Lines = SimpleQueue()
        lines.put(_line(self._options))
        is_started = threading.Event()
        # The kernel kills the process when the thread that started it ends. The reading thread
        # therefore starts it; the calling thread may end earlier.
        thread = threading.Thread(
            target=self._serve, args=[lines, is_started], name="agent function", daemon=True
        )
        thread.start()
        is_started.wait()
        return lines

    def _serve(self, lines: Lines, is_started: threading.Event) -> None:
        process, is_late, ended = None, False, "could not be started"
        try:
            process = self._process = self._spawn()
            is_started.set()
            threading.Thread(target=_write, args=[process, lines], daemon=True).start()
            is_late = self._read(process)
        except OSError as error:
            ended = f"could not be started ({error})"
        finally:
            is_started.set()
            if process is not None:
                ended = _kill(process)
            lines.put(None)
            with self._lock:
                self._process = self._lines = None
                calls, self._calls = list(self._calls.values()), {}
            for call in calls:
                if is_late and call.is_cancelled:
                    call.done(self._late(call))
                else:
                    call.done(Report(failure=(f"{ended} on {call.where}", FUNCTION)))

    def _spawn(self) -> subprocess.Popen[bytes]:
        if (own := self._environment) is not None:
            python, variables = own.python, own.variables()
        else:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            python = sys.executable
            variables = {"PYTHONPATH": paths, "HOME": os.environ.get("HOME", "/")}
        return subprocess.Popen(
            [python, "-m", MODULE, self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=scrubbed_environment(variables),
            start_new_session=True,
        )

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Reads reports until the process ends or a late call ignores its cancellation (True)."""
        assert process.stdout is not None
        file, rest = process.stdout.fileno(), b""
        while True:
            if select.select([file], [], [], POLL_S)[0]:
                if not (part := os.read(file, 1 << 16)):
                    return False
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    return False
                for line in lines:
                    self._take(line)
            if self._cancel_late():
                return True

    def _take(self, line: bytes) -> None:
        try:
            found = parse_json(line)
            key, reward, error = found["key"], found["reward"], found["error"]
        except (ValueError, LookupError, TypeError):
            return  # the user's code wrote to the pipe
        with self._lock:
            call = self._calls.pop(key, None)
        if call is None:
            return
        if call.is_cancelled:
            call.done(self._late(call))
        elif error is not None:
            call.done(Report(failure=(f"raised {error} for {call.where}", FUNCTION)))
        else:
            call.done(checked_report(reward))

    def _late(self, call: _Call) -> Report:
        got = f"took longer than {self._timeout_s:g} s for {call.where}"
        return Report(failure=(got, "at most agent.timeout_s"))

    def _cancel_late(self) -> bool:
        """Cancels late calls. Returns whether one did not end when it was cancelled."""
        with self._lock:
            for key, call in self._calls.items():
                if self._late_s(call) >= 0 and not call.is_cancelled and self._lines is not None:
                    call.is_cancelled = True
                    self._lines.put(_line({"cancel": key}))
            calls = self._calls.values()
            return any(one.is_cancelled and self._late_s(one) >= GRACE_S for one in calls)

    def _late_s(self, call: _Call) -> float:
        """Returns the seconds since the time limit of a call; negative before it."""
        return self._clocks.of(call.task.is_evaluation).now() - call.deadline


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


def _write(process: subprocess.Popen[bytes], lines: Lines) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as file:
        while (line := lines.get()) is not None:
            file.write(line)
            file.flush()


def _kill(process: subprocess.Popen[bytes]) -> str:
    """Kills a process and its group. Returns how it ended, as a verb phrase."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)  # if it had died before, its exit code says why
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return f"died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
