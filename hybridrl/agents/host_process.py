"""Runs the host of agents in a separate process, because a turn takes about 1 ms of Python in the
endpoint, for which an engine step in the same process would wait. Does not import torch.

The rank's loop sends calls without waiting for them, and receives turns and results in `take`. Only
`versions`, the start and `close` wait for the process. There, the main thread only reads calls, and
another thread sends everything, so neither side can block the other. The process ends when the rank
closes the connection or dies.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter, deque
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
from hybridrl.parallel.stop_signals import leave_stop_signals_to_the_rank
from hybridrl.rollout.engine import Completion

CLOSE_S = 30.0  # how long `close` waits for programs that end slowly
START_S = 300.0  # how long the process may take to import its modules, and then to start the host
REPORT_S = (
    1.0  # how long a thread waits for events before it checks whether the other side is alive
)
SEE_LOG = "its output is in the log of this rank"
SWITCH_S = 0.0005  # time after which a thread of the process lets another thread run


def wait_for(connections: Sequence[Connection], timeout_s: float = 0.0) -> bool:
    """Waits until there is a message in one of several connections, or until one is closed.

    Takes a few microseconds without a wait; `Connection.poll` takes ten times as long, and the rank
    calls this function in each engine step.
    """
    poller = select.poll()
    for connection in connections:
        poller.register(connection, select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


class CannotMove(Exception):
    """The host cannot run in another process; the text says why."""


@dataclass(frozen=True)
class _Call:
    """A call of the host's method; with a number if the rank waits for its answer."""

    name: str
    arguments: tuple[Any, ...] = ()
    number: int | None = None


@dataclass(frozen=True)
class _Answer:
    number: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Started:
    """First message after the settings; `obstacle` says why the tokenizer could not be read."""

    notes: tuple[str, ...] = ()
    error: Exception | None = None
    obstacle: str | None = None


@dataclass(frozen=True)
class _Events:
    """Events since the last message; see `AgentHost.take` and `AgentHost.take_finished`."""

    arrivals: Arrivals = Arrivals()
    finished: tuple[Finished, ...] = ()
    error: Exception | None = None


