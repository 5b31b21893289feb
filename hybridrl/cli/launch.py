"""Starts the ranks of one machine and watches them. No torch.

Owns the rank processes: their environment, log files and end. Who waits for whom: the launcher
waits for every rank; ranks wait for each other only inside collectives. Invariant: when a rank
fails, no other outlives it by more than the grace and kill delays below, and the exit code is the
failed rank's (2 for a user's mistake, else 1). Ranks die with their launcher.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from hybridrl.errors import UserError

LAUNCHER_PID = "HYBRIDRL_LAUNCHER_PID"
LOG_DIR = "HYBRIDRL_LOG_DIR"
STORE_FD = "HYBRIDRL_STORE_FD"  # of parallel/groups.py
POLL_S = 0.1
GRACE_S = 3.0  # after the first failure: time for the others to report the same mistake themselves
KILL_AFTER_S = 10.0
PR_SET_PDEATHSIG = 1
LOG_LINES_SHOWN = 20
PEER_ERROR = ".PeerError: "  # of parallel/groups.py, in an error file


@dataclass
class _Rank:
    """One rank process and where it writes."""

    index: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def failed(self) -> bool:
        """Whether the process has ended with anything but 0."""
        return self.process.poll() not in (None, 0)


def is_rank() -> bool:
    """Returns whether this process is one rank, started by our launcher or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Returns whether this is a rank of our launcher, which has checked the config already."""
    return is_rank() and LAUNCHER_PID in os.environ


def error_file() -> Path | None:
    """Returns where this rank tells its launcher what ended it; None outside our launcher."""
    if not is_launched():
        return None
    return Path(os.environ[LOG_DIR]) / f"rank_{os.environ['RANK']}.error"


def die_with_launcher() -> None:
    """Asks the kernel to end this rank when its launcher dies, however that is (Linux only)."""
    if is_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[LAUNCHER_PID]):
            os._exit(1)  # it died before the line above


def num_local_gpus() -> int:
    """Returns how many GPUs the installed torch could use here, without importing it."""
    if not _torch_has_cuda():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def launch(
    arguments: Sequence[str],
    world_size: int,
    log_dir: Path,
    program: Sequence[str] = ("-m", "hybridrl.cli.main"),
) -> int:
    """Runs `hybridrl ARGUMENTS` as `world_size` local ranks and waits for all of them.

    Args:
        arguments: the command line after `hybridrl`.
        world_size: number of ranks.
        log_dir: where `rank_N.log` is appended to, and ranks put `rank_N.phase`, `rank_N.error`.
        program: what Python runs in place of hybridrl, for tests.

    Returns:
        The exit code: 0, 2 where a rank met a user's mistake, 1 for anything else.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    for stale in (*log_dir.glob("rank_*.phase"), *log_dir.glob("rank_*.error")):
        stale.unlink()
    with _caught_signals() as received:
        ranks: list[_Rank] = []
        try:
            # Rank 0 listens on this socket, for the job's store: a port that was only found to be
            # free would be anybody's in the seconds until the rank has imported torch.
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                for index in range(world_size):
                    ranks.append(_start([*program, *arguments], index, world_size, server, log_dir))
            _wait(ranks, received)
            culprits = [rank for rank in ranks if rank.failed]
        finally:
            _end(ranks, received)
    if received:
        print(f"hybridrl: stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
        return 1
    return _report(culprits, ranks) if culprits else 0


def launch_run(arguments: Sequence[str], world_size: int, folder: Path) -> int:
    """Runs ranks that write into a run folder; arguments and result as of `launch`.

    A user's mistake that only ranks could meet (a reward that raises), before the first step is
    over, leaves no folder that was not there.

    Raises:
        UserError: the folder cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "run.dir and run.name",
            folder,
            "a folder that can be made and written",
            f"{error.strerror}: change run.dir or run.name.",
        ) from error
    code = launch(arguments, world_size, folder / "logs")
    metrics = folder / "metrics.jsonl"
    has_steps = metrics.exists() and metrics.stat().st_size > 0
    if code == 2 and folder in missing and not has_steps and not (folder / "replay").exists():
        shutil.rmtree(folder)
        for parent in missing[1:]:
            with suppress(OSError):  # something else lies in it
                parent.rmdir()
    return code


def launch_without_run(arguments: Sequence[str], world_size: int) -> int:
    """Runs ranks that have no run folder; their logs are kept only where a message names them."""
    log_dir = Path(tempfile.mkdtemp(prefix=f"hybridrl-{arguments[0]}-"))
    code = launch(arguments, world_size, log_dir)
    if code != 1:
        shutil.rmtree(log_dir)
    return code


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    values: dict[str, object] = {}
    if version_file.is_file():
        exec(compile(version_file.read_text(), str(version_file), "exec"), values)
    return values.get("cuda") is not None


def _start(
    arguments: Sequence[str], index: int, world_size: int, server: socket.socket, log_dir: Path
) -> _Rank:
    environment = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores already
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # where Python was when native code ended the process
        **os.environ,
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.getsockname()[1]),
        LAUNCHER_PID: str(os.getpid()),
        LOG_DIR: str(log_dir.absolute()),
    }
    environment.pop(STORE_FD, None)  # of a rank that launches others
    if index == 0:
        environment[STORE_FD] = str(server.fileno())
    log = log_dir / f"rank_{index}.log"
    with log.open("ab") as file:
        file.write(f"--- {time.strftime('%F %T')} python {' '.join(arguments)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            pass_fds=(server.fileno(),) if index == 0 else (),
            stdin=subprocess.DEVNULL,
            stdout=None if index == 0 else file,
            stderr=subprocess.PIPE if index == 0 else file,
            start_new_session=True,  # signals reach a rank and its children together, through us
        )
    if process.stderr is not None:
        threading.Thread(target=_copy, args=(process.stderr, log), daemon=True).start()
    return _Rank(index, process, log)


def _copy(source: BinaryIO, log: Path) -> None:
    """Copies rank 0's stderr to its log and to ours."""
    with log.open("ab") as file:
        while block := os.read(source.fileno(), 65536):
            file.write(block)
            file.flush()
            os.write(2, block)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in a list instead of dying of them."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[_Rank], received: Sequence[int]) -> None:
    """Returns when all ranks are done, one has failed and the grace is over, or a signal came."""
    deadline = float("inf")
    while not received and any(rank.process.poll() is None for rank in ranks):
        if deadline == float("inf") and any(rank.failed for rank in ranks):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def _end(ranks: Sequence[_Rank], received: Sequence[int]) -> None:
    """Ends every rank still alive, with the signal that came if any, and what ranks had started."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(received[0] if received else signal.SIGTERM)
    deadline = time.monotonic() + KILL_AFTER_S
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if not received and not any(rank.process.poll() != 0 for rank in ranks):
        return
    for rank in ranks:
        with suppress(ProcessLookupError):  # nothing is left of the group: the usual case
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()


def _report(culprits: Sequence[_Rank], ranks: Sequence[_Rank]) -> int:
    """Prints which rank failed first, and why, also into the logs of the others, which may have
    been ended without a word; returns the exit code.
    """
    mistaken = [rank for rank in culprits if rank.process.returncode == 2]
    if mistaken:
        print(_error_text(mistaken[0]), file=sys.stderr)
        return 2
    # A killed rank tears the others' connections; else the first to write its error is the cause,
    # unless that says of another rank that it failed.
    first = min(
        culprits,
        key=lambda rank: (
            rank.process.returncode >= 0,
            PEER_ERROR in _error_text(rank),
            _error_time(rank),
        ),
    )
    code = first.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    phase_file = first.log.with_suffix(".phase")
    phase = phase_file.read_text().strip() if phase_file.exists() else "start"
    host = socket.gethostname()
    error = f": {_error_text(first).strip()}" if _error_time(first) < float("inf") else ""
    message = (
        f"hybridrl: rank {first.index} on host {host} {how} in phase '{phase}'{error}; "
        f"the other ranks were ended. Its log is {first.log}"
    )
    print(message, file=sys.stderr)
    for rank in ranks:
        if rank is not first:
            with rank.log.open("a") as file:
                print(message, file=file)
    if first.index != 0 and code > 0:  # rank 0's stderr is on the console already
        lines = first.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        print("\n".join(f"  | {line}" for line in lines), file=sys.stderr)
    return 1


def _error_text(rank: _Rank) -> str:
    file = rank.log.with_suffix(".error")
    return file.read_text() if file.exists() else f"rank {rank.index} refused; see {rank.log}"


def _error_time(rank: _Rank) -> float:
    file = rank.log.with_suffix(".error")
    return file.stat().st_mtime if file.exists() else float("inf")
