"""What holds a process on a node of Ray's: an actor with one process, of node.py, which holds a
rank, or of the cluster check; and that process as this side sees it. Actors run nothing else. No
torch; Ray is imported where it is needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridrl import __version__, console
from hybridrl.errors import said

ANSWER_S = 60.0  # for an actor
NODE = "hybridrl.cli.node"
POLL_S = 0.2  # that an actor waits for output before it answers
TALK_S = 0.02  # the same where questions are asked meanwhile, and clocks compared
END_S = 10.0  # for a process to end by itself


@dataclass(frozen=True)
class Place:
    """Where an actor is.

    Args:
        node: Ray's identifier of the node.
        address: of the node.
        gpus: of the node that are the actor's, as CUDA numbers them; none on CPU.
        version: of hybridrl there.
        folder: whether the working folder is there.
    """

    node: str
    address: str
    gpus: tuple[str, ...]
    version: str
    folder: bool


class ProcessActor:
    """What Ray starts on a node: holds one process, and nothing else.

    Args:
        folder: that the process works in.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._output: list[tuple[int, bytes]] = []
        self._has_output = threading.Event()

    def place(self) -> Place:
        """Returns where this is."""
        import ray

        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        is_there = os.path.isdir(self._folder)
        return Place(context.get_node_id(), address, gpus, __version__, is_there)

    def start(
        self, order: bytes, module: str = NODE, variables: Mapping[str, str] | None = None
    ) -> None:
        """Starts a module of hybridrl's and tells it its order, if there is one.

        Args:
            order: lines for its stdin; there may be none yet.
            module: node.py unless told.
            variables: of its environment, beside the actor's.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )
        for number, source in ((1, self._process.stdout), (2, self._process.stderr)):
            assert source is not None
            threading.Thread(target=self._read, args=(number, source), daemon=True).start()
        if order:
            self.tell(order)

    def tell(self, line: bytes) -> None:
        """Writes to the process; nothing closes its stdin, which ends its ranks."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError, ValueError):
            if line:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def poll(self, wait_s: float = POLL_S) -> tuple[int | None, list[tuple[int, bytes]]]:
        """Returns the exit code, or None, and what was written to stdout (1) and stderr (2).

        Args:
            wait_s: at most, for output; meanwhile nothing is told to the process.
        """
        assert self._process is not None
        self._has_output.wait(wait_s)
        self._has_output.clear()
        code = self._process.poll()
        if code is not None:
            time.sleep(POLL_S)  # what is still in the pipes
        found, self._output = self._output, []
        return code, found

    def _read(self, number: int, source: Any) -> None:
        while block := os.read(source.fileno(), 65536):
            self._output.append((number, block))
            self._has_output.set()


class _Stdin:
    """The stdin of a process that an actor holds."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._line = actor, b""

    def write(self, line: bytes) -> int:
        """Keeps a line until it is flushed."""
        self._line += line
        return len(line)

    def flush(self) -> None:
        """Sends it."""
        self._actor.tell.remote(self._line)
        self._line = b""

    def close(self) -> None:
        """Closes the stdin there."""
        self._actor.tell.remote(b"")


class RemoteNode:
    """A process that an actor holds, as `subprocess.Popen` would be one here.

    Args:
        actor: the handle.
        fault: gets why the actor was lost.
    """

    def __init__(self, actor: Any, fault: Callable[[str], None]) -> None:
        self.stdin = _Stdin(actor)
        self.returncode: int | None = None
        self._actor, self._fault = actor, fault
        self._asked = actor.poll.remote()
        self._since = time.monotonic()

    def poll(self) -> int | None:
        """Returns the exit code, or None; prints what the process wrote."""
        import ray

        if self.returncode is not None:
            return self.returncode
        if not ray.wait([self._asked], timeout=0)[0]:
            if time.monotonic() - self._since > ANSWER_S:
                self._lose(f"it has not answered for {ANSWER_S:g} s")
            return self.returncode
        try:
            self.returncode, output = ray.get(self._asked)
        except ray.exceptions.RayError as error:
            self._lose(said(error))
            return self.returncode
        for number, block in output:
            stream = sys.stdout if number == 1 else sys.stderr
            stream.flush()
            console.write(number, block)
        if self.returncode is None:
            self._asked, self._since = self._actor.poll.remote(), time.monotonic()
        return self.returncode

    def kill(self) -> None:
        """Ends the actor and with it the process."""
        import ray

        ray.kill(self._actor)

    def wait(self) -> int:
        """Returns the exit code; of a process that was killed the signal."""
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode
        return self.returncode

    def _lose(self, why: str) -> None:
        self.returncode = -signal.SIGKILL
        self._fault(why)


class ActorPipe:
    """A process that an actor holds, to talk with line by line. One thread takes its lines.

    Args:
        actor: the handle; has no process yet.
        module: that the process runs.
        variables: of its environment.
    """

    def __init__(self, actor: Any, module: str, variables: Mapping[str, str]) -> None:
        self._actor = actor
        self._code: int | None = None
        self._has_ended = threading.Event()
        self._started = actor.start.remote(b"", module, dict(variables))

    def send(self, line: str) -> None:
        """Writes a line to the process."""
        self._actor.tell.remote(line.encode() + b"\n")

    def lines(self) -> Iterator[str]:
        """Yields what it prints, and why the actor was lost."""
        import ray

        rest, code = {1: b"", 2: b""}, None
        try:
            ray.get(self._started, timeout=ANSWER_S)
            while code is None:
                code, output = ray.get(self._actor.poll.remote(TALK_S), timeout=ANSWER_S)
                for number, block in output:
                    *whole, rest[number] = (rest[number] + block).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
            yield from (line.decode(errors="replace") for line in rest.values())
            self._code = code
        except ray.exceptions.RayError as error:
            is_raised_there = isinstance(error, ray.exceptions.RayTaskError)
            yield said(error.cause if is_raised_there else error)
        finally:
            self._has_ended.set()

    def outcome(self) -> str:
        """Returns how it ended, in words."""
        return "was lost" if self._code is None else f"ended with code {self._code}"

    def close(self) -> None:
        """Ends the process by the end of its stdin, and then the actor."""
        import ray

        self._actor.tell.remote(b"")
        self._has_ended.wait(END_S)
        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
