"""Locks a run folder, so that only one run uses it at a time. No torch.

The file `run.lock` names the process that holds the lock. If this process can look up the holder
(on the same host since the same boot, in the same process namespace), the lock is stale when the
holder no longer exists. Otherwise it is stale when the holder has not touched the file for STALE_S,
by the clock of the file system, or if an earlier start of the same Slurm job created it, because
Slurm ends a job before it restarts the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hybridrl.config.files import parse_json
from hybridrl.errors import UserError

if TYPE_CHECKING:  # the launcher also locks folders, and must not import torch
    from hybridrl.parallel.groups import World

LOCK_FILE = "run.lock"
LOCK_TOKEN = "HYBRIDRL_LOCK_TOKEN"  # environment variable with the token of the launcher's lock
TOUCH_S = 10.0
STALE_S = 90.0
SETTLE_S = 0.5  # wait after replacing a stale lock
START_TOLERANCE_S = 2.0  # maximum difference between two readings of a process's start time

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock on a run folder."""

    host: str
    pid: int
    process_start: float  # start time of the process, in seconds since the epoch
    namespace: str  # identifier of the boot and the process namespace in which `pid` is valid
    since: str  # time at which the process locked the folder, shown in messages
    token: str  # identifier of this lock
    job: str = ""  # Slurm job of the process, or empty, and how often Slurm had restarted it
    restarts: int = 0

    @staticmethod
    def here() -> Holder:
        own = psutil.Process()
        since, token = time.strftime("%F %T %z"), secrets.token_hex(8)
        host, job = socket.gethostname(), _slurm_job()
        return Holder(host, own.pid, own.create_time(), _namespace(), since, token, *job)

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"

    @property
    def is_this_process(self) -> bool:
        return self.namespace == _namespace() and self.pid == os.getpid() and self._runs()

    def _runs(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.process_start) < START_TOLERANCE_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def is_stale(self, folder: Path) -> bool:
        """Whether the holder no longer exists, by the clock of the folder's file system."""
        if self.namespace == _namespace():
            return not self._runs()
        job, restarts = _slurm_job()
        if job and job == self.job and restarts > self.restarts:
            return True
        return _age_s(folder) > STALE_S


class RunLock:
    """Locks a run folder from `acquire` to `release`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / LOCK_FILE
        self._own: Holder | None = None
        self._ended = threading.Event()

    def acquire(self, notify: Notify) -> bool:
        """Locks the folder, unless this object or this process's launcher has locked it. Returns
        whether the caller must release it. Tells `notify` if a stale lock is replaced. Raises
        UserError if another run uses the folder.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        found = holder(self._folder)
        if self._own is not None or (found and found.token == os.environ.get(LOCK_TOKEN)):
            self.check()
            return False
        if found is not None and not found.is_this_process:
            if not found.is_stale(self._folder):
                raise _in_use(self._folder, found)
            notify(f"taking over {self._folder}: {found} no longer runs")
        self._replace(found)
        touching = threading.Thread(target=self._touch, name="run lock", daemon=True)
        self._ended.clear()
        touching.start()
        return True

    @contextlib.contextmanager
    def held(self, world: World, notify: Notify) -> Iterator[None]:
        """Rank 0 locks the folder during a block, unless the job has locked it. Collective."""
        with world.all_agree("taking the run folder"):
            is_taken = world.rank == 0 and self.acquire(notify)
        try:
            yield
        finally:
            if is_taken:
                self.release()

    def _replace(self, found: Holder | None) -> None:
        """Writes the lock file, replacing a stale file. If several processes find the same stale
        lock, one succeeds: they take turns, and all but the first find a new lock. On file systems
        that cannot lock directories, the process whose lock file still exists after SETTLE_S
        succeeds.
        """
        own = Holder.here()
        with _in_turn(self._folder):
            now = holder(self._folder)
            if now is not None and (found is None or now.token != found.token):
                raise _in_use(self._folder, now)
            text = json.dumps(asdict(own))
            if now is None:
                try:
                    with self._file.open("x", encoding="utf-8") as file:
                        file.write(text)
                except FileExistsError:  # another process was faster
                    raise _in_use(self._folder, holder(self._folder)) from None
            else:
                written = self._file.with_name(f"{LOCK_FILE}.{own.token}")
                written.write_text(text, encoding="utf-8")
                written.replace(self._file)
        if found is not None:
            time.sleep(SETTLE_S)
            now = holder(self._folder)
            if now is None or now.token != own.token:
                raise _in_use(self._folder, now)
        self._own = own

    def _touch(self) -> None:
        """Updates the lock file's modification time, unless it now belongs to another run."""
        while not self._ended.wait(TOUCH_S):
            # Use the descriptor, because another run may replace the file at any time.
            with contextlib.suppress(OSError), self._file.open("rb") as file:
                content = file.read().decode(errors="replace")
                if self._own is None or self._own.token in content:
                    os.utime(file.fileno())

    @property
    def token(self) -> str:
        """Token of the lock. The launcher passes it to the ranks in the variable LOCK_TOKEN."""
        assert self._own is not None
        return self._own.token

    def check(self) -> None:
        """Raises a UserError if another run has locked the folder, as after a long suspension."""
        found = holder(self._folder)
        wanted = os.environ.get(LOCK_TOKEN) if self._own is None else self._own.token
        if wanted is not None and found is not None and found.token != wanted:
            raise _in_use(self._folder, found)

    def release(self) -> None:
        if self._own is None:
            return
        self._ended.set()
        found = holder(self._folder)
        if found is not None and found.token == self._own.token:
            self._file.unlink(missing_ok=True)
        self._own = None


