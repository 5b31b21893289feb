"""Starts and monitors the ranks on one machine. Does not import torch.

Who waits for whom: the launcher waits for all ranks on its machine. If a rank fails, the other
ranks are ended after GRACE_S and killed after KILL_AFTER_S. If a rank was killed, the other ranks
are ended immediately, because their work is lost anyway. If the launcher dies, its ranks die too.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, Any

from hybridrl import console
from hybridrl.checkpoint.run_lock import LOCK_FILE, LOCK_TOKEN, RunLock
from hybridrl.config.interpolation import shown_command
from hybridrl.console import say
from hybridrl.errors import UserError
from hybridrl.metrics.trackers import CLOSE_S
from hybridrl.parallel.failure import (
    LAUNCHER_PID,
    LOG_DIR,
    RUNNING,
    STORE_FD,
    Failure,
    is_launched,
    rank_file,
)
from hybridrl.parallel.stacks import STACKS_SIGNAL, process_status, writes_stacks
from hybridrl.parallel.stop_signals import may_be_second, meaning, noted_signals
from hybridrl.services.launch.leaving import GATE_FD, Leaving, is_killed
from hybridrl.services.launch.rank_ends import EndedRank, Outcome, conclude

PROGRAM = ("-m", "hybridrl.cli.main")  # Arguments for Python that start hybridrl in a rank.
LOGS = "logs"  # Folder of logs in the run folder.
REPORT = "report.json"  # File in which ranks pass a report to the command that started them.
POLL_S = 0.1
GRACE_S = 3.0  # Time in which other ranks may report the same mistake.
KILL_AFTER_S = 10.0
LEAVE_S = CLOSE_S + KILL_AFTER_S  # Time that other ranks have to stop; rank 0 closes its trackers.
NOTICE_S = 1.0  # Time after a signal until a message reports ranks that still run.
NOTICE_EVERY_S = 15.0  # Interval at which the message about running ranks is repeated.
SAME_SIGNAL_S = 1.0  # Signals that are closer together count as one signal.
STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # Exit codes of ranks that saved.
PR_SET_PDEATHSIG = 1
LOCAL = "127.0.0.1"
STACKS_S = 0.5  # time that ranks have to write their stacks
COPY_S = 1.0  # Time to finish copying rank 0's stderr after the rank is gone.
COPY_ALIVE_S = 0.2  # Time to copy the last output if the rank was killed but still exists.


@dataclass(frozen=True)
class Share:
    """The ranks that one launcher starts: `count`, beginning with `first`.

    The job's store is at `address` and `port` of rank 0's machine; port 0 is any free one.
    """

    count: int
    first: int
    world_size: int
    address: str = LOCAL
    port: int = 0

    @staticmethod
    def whole(world_size: int) -> Share:
        return Share(world_size, 0, world_size)


class CopiedStderr:
    """Copies rank 0's stderr in a thread. `fault` is why the log is incomplete, or None."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, source: IO[bytes], log: Path) -> None:
        self._thread = threading.Thread(target=self._copy, args=(source, log), daemon=True)
        self._thread.start()

    def finish(self, is_gone: bool) -> None:
        """Waits until all is copied, for a limited time: child processes may keep stderr open."""
        if self._thread is not None:
            self._thread.join(COPY_S if is_gone else COPY_ALIVE_S)

    def _copy(self, source: IO[bytes], log: Path) -> None:
        """Copies until stderr ends, even after write errors: a full pipe would block the rank."""
        with log.open("ab", buffering=0) as file:
            while block := os.read(source.fileno(), 65536):
                try:
                    if self.fault is None:
                        _write_all(file.fileno(), block)
                except OSError as error:  # the disk is full; keep copying to the console
                    self.fault = error.strerror
                console.write(console.STDERR, block)


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # a nearly full disk accepts part of a block, and fails at the next write
        block = block[os.write(descriptor, block) :]


