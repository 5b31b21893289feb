"""Where the threads of this process are, and how other processes of this host are. No torch."""

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

NUM_FRAMES = 3  # in one line
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
# Files whose code is on the stack while something is compiled, which takes long and ends.
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
# Python's own modules: less telling than who calls them.
STDLIB = os.path.dirname(os.__file__) + os.sep
# Writes a rank's stacks to its log, from C, also while its Python does not run.
STACKS_SIGNAL = signal.SIGUSR2
# What faulthandler writes of a thread and of each of its calls; other characters than ASCII's are
# escaped.
THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
CALL = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def calls_of_threads() -> dict[int, list[FrameSummary]]:
    """Returns where each thread that runs Python is, innermost call first, by its `get_ident`.

    Python 3.11 cannot look at another thread's frames (sys._current_frames, f_back): making the
    object of one may start a garbage collection, a finalizer lets the other thread run on, and the
    object then stands for a call that is over. The next f_back ends the process by SIGSEGV. There
    faulthandler writes them, which makes no objects: of the newest 100 threads the 100 innermost
    calls, and nothing where no file can be opened. Later versions collect garbage elsewhere.
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
    """Returns what faulthandler writes of the threads."""
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
            names = _unescaped(file_name), at, _unescaped(function)
            calls.append(FrameSummary(*names, lookup_line=False))
    return found


def _file_in_memory() -> IO[bytes]:
    """Returns a file that never lets its writer wait, as a pipe would: Python stands still then."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _is_of_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(STDLIB) and "site-packages" not in file)


def position(thread: int, own: str) -> tuple[str, bool, bool]:
    """Returns the innermost lines of a thread, whether it is in a call of torch.distributed, and
    whether it compiles. Of Python's own modules only the innermost line of all is told.

    Args:
        thread: its `get_ident`.
        own: a file whose innermost frames are left out: those that wait, or tell this.
    """
    calls = calls_of_threads().get(thread, [])
    calls = list(dropwhile(lambda call: call.filename == own, calls))
    told = [
        call for number, call in enumerate(calls) if not number or not _is_of_python(call.filename)
    ]
    lines = [
        f"{os.path.basename(call.filename)}:{call.lineno} in {call.name}"
        for call in told[:NUM_FRAMES]
    ]
    is_in_collective = bool(calls) and calls[0].filename.endswith(COLLECTIVES)
    compiles = any(call.filename.endswith(COMPILERS) for call in calls)
    return " < ".join(lines), is_in_collective, compiles


def print_stacks() -> None:
    """Writes the Python stacks of all threads to this rank's log, or to stderr if it has none."""
    file = failure.rank_file(".log")
    try:
        with file.open("a") if file is not None else contextlib.nullcontext(sys.stderr) as out:
            faulthandler.dump_traceback(out, all_threads=True)
    except (OSError, ValueError):  # a full disk, or a stderr without a descriptor
        return


def host_id() -> str:
    """Returns what two processes have in common if one can see the other's state in /proc."""
    parts = [socket.gethostname()]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):  # another system than Linux
            found = os.readlink(file) if "ns" in file else Path(file).read_text()
            parts.append(found.strip())
    return "/".join(parts)


def why_dead(pid: int) -> str | None:
    """Returns why a process of this host cannot go on; None if it can."""
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
    """Returns what the kernel says of a process; nothing on systems without /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def writes_stacks(pid: int) -> bool:
    """Whether a process has a handler of STACKS_SIGNAL, which would end it without one."""
    caught = int(process_status(pid).get("SigCgt", "0"), 16)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)
