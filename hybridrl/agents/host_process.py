"""Runs the host of agents in a process of its own, so that requests of agents do not take time from
the loop that steps the engine. Does not import torch.

In one process, both would share Python's interpreter lock: a turn takes about 1 ms of Python in the
endpoint, and an engine step would wait for it.

Who waits for whom: the rank's loop sends calls without waiting for them, and receives turns and
results in `take`. Only `versions`, the start and `close` wait for the process. The process always
reads calls, also while it sends, so neither side can block the other. It ends when the rank closes
the connection or dies.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from hybridrl.agents.backend import Arrivals, TurnRequest
from hybridrl.agents.host import AgentHost, Assignment, Finished
from hybridrl.agents.host_settings import HostSettings, make_host
from hybridrl.errors import UserError, error_text, failure_text
from hybridrl.rollout.engine import Completion

CLOSE_S = 30.0  # how long `close` waits for programs that end slowly
REPORT_S = 1.0  # maximum time between two checks whether the rank is alive
SWITCH_S = 0.0005  # time after which a thread of the process lets another thread run


class CannotMove(Exception):
    """The host cannot run in another process; the text says why."""


@dataclass(frozen=True)
class _Call:
    """A call of a method of the host."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Started:
    """The process listens, or could not start.

    Args:
        notes: Notes of `make_host`.
        error: Error of `make_host`.
        obstacle: Why the settings could not be read.
    """

    notes: tuple[str, ...] = ()
    error: Exception | None = None
    obstacle: str | None = None


@dataclass(frozen=True)
class _Events:
    """Events since the last message; see `AgentHost.take` and `AgentHost.take_finished`."""

    arrivals: Arrivals = Arrivals()
    finished: tuple[Finished, ...] = ()
    error: Exception | None = None


class HostProcess:
    """Implements the interface of `AgentHost` for a host in another process.

    Args:
        settings: Settings of the host.

    Attributes:
        notes: Notes of `make_host`.

    Raises:
        CannotMove: The settings, such as the tokenizer, cannot be sent to another process.
        UserError: See `make_host`.
    """

    def __init__(self, settings: HostSettings) -> None:
        try:
            content = pickle.dumps(settings)
        except Exception as error:  # a user's tokenizer may raise anything
            raise CannotMove(error_text(error)) from error
        self._link, theirs = Pipe()
        with theirs:
            self._process = _spawn(theirs.fileno())
        self._arrived: list[TurnRequest] = []
        self._aborted: list[int] = []
        self._finished: list[Finished] = []
        self._error: Exception | None = None
        self._link.send_bytes(content)
        started = self._received()
        if started.obstacle is not None or started.error is not None:
            self.close()
            raise started.error or CannotMove(started.obstacle)
        self.notes = started.notes

    @property
    def process_id(self) -> int:
        """Number of the process."""
        return self._process.pid

    def begin(self, assignment: Assignment) -> None:
        """See `AgentHost.begin`. Values of columns that are not JSON become texts."""
        columns = json.loads(json.dumps(dict(assignment.columns), default=str))
        self._call("begin", replace(assignment, columns=columns))

    def end(self, key: int) -> None:
        """See `AgentHost.end`."""
        self._finished = [one for one in self._finished if one.key != key]
        self._call("end", key)

    def take(self) -> Arrivals:
        """See `AgentHost.take`."""
        while self._link.poll():
            self._note(self._received())
        arrivals = Arrivals(tuple(self._arrived), tuple(self._aborted))
        self._arrived, self._aborted = [], []
        return arrivals

    def take_finished(self) -> list[Finished]:
        """Returns the episodes that ended before the last `take`; see `AgentHost.take_finished`."""
        found, self._finished = self._finished, []
        if self._error is not None:
            raise self._error
        return found

    def finish(self, completions: Sequence[Completion]) -> None:
        """See `AgentHost.finish`."""
        self._call("finish", tuple(completions))

    def abort(self, request_id: int) -> None:
        """See `AgentHost.abort`."""
        self._call("abort", request_id)

    def wait(self, timeout_s: float) -> None:
        """See `AgentHost.wait`."""
        if not (self._arrived or self._aborted or self._finished or self._error):
            self._link.poll(timeout_s)

    def sleep(self) -> None:
        """See `AgentHost.sleep`."""
        self._call("sleep")

    def wake(self, is_evaluation: bool) -> None:
        """See `AgentHost.wake`."""
        self._call("wake", is_evaluation)

    def versions(self, keys: Collection[int]) -> dict[int, Counter[int]]:
        """See `AgentHost.versions`."""
        self._call("versions", tuple(keys))
        while isinstance(found := self._received(), _Events):
            self._note(found)
        versions: dict[int, Counter[int]] = found
        return versions

    def close(self) -> None:
        """Ends all programs, the endpoint and the process."""
        self._link.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _note(self, events: _Events) -> None:
        self._arrived += events.arrivals.requests
        # A turn that is stopped before the engine received it never reaches the engine.
        unseen = {one.request_id for one in self._arrived} & {*events.arrivals.aborted}
        self._arrived = [one for one in self._arrived if one.request_id not in unseen]
        self._aborted += [number for number in events.arrivals.aborted if number not in unseen]
        self._finished += events.finished
        self._error = self._error or events.error

    def _call(self, name: str, *arguments: Any) -> None:
        with self._known_end():
            self._link.send(_Call(name, arguments))

    def _received(self) -> Any:
        with self._known_end():
            return self._link.recv()

    @contextmanager
    def _known_end(self) -> Iterator[None]:
        """Context manager that says how the process ended if the connection is broken."""
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            code = self._process.poll()
            how = "closed its connection" if code is None else f"ended with exit code {code}"
            raise RuntimeError(
                f"the process that runs agents {how}; its output is in the log of this rank"
            ) from error