@dataclass
class _Rank:
    index: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def code(self) -> int | None:
        """Exit code of the process, -N for signal N; None while it runs."""
        code = self.process.poll()
        return -signal.SIGKILL if code is None and is_killed(self.process.pid) else code

    @property
    def failed(self) -> bool:
        """Whether the process ended with an error, after an unexpected signal, or too early."""
        code = self.code
        is_done = code in (0, *STOP_CODES) and not self.log.with_suffix(RUNNING).exists()
        return code is not None and not is_done

    @property
    def stopped_by(self) -> int:
        """Number of the signal because of which the rank stopped; else 0."""
        code = self.code
        return code - 128 if code in STOP_CODES and not self.failed else 0

    @property
    def failure(self) -> Failure | None:
        return Failure.read(self.log.with_suffix(".error"))


def is_rank() -> bool:
    """Whether hybridrl's launcher or torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def die_with_launcher() -> None:
    """Makes the kernel kill this rank when its launcher dies (Linux only)."""
    if is_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[LAUNCHER_PID]):
            os._exit(1)  # the launcher died before prctl


def launch(
    arguments: Sequence[str],
    world_size: int,
    log_dir: Path,
    program: Sequence[str] = PROGRAM,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs `hybridrl ARGUMENTS` as local ranks and waits for all of them.

    The log folder gets `rank_N.log` (text is appended), `rank_N.phase` and `rank_N.error`.
    `program` are Python's arguments, for tests. Returns the exit code: 0 for success, 2 for a
    user's mistake, 128 plus the number of the signal that stopped the job, 1 for anything else.
    """
    command = [*program, *arguments]
    return conclude(run_ranks(command, Share.whole(world_size), log_dir, environment), log_dir)


def run_ranks(
    command: Sequence[str],
    share: Share,
    log_dir: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    steer: Callable[[list[int]], None] | None = None,
    leaving: Leaving | None = None,
) -> Outcome:
    """Runs Python with `command` as the job's ranks on this machine, and waits for them.

    Args:
        steer: Called once with the list of signals to send to the ranks, to which it may append
            later. A second signal ends the ranks immediately.
        leaving: Tracker for processes of earlier starts, for which the new ranks wait, and of this
            start. None if this is the only start, whose processes the launcher waits for.
    """
    ranks: list[_Rank] = []
    copied, of_starts = CopiedStderr(), leaving or Leaving()
    with caught_signals() as received:
        if steer is not None:
            steer(received)
        try:
            _make_log_dir(log_dir, share)
            _start_all(ranks, command, share, log_dir, copied, environment, of_starts.gate())
            _wait(ranks, received)
            culprits = [rank for rank in ranks if rank.failed]
        finally:
            codes = _end(ranks, received)
            stopped_by = [*received, *(rank.stopped_by for rank in ranks if rank.stopped_by)]
            of_starts.take([(f"rank {rank.index}", rank.process) for rank in ranks])
            if leaving is None:
                of_starts.wait()
    copied.finish(is_gone=all(rank.process.returncode is not None for rank in ranks))
    host = socket.gethostname()
    ended = [EndedRank(rank.index, codes[rank.index], str(rank.log), host) for rank in ranks]
    # After a signal, only a rank that could not save reports an error. No rank was killed yet.
    blamable = [
        rank.index
        for rank in culprits
        if not received
        or codes[rank.index] == -signal.SIGKILL
        or ended[rank.index - share.first].spoke
    ]
    return Outcome(ended, blamable, stopped_by[0] if stopped_by else 0, copied.fault)


def _start_all(
    ranks: list[_Rank],
    command: Sequence[str],
    share: Share,
    log_dir: Path,
    copied: CopiedStderr,
    environment: Mapping[str, str],
    gate: int | None,
) -> None:
    try:
        # Rank 0 serves the job's store on this socket, bound here before others take its port.
        with socket.socket() as server:
            if share.first == 0:
                _bind(server, share)
            port = server.getsockname()[1] if share.first == 0 else share.port
            for index in range(share.first, share.first + share.count):
                variables = _environment(share, index, port, log_dir, environment)
                fds = {STORE_FD: server.fileno()} if index == 0 else {}
                if gate is not None:
                    fds[GATE_FD] = gate
                ranks.append(_start(command, index, fds, log_dir, copied, variables))
    finally:
        if gate is not None:
            os.close(gate)


def _bind(server: socket.socket, share: Share) -> None:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, share.port != 0)
    try:
        server.bind((LOCAL if share.address == LOCAL else "", share.port))
    except OSError as error:
        allowed = f"a free port on {socket.gethostname()}"
        remedy = f"{error.strerror}; choose another port with --port."
        raise UserError("--port", share.port, allowed, remedy) from error