def holder(folder: Path) -> Holder | None:
    """Returns the holder of a run folder's lock, even if it is stale; None without a lock."""
    return _read(folder / LOCK_FILE)


def check_free(folder: Path) -> None:
    """Raises a UserError if a run is using the folder."""
    found = holder(folder)
    if found is None or found.token == os.environ.get(LOCK_TOKEN) or found.is_this_process:
        return
    if not found.is_stale(folder):
        raise _in_use(folder, found)


def _read(file: Path) -> Holder | None:
    for _ in range(20):  # a lock file is empty while it is being written
        try:
            return Holder(**parse_json(file.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):  # creating the folder reports the error
            return None
        except (ValueError, TypeError, OSError):
            time.sleep(0.02)
    raise UserError(
        str(file),
        "a file that is not a run's lock",
        "a lock file that hybridrl wrote",
        f"If no run is in {file.parent}, delete the file.",
    )


@contextlib.contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Lets one process at a time run its block, if the file system can lock directories."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _in_use(folder: Path, found: Holder | None) -> UserError:
    return UserError(
        "run.dir and run.name",
        f"{folder}, which another run is using: {found or 'it has just begun'}",
        "a run folder that no other run is using",
        f"Wait for it, stop it, or choose another run.name. If it no longer runs, delete "
        f"{folder / LOCK_FILE}.",
    )


def _age_s(folder: Path) -> float:
    """Returns the seconds since the lock file was touched, by the clock of the file system."""
    probe = folder / f"{LOCK_FILE}.{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime - (folder / LOCK_FILE).stat().st_mtime
    except FileNotFoundError:  # the lock was released in the meantime
        return STALE_S + 1
    finally:
        probe.unlink(missing_ok=True)


def _slurm_job() -> tuple[str, int]:
    """Returns the id of this process's Slurm job, or "", and how often it was restarted."""
    number, count = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return f"{cluster} {number}" if number else "", int(count) if count.isdecimal() else 0


def _namespace() -> str:
    """Identifies the boot and the process namespace in which process ids are valid."""
    found = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            text = os.readlink(path) if path.endswith("pid") else Path(path).read_text("ascii")
        except OSError:  # not Linux
            text = socket.gethostname()
        found.append(text.strip())
    return " ".join(found)