class _Link:
    """The rank's side of the connection. Threads may share it.

    If a transfer fails or is interrupted, a part of a message may be left in the connection. All
    later transfers therefore raise RuntimeError.
    """

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self.connection, self._process = connection, process
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._fault: str | None = None

    def send(self, message: Any) -> None:
        content = pickle.dumps(message)
        with self._sending, self._transfer():
            self.connection.send_bytes(content)

    def receive(self) -> Any:
        with self._receiving, self._transfer():
            content = self.connection.recv_bytes()
        return pickle.loads(content)

    def poll(self, timeout_s: float = 0.0) -> bool:
        return self._fault is not None or wait_for([self.connection], timeout_s)

    @property
    def is_broken(self) -> bool:
        return self._fault is not None

    def close(self) -> None:
        """Closes the connection, even for processes that inherited a copy of it."""
        self._fault = self._fault or "the connection to the process that runs agents is closed"
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(self.connection.fileno()))
            with copy:
                copy.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        if self._fault is not None:
            raise RuntimeError(self._fault)
        try:
            yield
        except (EOFError, OSError) as error:
            self._fault = self._end_of_process()
            raise RuntimeError(self._fault) from error
        except BaseException:
            self._fault = "the connection to the process that runs agents was interrupted"
            raise

    def _end_of_process(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        return f"the process that runs agents {how}; {SEE_LOG}"


class HostProcess:
    """Implements the interface of `AgentHost` for a host in another process. Threads may share it.

    Attributes:
        notes: Notes of `make_host`.

    Raises:
        CannotMove: The tokenizer cannot be sent to another process.
        UserError: See `make_host`.
        RuntimeError: The process ended, or did not start in time.
    """

    def __init__(self, settings: HostSettings) -> None:
        try:
            tokenizer = pickle.dumps(settings.tokenizer)
        except Exception as error:  # a user's tokenizer may raise anything
            raise CannotMove(error_text(error)) from error
        ours, theirs = Pipe()
        with theirs:
            self._process = _spawn(theirs.fileno())
        self._link = _Link(ours, self._process)
        self._received = threading.RLock()  # guards the following attributes
        self._arrived: list[TurnRequest] = []
        self._aborted: list[int] = []
        self._finished: list[Finished] = []
        self._error: Exception | None = None
        self._answers: dict[int, _Answer] = {}
        self._numbers = itertools.count()
        try:
            self.notes = self._start((replace(settings, tokenizer=None), tokenizer))
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def connection(self) -> Connection:
        """Connection that becomes readable when the process sends something or ends."""
        return self._link.connection

    @property
    def has_news(self) -> bool:
        """Whether events were received that nobody took, or the connection is broken."""
        received = self._arrived or self._aborted or self._finished or self._error
        return bool(received) or self._link.is_broken

    def begin(self, assignment: Assignment) -> None:
        """See `AgentHost.begin`. Values of columns that are not JSON become texts."""
        columns = json.loads(json.dumps(dict(assignment.columns), default=str))
        self._call("begin", replace(assignment, columns=columns))

    def end(self, key: int) -> None:
        with self._received:
            self._finished = [one for one in self._finished if one.key != key]
        self._call("end", key)

    def take(self) -> Arrivals:
        with self._received:
            while self._link.poll():
                self._note(self._link.receive())
            arrivals = Arrivals(tuple(self._arrived), tuple(self._aborted))
            self._arrived, self._aborted = [], []
        return arrivals

    def take_finished(self) -> list[Finished]:
        """Returns the episodes that ended before the last `take`; see `AgentHost.take_finished`."""
        with self._received:
            found, self._finished = self._finished, []
        if self._error is not None:
            raise self._error
        return found

    def finish(self, completions: Sequence[Completion]) -> None:
        self._call("finish", tuple(completions))

    def abort(self, request_id: int) -> None:
        self._call("abort", request_id)

    def wait(self, timeout_s: float) -> None:
        if not self.has_news:
            self._link.poll(timeout_s)

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self, is_evaluation: bool) -> None:
        self._call("wake", is_evaluation)

    def versions(self, keys: Collection[int]) -> dict[int, Counter[int]]:
        number = next(self._numbers)
        self._link.send(_Call("versions", (tuple(keys),), number))
        while True:
            with self._received:
                if (answer := self._answers.pop(number, None)) is not None:
                    break
                if self._link.poll(REPORT_S):
                    self._note(self._link.receive())
        if answer.error is not None:
            raise answer.error
        versions: dict[int, Counter[int]] = answer.result
        return versions

    def close(self) -> None:
        self._link.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, content: Any) -> tuple[str, ...]:
        self._message_at_start()  # the process has imported its modules and reads
        self._link.send(content)
        started: _Started = self._message_at_start()
        if started.obstacle is not None:
            raise CannotMove(started.obstacle)
        if started.error is not None:
            raise started.error
        return started.notes

    def _message_at_start(self) -> Any:
        if not self._link.poll(START_S):
            raise RuntimeError(
                f"the process that runs agents did not start within {START_S:g} s; {SEE_LOG}"
            )
        return self._link.receive()

    def _note(self, message: _Events | _Answer) -> None:
        if isinstance(message, _Answer):
            self._answers[message.number] = message
            return
        arrivals = message.arrivals
        self._arrived += arrivals.requests
        # A turn that is stopped before the engine received it never reaches the engine.
        unseen = {one.request_id for one in self._arrived} & {*arrivals.aborted}
        self._arrived = [one for one in self._arrived if one.request_id not in unseen]
        self._aborted += [number for number in arrivals.aborted if number not in unseen]
        self._finished += message.finished
        self._error = self._error or message.error

    def _call(self, name: str, *arguments: Any) -> None:
        self._link.send(_Call(name, arguments))