def _make_log_dir(log_dir: Path, share: Share) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        own = [f"rank_{index}" for index in range(share.first, share.first + share.count)]
        for stem in ["rank_*"] if share.count == share.world_size else own:
            # Ranks with agents have a file for each process that serves them.
            for ending in (".phase", ".error", RUNNING, ".agents", "_*.agents"):
                for stale in log_dir.glob(stem + ending):
                    stale.unlink(missing_ok=True)
    except OSError as error:
        raise _no_logs(log_dir, error) from error


def _no_logs(path: Path, error: OSError) -> UserError:
    remedy = "Free space on the disk, or change run.dir."
    return UserError(str(path), error.strerror, "a writable folder for the ranks' logs", remedy)


@console.protected()
def launch_run(
    arguments: Sequence[str], world_size: int, folder: Path, start: Callable[..., int] | None = None
) -> int:
    """Locks a run folder and runs its ranks with `start`, or else `launch`.

    A new run that ends before its first step because of a user's mistake leaves only its logs, so
    that the next start may use another config.
    """
    is_new = not folder.is_dir() or {path.name for path in folder.iterdir()} <= {LOGS}
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = "a folder that can be created and written"
        remedy = f"{error.strerror}; change run.dir or run.name."
        raise UserError("run.dir and run.name", folder, allowed, remedy) from error
    lock = RunLock(folder)
    lock.acquire(lambda text: say(text, sys.stdout))
    try:
        token = {LOCK_TOKEN: lock.token}
        code = (start or launch)(arguments, world_size, folder / LOGS, environment=token)
        metrics = folder / "metrics.jsonl"
        has_steps = metrics.exists() and metrics.stat().st_size > 0
        if code == 2 and is_new and not has_steps and not (folder / "replay").exists():
            for path in folder.iterdir():
                if path.is_dir() and path.name != LOGS:
                    shutil.rmtree(path)
                elif path.is_file() and path.name != LOCK_FILE:
                    path.unlink()
    finally:
        lock.release()
    return code


def launch_without_run(arguments: Sequence[str], world_size: int) -> int:
    """Runs ranks without a run folder. Keeps their logs only if a message refers to them."""
    log_dir = Path(tempfile.mkdtemp(prefix=f"hybridrl-{arguments[0]}-"))
    code = launch(arguments, world_size, log_dir)
    if code != 1:
        shutil.rmtree(log_dir)
    return code


def report_of_ranks(arguments: Sequence[str], world_size: int) -> dict[str, Any] | int:
    """Runs `hybridrl ARGUMENTS` as local ranks. Returns their report, or the code of a failure."""
    log_dir = Path(tempfile.mkdtemp(prefix="hybridrl-report-"))
    code = launch(arguments, world_size, log_dir)
    report: dict[str, Any] = {}
    if code == 0:
        report = json.loads((log_dir / REPORT).read_text(encoding="utf-8"))
    if code != 1:  # with code 1, an error message refers to the logs
        shutil.rmtree(log_dir)
    return code or report


def leave_for_parent(report: dict[str, Any]) -> bool:
    """Writes the report for the parent process; returns False if none expects it."""
    file = rank_file(".log")
    if file is None or not is_launched():
        return False
    file.with_name(REPORT).write_text(json.dumps(report), encoding="utf-8")
    return True


def _environment(
    share: Share, index: int, port: int, log_dir: Path, further: Mapping[str, str]
) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": "1",  # the ranks already use all cores
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # print Python stacks if native code crashes
        **os.environ,
        "RANK": str(index),
        "LOCAL_RANK": str(index - share.first),
        "WORLD_SIZE": str(share.world_size),
        "LOCAL_WORLD_SIZE": str(share.count),
        "MASTER_ADDR": share.address,
        "MASTER_PORT": str(port),
        LAUNCHER_PID: str(os.getpid()),
        LOG_DIR: str(log_dir.absolute()),
        **further,
    }
    for name in (STORE_FD, GATE_FD):  # set if this launcher runs in a rank of another job
        environment.pop(name, None)
    return environment