def main(file: int, parent: int) -> None:
    """Runs a host until its rank closes the connection.

    Args:
        file: File descriptor of this side of the connection.
        parent: Number of the rank's process.
    """
    # These signals reach all processes of a job; the rank decides when this one ends. Programs
    # would inherit SIG_IGN, but do not inherit a handler.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _no_action)
    sys.setswitchinterval(SWITCH_S)
    with Connection(file) as link:
        try:
            settings = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        except Exception as error:  # a user's tokenizer may raise anything
            link.send(_Started(obstacle=error_text(error)))
            return
        try:
            host, notes = make_host(settings)
        except Exception as error:  # the rank raises it
            link.send(_Started(error=_sendable(error)))
            return
        link.send(_Started(tuple(notes)))
        _serve(host, link, parent)


def _serve(host: AgentHost, link: Connection, parent: int) -> None:
    """Makes the calls that arrive, while another thread sends events."""
    sending, ended = threading.Lock(), threading.Event()

    def send(message: Any) -> None:
        with sending, suppress(OSError):  # the rank closed the connection
            link.send(message)

    def report() -> None:
        has_failed = False
        while not ended.is_set():
            host.wait(REPORT_S)
            arrivals, finished, error = host.take(), list[Finished](), None
            try:
                finished = [] if has_failed else host.take_finished()
            except Exception as raised:  # the rank raises it
                error, has_failed = _sendable(raised), True
            if arrivals or finished or error:
                send(_Events(arrivals, tuple(finished), error))
            if os.getppid() != parent:
                # The rank has died, and another process has a copy of its side of the connection.
                host.close()
                os._exit(1)

    reporter = threading.Thread(target=report, name="agents-events", daemon=True)
    reporter.start()
    try:
        while True:
            call: _Call = link.recv()
            try:
                found = getattr(host, call.name)(*call.arguments)
            except Exception as error:  # the rank raises it
                send(_Events(error=_sendable(error)))
                continue
            if call.name == "versions":
                send(found)
    except (EOFError, OSError):  # the rank closed the connection
        pass
    finally:
        ended.set()
        host.close()


def _spawn(file: int) -> subprocess.Popen[bytes]:
    """Starts a process with this process's modules, which inherits a file descriptor."""
    paths = [path or os.getcwd() for path in sys.path]
    program = (
        f"import sys; sys.path[:] = {paths!r}; "
        f"from {__name__} import main; main({file}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=2,  # a command's standard output may be one JSON object
        pass_fds=[file],
        start_new_session=True,
    )


def _no_action(number: int, frame: object) -> None:
    """Does nothing on a signal."""


def _sendable(error: Exception) -> Exception:
    """Returns an error for another process. Other errors than UserErrors may not be picklable."""
    if isinstance(error, UserError):
        return error
    return RuntimeError(f"the host of agents {failure_text(error)}: {error_text(error)}")