def main(file: int, parent: int) -> None:
    """Runs a host until the rank, process `parent`, closes its side of the connection `file`."""
    leave_stop_signals_to_the_rank()
    sys.setswitchinterval(SWITCH_S)
    with Connection(file) as link:
        try:
            link.send(None)  # from here on, the process reads
            settings, tokenizer = link.recv()
        except (EOFError, OSError):  # the rank closed the connection
            return
        try:
            settings = replace(settings, tokenizer=pickle.loads(tokenizer))
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


class _Reporter:
    """Sends events, answers and the first error to the rank, on a separate thread."""

    def __init__(self, host: AgentHost, link: Connection, parent: int) -> None:
        self._host, self._link, self._parent = host, link, parent
        self._messages: deque[_Answer | _Events] = deque()
        self._is_posted, self._ended = threading.Event(), threading.Event()
        self._failing, self._has_failed = threading.Lock(), False
        threading.Thread(target=self._run, name="agents-events", daemon=True).start()

    def post(self, message: _Answer | _Events) -> None:
        """Sends a message soon. Never waits for the rank."""
        self._messages.append(message)
        self._is_posted.set()
        self._host.end_wait()

    def fail(self, error: Exception) -> None:
        """Sends an error if it is the first. The rank then ends the run, so no events follow."""
        with self._failing:
            if self._has_failed:
                return
            self._has_failed = True
        self.post(_Events(error=_sendable(error)))

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._ended.is_set() and self._has_sent():
                if os.getppid() != self._parent:
                    # The rank has died, and another process has a copy of its side of the
                    # connection.
                    break
            else:
                return
        except BaseException:  # nobody else sees an error of this thread
            traceback.print_exc()
        try:
            self._host.close()
        finally:
            os._exit(1)

    def _has_sent(self) -> bool:
        """Waits for events or messages and sends them; False if the rank closed the connection."""
        if self._has_failed:
            self._is_posted.wait(REPORT_S)
        else:
            self._host.wait(REPORT_S)
        self._is_posted.clear()
        if not self._has_failed and (events := self._events()) is not None:
            self._messages.append(events)
        while self._messages:
            content = pickle.dumps(self._messages.popleft())
            try:
                self._link.send_bytes(content)
            except OSError:
                return False
        return True

    def _events(self) -> _Events | None:
        """Returns the events since the last call, without parts that the rank does not use."""
        try:
            arrivals, finished = self._host.take(), self._host.take_finished()
        except Exception as error:
            self.fail(error)
            return None
        if not (arrivals or finished):
            return None
        requests = tuple(replace(one, blobs={}) for one in arrivals.requests)
        return _Events(replace(arrivals, requests=requests), tuple(map(_lean, finished)))


def _serve(host: AgentHost, link: Connection, parent: int) -> None:
    reporter = _Reporter(host, link, parent)
    try:
        while True:
            call: _Call = link.recv()
            try:
                result = getattr(host, call.name)(*call.arguments)
            except Exception as error:  # the rank raises it
                if call.number is None:
                    reporter.fail(error)
                else:
                    reporter.post(_Answer(call.number, error=_sendable(error)))
            else:
                if call.number is not None:
                    reporter.post(_Answer(call.number, result))
    except (EOFError, OSError):  # the rank closed the connection
        pass
    finally:
        reporter.end()
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


def _lean(finished: Finished) -> Finished:
    """Leaves out what only the function for `agent.rows` needs, and the row of the data."""
    rows = tuple(
        replace(row, blobs={}, messages=(), tools=(), text="") for row in finished.result.rows
    )
    return replace(finished, result=replace(finished.result, row=None, rows=rows))


def _sendable(error: Exception) -> Exception:
    """Returns an error that can be pickled, as UserErrors can; prints the traceback of others."""
    if isinstance(error, UserError):
        return error
    traceback.print_exception(error)
    return RuntimeError(f"the host of agents {failure_text(error)}: {error_text(error)}")