def _start(
    command: Sequence[str],
    index: int,
    descriptors: Mapping[str, int],
    log_dir: Path,
    copied: CopiedStderr,
    environment: dict[str, str],
) -> _Rank:
    """Starts a rank with inherited `descriptors`; rank 0 also writes to the console."""
    environment |= {name: str(descriptor) for name, descriptor in descriptors.items()}
    log = log_dir / f"rank_{index}.log"
    try:
        file = log.open("ab", buffering=0)
        file.write(f"--- {time.strftime('%F %T')} python {shown_command(command)}\n".encode())
    except OSError as error:
        raise _no_logs(log, error) from error
    with file:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            pass_fds=tuple(descriptors.values()),
            stdin=subprocess.DEVNULL,
            stdout=None if index == 0 else file,
            stderr=subprocess.PIPE if index == 0 else file,
            start_new_session=True,  # the launcher forwards signals to a rank's process group
        )
    if process.stderr is not None:
        copied.start(process.stderr, log)
    return _Rank(index, process, log)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Yields a list of the signals that asked a run to stop, each as SIGINT or SIGTERM.

    Copies of the first are ignored: a terminal signals both this process and its parent.
    """
    received: list[int] = []
    first: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        is_second = may_be_second(number) and first[-1] - first[0] > SAME_SIGNAL_S
        if not received or is_second:
            received.append(meaning(number))

    before = {number: signal.signal(number, note) for number in noted_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[_Rank], received: Sequence[int]) -> None:
    """Waits until all ranks are done, or must be ended: after a second signal, a killed or lost
    rank, or a failure's grace period. Forwards the first signal.
    """
    deadline, notice, is_told = float("inf"), float("inf"), False
    while len(received) < 2 and any(rank.code is None for rank in ranks):
        now = time.monotonic()
        if received and not is_told:
            is_told = True
            notice = now + NOTICE_S if ranks[0].index == 0 else notice  # one notice per job
            for rank in ranks:
                rank.process.send_signal(received[0])
        failed = [] if received else [rank for rank in ranks if rank.failed]
        if any(rank.failed for rank in ranks):
            deadline = min(deadline, now + (KILL_AFTER_S if received else GRACE_S))
        elif any(rank.stopped_by for rank in ranks):
            deadline = min(deadline, now + LEAVE_S)
        is_final = any((f := rank.failure) is not None and f.kind == "lost" for rank in failed)
        if is_final or _is_one_killed(failed) or now > deadline:
            return
        if now > notice:
            notice = now + NOTICE_EVERY_S
            what = f"{signal.Signals(received[0]).name}: the ranks save a checkpoint and end"
            say(f"hybridrl: {what}; a second signal ends them immediately")
        time.sleep(POLL_S)


def _is_one_killed(failed: Sequence[_Rank]) -> bool:
    """Whether a rank received SIGKILL, for which others wait or report broken connections."""
    return any(rank.code == -signal.SIGKILL for rank in failed)


def _end(ranks: Sequence[_Rank], received: Sequence[int]) -> dict[int, int]:
    """Ends all ranks and their child processes. Returns exit codes by rank.

    After a failure, other ranks write their stacks first. Ranks that are suspended, or were already
    asked to end, get SIGKILL. If one rank was killed, all get it.
    """
    alive = [rank for rank in ranks if rank.code is None]
    failed = [] if received else [rank for rank in ranks if rank.failed]
    if any(rank.code != 2 for rank in failed):
        asked = [rank for rank in alive if writes_stacks(rank.process.pid)]
        for rank in asked:
            rank.process.send_signal(STACKS_SIGNAL)
        if asked:
            time.sleep(STACKS_S)
    is_at_once = bool(received) or _is_one_killed(failed)
    for rank in alive:
        if is_at_once or process_status(rank.process.pid).get("State", "").startswith("T"):
            rank.process.kill()
        else:
            rank.process.terminate()
    deadline = time.monotonic() + KILL_AFTER_S
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if received or any(rank.code != 0 for rank in ranks):
        for rank in ranks:
            with suppress(ProcessLookupError):  # usually the whole process group has ended
                os.killpg(rank.process.pid, signal.SIGKILL)
    return {rank.index: _known_code(rank) for rank in ranks}


def _known_code(rank: _Rank) -> int:
    while (code := rank.code) is None:
        time.sleep(POLL_S)
    return code
