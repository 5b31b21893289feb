"""Reads this process's stacks, and the state of other processes on this host. No torch."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import tempfile
from itertools import dropwhile
from pathlib import Path
from traceback import FrameSummary, walk_stack
from typing import IO

from hybridrl.parallel import failure

NUM_FRAMES = 3  # number of innermost frames that one line shows
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
# A compilation is running if one of these files is on the stack. A compilation may take long, but
# it ends.
COMPILERS = tuple(
    os.path.join(*parts)
    for parts in (
        ("torch", "_dynamo", "convert_frame.py"),
        ("torch", "_dynamo", "symbolic_convert.py"),
        ("torch", "_inductor", "graph.py"),
        ("torch", "_inductor", "async_compile.py"),
        ("torch", "utils", "cpp_extension.py"),
        ("triton", "compiler", "compiler.py"),
    )
)
# Frames in Python's standard library are skipped, because their callers are more informative.
STDLIB = os.path.dirname(os.__file__) + os.sep
# Signal that makes a rank write its stacks to its log. A C handler does this, even while the
# interpreter is blocked.
STACKS_SIGNAL = signal.SIGUSR2
# Formats of the lines that faulthandler writes for a thread and for a call. Non-ASCII characters
# are escaped.
THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
CALL = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def calls_of_threads() -> dict[int, list[FrameSummary]]:
    """Returns the stack of each Python thread by its `get_ident`, with the innermost call first.

    In Python 3.11, inspecting another thread's frames (sys._current_frames, f_back) is unsafe.
    Creating a frame object may trigger a garbage collection, in which a finalizer may let the other
    thread continue. The frame object is then stale, and the next f_back crashes the process with
    SIGSEGV. faulthandler creates no objects, so it is used for Python 3.11. It reports only the
    newest 100 threads and their 100 innermost calls, and nothing if no file can be opened.
    """
    if sys.version_info < (3, 12):
        return _written_calls()
    return {
        thread: [
            FrameSummary(one.f_code.co_filename, line, one.f_code.co_name, lookup_line=False)
            for one, line in walk_stack(frame)
        ]
        for thread, frame in sys._current_frames().items()
    }


def _written_calls() -> dict[int, list[FrameSummary]]:
    try:
        with _file_in_memory() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().decode("ascii", "replace").splitlines()
    except OSError:  # too many files are open
        return {}
    found: dict[int, list[FrameSummary]] = {}
    calls: list[FrameSummary] = []
    for line in lines:
        if thread := THREAD.match(line):
            calls = found[int(thread[1], 16)] = []
        elif call := CALL.fullmatch(line):
            file_name, number, function = call.groups()
            at = int(number) if number.isdigit() else 0
            calls.append(
                FrameSummary(_unescaped(file_name), at, _unescaped(function), lookup_line=False)
            )
    return found


def _file_in_memory() -> IO[bytes]:
    """Opens a file in memory, because a pipe that no thread reads could block its writer."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _is_of_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(STDLIB) and "site-packages" not in file)


def position(thread: int, own: str) -> tuple[str, bool, bool]:
    """Returns a thread's innermost lines, whether it is in a collective, and whether it compiles.

    Frames in Python's standard library are left out, except for the innermost frame, and so are
    innermost frames of the source file `own`, which only wait or call this function.
    """
    calls = calls_of_threads().get(thread, [])
    calls = list(dropwhile(lambda call: call.filename == own, calls))
    shown = [
        call for number, call in enumerate(calls) if not number or not _is_of_python(call.filename)
    ]
    lines = [
        f"{os.path.basename(call.filename)}:{call.lineno} in {call.name}"
        for call in shown[:NUM_FRAMES]
    ]
    is_in_collective = bool(calls) and calls[0].filename.endswith(COLLECTIVES)
    compiles = any(call.filename.endswith(COMPILERS) for call in calls)
    return " < ".join(lines), is_in_collective, compiles


def print_stacks() -> None:
    file = failure.rank_file(".log")
    try:
        with file.open("a") if file is not None else contextlib.nullcontext(sys.stderr) as out:
            faulthandler.dump_traceback(out, all_threads=True)
    except (OSError, ValueError):  # the disk is full, or stderr has no descriptor
        return


def host_id() -> str:
    """Returns an id that is equal for processes that can see each other's state in /proc."""
    parts = [socket.gethostname()]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):  # not Linux
            found = os.readlink(file) if "ns" in file else Path(file).read_text()
            parts.append(found.strip())
    return "/".join(parts)


def why_dead(pid: int) -> str | None:
    """Returns the reason why a process on this host cannot continue; None if it can."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "its process is gone"
    except OSError:
        return None
    state = stat.rpartition(")")[2].split()[0]
    if state in "Tt":
        return "its process is stopped (by SIGSTOP or a debugger)"
    return "its process has ended" if state in "ZX" else None


def process_status(pid: int) -> dict[str, str]:
    """Returns /proc/PID/status as a dictionary; empty on systems without /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def writes_stacks(pid: int) -> bool:
    """Whether a process handles STACKS_SIGNAL. The signal would kill a process that does not."""
    caught = int(process_status(pid).get("SigCgt", "0"), 16)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)
