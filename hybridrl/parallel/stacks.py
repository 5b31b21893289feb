"""Where the threads of this process are, and how other processes of this host are. No torch.

Stacks are read from the frames' code and line alone: values of variables of a thread that runs must
not be touched.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hybridrl.parallel import failure

NUM_FRAMES = 3  # in one line
MOST_FRAMES = 60  # in a report
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
# Files whose code is on the stack while something is compiled, which takes long and ends.
COMPILERS = tuple(
    os.path.join(*parts)
    for parts in (
        ("torch", "_dynamo", "convert_frame.py"),
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
ANSWER_S = 1.0  # for that
MOST_BYTES = 1 << 20


def _frames(frame: FrameType | None, own: str) -> Iterator[FrameType]:
    """Yields the frames of a thread, innermost first, without those that wait in file `own`."""
    while frame is not None and frame.f_code.co_filename == own:
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(STDLIB) and "site-packages" not in file)


def position(thread: int, own: str) -> tuple[str, bool, bool]:
    """Returns the innermost lines of a thread, whether it is in a call of torch.distributed, and
    whether it compiles. Of Python's own modules only the innermost line of all is told.

    Args:
        thread: its `get_ident`.
        own: a file whose innermost frames are left out: those that wait, or tell this.
    """
    frames = list(_frames(sys._current_frames().get(thread), own))
    files = [frame.f_code.co_filename for frame in frames]
    told = [
        (file, frame)
        for number, (file, frame) in enumerate(zip(files, frames, strict=True))
        if not number or not _is_of_python(file)
    ]
    lines = [
        f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        for file, frame in told[:NUM_FRAMES]
    ]
    is_in_collective = bool(files) and files[0].endswith(COLLECTIVES)
    return " < ".join(lines), is_in_collective, any(file.endswith(COMPILERS) for file in files)


def stacks_of_threads(main: int) -> dict[str, str]:
    """Returns the stack of each thread, innermost line first, by its name.

    Args:
        main: `get_ident` of the one that comes first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = sys._current_frames()
    found: dict[str, str] = {}
    for ident in sorted(frames, key=lambda one: (one != main, names.get(one, ""))):
        if ident == own:
            continue
        name = names.get(ident, "a thread of a library")
        while name in found:
            name += "'"
        lines = traceback.extract_stack(frames[ident], limit=MOST_FRAMES)
        found[name] = "".join(traceback.format_list(lines[::-1])).rstrip()
    return found


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


def process_state(pid: int) -> str:
    """Returns what /proc says of a process of this host, for people."""
    said = [why_dead(pid) or "its process runs, its Python does not answer"]
    if (state := process_status(pid).get("State")) is not None:
        said.append(f"state {state}")
    with contextlib.suppress(OSError):
        if (where := Path(f"/proc/{pid}/wchan").read_text().strip()) not in ("", "0"):
            said.append(f"in the kernel at {where}")
    return ", ".join(said)


def writes_stacks(pid: int) -> bool:
    """Whether a process has a handler of STACKS_SIGNAL, which would end it without one."""
    caught = int(process_status(pid).get("SigCgt", "0"), 16)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)


def stacks_by_signal(pid: int, rank: int) -> str:
    """Returns the stacks that a rank of this host writes to its log when a signal asks, although
    its Python does not answer; "" if it cannot.
    """
    log = failure.rank_file(".log", rank)
    if log is None or why_dead(pid) is not None or not writes_stacks(pid):
        return ""
    with contextlib.suppress(OSError):
        before = log.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
        time.sleep(ANSWER_S)
        with log.open("rb") as file:
            file.seek(before)
            return file.read(MOST_BYTES).decode(errors="replace").rstrip()
    return ""
