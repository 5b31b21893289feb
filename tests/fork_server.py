"""Forks the processes of tests, so that none of them waits seconds for torch and Megatron.

This process imports, once, what ranks import, and then forks one child for each request of
fork_starts.py. Who waits for whom: the asker waits for the child's process number; this process
waits for nobody but the next asker. It has one thread, and so has every child at its beginning.
Arguments, environment, working folder, descriptors, limits and random numbers of a child are its
own. It differs from a program that was started anew in what it need not import, in the order of
sets of strings, which is the same in all, in the thread that its gloo groups share, in what garbage
collection looks at, in how it is scheduled, and in its end, where nothing is taken apart: cold
starts alone find faults of these kinds, as `make test-full` has them.

Children are scheduled in batches (SCHED_BATCH): one that wakes up waits for the end of another's
turn. Else a message's arrival interrupts its sender, which holds the lock of the connection, and
gloo's thread asks for that lock again and again until the sender has another turn: with four ranks
on two cores a third of the time went there.

A child becomes a child of its asker, an ancestor of the server: the process between the two ends
at once, and the asker takes what is orphaned in that moment (PR_SET_CHILD_SUBREAPER). So each child
that may start others gets, before it does anything, a server of its own that is as fresh as it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import io
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import fork_starts
import kept_heap
from fork_starts import LENGTH, MAX_DESCRIPTORS

PR_SET_PDEATHSIG = 1
FLUSH_FAILED = 120  # Python's code where an output could not take what was left
SET_ASIDE = 200  # received descriptors wait above this number for their places


@dataclass(frozen=True)
class Request:
    """What a child is to become, and the descriptors that it gets."""

    content: dict[str, Any]
    descriptors: list[int]

    @property
    def is_rank(self) -> bool:
        """Whether it is one rank, which starts no others."""
        return "RANK" in self.content["environment"]


def serve(listener: socket.socket, alive: int | None = None) -> Request:
    """Answers requests; returns only in a child, with its request. Ends when `alive` ends."""
    watched = [listener] if alive is None else [listener, alive]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if alive in ready:
            os._exit(0)
        asker, _ = listener.accept()
        with asker:
            content, descriptors = _receive(asker)
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                between = os.getpid()
                child = os.fork()
                if child != 0:
                    os.write(writer, LENGTH.pack(child))
                    os._exit(0)
                for descriptor in (reader, writer, listener.detach(), asker.detach()):
                    os.close(descriptor)
                while os.getppid() == between:
                    time.sleep(0.0005)
                return Request(content, descriptors)
            os.waitpid(between, 0)  # from here on the asker is the child's parent
            answer = os.read(reader, LENGTH.size)
            for descriptor in (reader, writer, *descriptors):
                os.close(descriptor)
            with contextlib.suppress(OSError):  # the asker was killed meanwhile
                asker.sendall(answer)


def _receive(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(asker, LENGTH.size, MAX_DESCRIPTORS)
    (length,) = LENGTH.unpack(head)
    body = b""
    while len(body) < length:
        body += asker.recv(length - len(body))
    return json.loads(body), descriptors


def take(request: dict[str, Any], received: list[int], set_by_imports: dict[str, str]) -> None:
    """Gives this process what its asker said: descriptors, limits, folder and environment."""
    aside = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, SET_ASIDE) for one in received]
    for one in received:
        os.close(one)
    for one, number in zip(aside, request["descriptors"], strict=True):
        os.dup2(one, number)
        os.close(one)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if request["is_new_session"]:
        os.setsid()
    os.umask(request["umask"])
    for number, limits in request["limits"]:
        resource.setrlimit(number, tuple(limits))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**set_by_imports, **request["environment"]})
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115  # until the process ends
    sys.stdout = sys.__stdout__ = _text(1, is_unbuffered)
    sys.stderr = sys.__stderr__ = _text(2, True)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))
    sys.modules["torch"].seed()


def become(program: str, arguments: list[str]) -> None:
    """Runs a program as the main one of this process."""
    is_module = program == "-m"
    first = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program))
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [first, *(folder for folder in folders if folder)]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    if is_module:
        sys.argv = arguments
        sys.modules.pop(arguments[0], None)  # runpy warns about a module that is imported already
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def _text(descriptor: int, is_unbuffered: bool) -> io.TextIOWrapper:
    """Returns what Python would make of an output at its start."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding="utf-8",
        errors="backslashreplace" if descriptor == 2 else "strict",
        line_buffering=descriptor == 2,
        write_through=is_unbuffered,
    )


def main() -> None:
    """Imports, says which top-level modules are there, and serves."""
    descriptor, root, engine = sys.argv[1:]
    modules = fork_starts.RANKS_WITH_VLLM if engine == "vllm" else fork_starts.RANKS
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gloo_thread
        import vllm_kernels

        sys.path[0] = root
        for name in modules:
            importlib.import_module(name)
        if "vllm" in modules:
            vllm_kernels.register()
    del sys.path[0]
    gloo_thread.share()
    if len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit("an imported module has started a thread: forks would not be safe")
    set_by_imports = {
        name: value for name, value in os.environ.items() if before.get(name) != value
    }
    kept_heap.keep()  # no collection of a child touches what is shared
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    listener = socket.socket(fileno=int(descriptor))
    address = listener.getsockname()
    top_level = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps(top_level), flush=True)
    sys.stdout.close()
    request = serve(listener, alive=0)
    below = os.path.join(os.path.dirname(address), str(os.getpid()))
    if not request.is_rank:
        request = _with_server(below, request)

    def run() -> None:
        take(request.content, request.descriptors, set_by_imports)
        if not request.is_rank:
            server = fork_starts.Server(below, frozenset(top_level))
            fork_starts.install(Path(root), server)
        program, *arguments = request.content["program"]
        become(program, arguments)

    _end(run)


def _with_server(address: str, request: Request) -> Request:
    """Starts a server below this process; returns the request of this process, or of a child."""
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)  # of a process that had the same number
        listener.bind(address)
        listener.listen(64)
        asker = os.getpid()
        if os.fork() != 0:
            return request
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != asker:
            os._exit(0)  # it ended before the line above
        for number in (signal.SIGINT, signal.SIGTERM):  # what a terminal sends to all
            signal.signal(number, signal.SIG_IGN)
        mine = listener.fileno()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.closerange(3, mine)
        os.closerange(mine + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        return serve(listener)


def _end(program: Callable[[], None]) -> NoReturn:
    """Runs a program and ends the process without teardown, which would copy pages of all modules
    and take longer than most runs.
    """
    code: object = 0
    try:
        program()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:  # its reader is gone
            code = code or FLUSH_FAILED
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
