"""Runs an agent as a program: a new process for each episode. Does not import torch.

A program runs in its own process group and its own empty folder. It inherits only the environment
variables in INHERITED, so that it sees no secret of the run. When it ends, or its time is over, all
processes of its group are killed and the folder is removed. A program has the rights of the run
unless a sandbox restricts it: it can read the run's files, and could leave its process group.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hybridrl.agents.tasks import AgentClocks, AgentTask, AwakeClock, Report, shorten_log
from hybridrl.config.files import parse_json
from hybridrl.errors import UserError, short
from hybridrl.rewards.outcome import LARGEST, WHERE

INHERITED = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS"),
)
POLL_S = 0.5
GRACE_S = 2.0  # time between SIGTERM and SIGKILL
MAX_RESULT_BYTES = 1 << 20
PROGRAM = "a program that ends with exit code 0"
REPORT = 'a file with a JSON object such as {"reward": 1.0}'


class Sandbox(Protocol):
    """Wraps the command of a program."""

    def command(self, command: Sequence[str], folder: Path) -> list[str]:
        """Returns the command that runs `command`, which may write only to `folder`."""


class Bubblewrap:
    """Runs a program with bubblewrap: other files are read-only, and other processes are hidden.
    The program has no capabilities, with which root could make files writable again. It shares the
    network, because it must reach the endpoint. Raises UserError if bwrap is not installed.
    """

    def __init__(self) -> None:
        if shutil.which("bwrap") is None:
            raise UserError(
                "agent.sandbox",
                "bubblewrap, but bwrap is not in PATH",
                "none, or bubblewrap if bwrap is installed",
                "Install bubblewrap, or set agent.sandbox=none.",
            )

    def command(self, command: Sequence[str], folder: Path) -> list[str]:
        own = str(folder)
        return [
            *("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *("--cap-drop", "ALL"),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", own, own, "--"),
            *command,
        ]


class EpisodeLogs:
    """Files for the output of agents, in one folder per step, which several processes may share. A
    log never fails an episode: output that cannot be written is dropped.

    Args:
        num_steps: Number of steps whose folders are kept; 0 keeps no output. Folders of later steps
            also remain, which exist if a run was resumed from an earlier step.
    """

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder, self._num_steps = folder, num_steps

    def file(self, task: AgentTask) -> Path | None:
        """Returns the file for an episode, in an existing folder; None if no output is kept."""
        if not self._num_steps:
            return None
        name = "evaluation" if task.is_evaluation else f"step_{task.step + 1:06d}"
        folder = self._folder / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            pass
        except OSError:  # the disk is full, for example
            return None
        else:
            if not task.is_evaluation:
                self._remove_before(name)
        return folder / f"sample_{task.sample}.log"

    def _remove_before(self, name: str) -> None:
        older = sorted(one for one in self._folder.glob("step_*") if one.name < name)
        for old in older[: max(0, len(older) + 1 - self._num_steps)]:
            shutil.rmtree(old, ignore_errors=True)


def scrubbed_environment(more: Mapping[str, str]) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if n in INHERITED or n.startswith("LC_")}
    return {**kept, **more}


def variables_of(task: AgentTask) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{task.base_url}/v1",
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        "ANTHROPIC_BASE_URL": task.base_url,
        "ANTHROPIC_AUTH_TOKEN": task.api_key,
        "ANTHROPIC_MODEL": task.model,
        # Claude Code would otherwise begin each conversation with a changing line.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }


class CommandRunner:
    """Starts a process for each episode.

    Args:
        command: Arguments, or one text for /bin/sh.
        timeout_s: Time limit of one episode, in seconds of `clocks`, which stand still while agents
            cannot get answers.
    """

    def __init__(
        self,
        *,
        command: str | Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        clocks: AgentClocks,
        logs: EpisodeLogs,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._command = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self._env, self._timeout_s, self._clocks = dict(env), timeout_s, clocks
        self._logs, self._sandbox = logs, sandbox
        # The kernel then ends the program if this process is killed.
        setpriv = shutil.which("setpriv")
        self._prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        self._lock = threading.Lock()
        self._stops: dict[int, threading.Event] = {}
        self._threads: set[threading.Thread] = set()

    def start(self, task: AgentTask, done: Callable[[Report], None]) -> None:
        stop = threading.Event()
        thread = threading.Thread(
            target=self._run, args=[task, done, stop], name=f"agent {task.key}", daemon=True
        )
        with self._lock:
            self._stops[task.key] = stop
            self._threads.add(thread)
        thread.start()

    def stop(self, key: int) -> None:
        with self._lock:
            stop = self._stops.get(key)
        if stop is not None:
            stop.set()

    def close(self) -> None:
        with self._lock:
            stops, threads = list(self._stops.values()), list(self._threads)
        for stop in stops:
            stop.set()
        for thread in threads:
            thread.join(GRACE_S + 2 * POLL_S)

    def _run(self, task: AgentTask, done: Callable[[Report], None], stop: threading.Event) -> None:
        # This is reported if an unexpected error ends the thread, so that nobody waits for it
        # forever.
        report = Report(failure=(f"could not be run for {WHERE}", PROGRAM))
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="hybridrl-agent-"))
            report = self._play(task, folder, stop)
        except OSError as error:
            got = f"could not be started for {WHERE}: {error.strerror}: {error.filename}"
            report = Report(failure=(got, "a program that exists"))
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            with self._lock:
                self._stops.pop(task.key, None)
            done(report)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _play(self, task: AgentTask, folder: Path, stop: threading.Event) -> Report:
        work, result = folder / "work", folder / "result.json"
        work.mkdir()
        (folder / "task.json").write_text(json.dumps(task.row, default=str), encoding="utf-8")
        own = {
            "HOME": str(work),
            "HYBRIDRL_TASK": str(folder / "task.json"),
            "HYBRIDRL_RESULT": str(result),
        }
        command, log = self._command, self._logs.file(task)
        if self._sandbox is not None:
            command = self._sandbox.command(command, folder)
        output, is_logged = _opened(log)
        with output:
            process = subprocess.Popen(
                [*self._prefix, *command],
                cwd=work,
                env=scrubbed_environment({**own, **variables_of(task), **self._env}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            clock = self._clocks.of(task.is_evaluation)
            is_late = self._wait(process, clock, stop, output.fileno())
            code = _end_group(process)
            shorten_log(output.fileno())
        where = f" (output: {log})" if is_logged else ""
        if is_late:
            got = f"took longer than {self._timeout_s:g} s for {WHERE}{where}"
            return Report(failure=(got, "at most agent.timeout_s"))
        if code:
            ended = (
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            return Report(failure=(f"{ended} on {WHERE}{where}", PROGRAM))
        return reported(result)

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        clock: AwakeClock,
        stop: threading.Event,
        log: int,
    ) -> bool:
        """Waits until the program ends or must be ended. Returns whether its time is over."""
        deadline = clock.now() + self._timeout_s
        while not stop.is_set():
            left = deadline - clock.now()
            if left <= 0:
                return True
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(left, POLL_S) + 0.001)
                return False
            shorten_log(log)
        return False


def _opened(log: Path | None) -> tuple[BinaryIO, bool]:
    """Opens a new log, or else the null device; returns the file and whether it is a log."""
    if log is not None:
        with suppress(OSError):
            log.parent.mkdir(parents=True, exist_ok=True)  # may have been removed as too old
            log.unlink(missing_ok=True)
            return open(log, "ab"), True
    return open(os.devnull, "ab"), False


def _end_group(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    _signal_group(process, signal.SIGKILL)
    return process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def reported(file: Path) -> Report:
    """Reads the reward that a program wrote; a missing file means no reward."""
    try:
        found: Any = parse_json(_content(file))
    except FileNotFoundError:
        return Report()
    except (OSError, ValueError) as error:
        got = f"wrote a file that cannot be read as JSON for {WHERE}: {error}"
        return Report(failure=(got, REPORT))
    if not isinstance(found, dict) or found.keys() - {"reward"}:
        return Report(failure=(f"wrote {short(found)} for {WHERE}", REPORT))
    return checked_report(found.get("reward"))


def _content(file: Path) -> bytes:
    """Returns a file's content; follows no link. Raises OSError or ValueError if it is unusable."""

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    with open(file, "rb", opener=opened) as content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise ValueError("not a regular file")
        data = content.read(MAX_RESULT_BYTES + 1)
    if len(data) > MAX_RESULT_BYTES:
        raise ValueError("larger than 1 MiB")
    return data


def checked_report(reward: object) -> Report:
    """Returns a report with the reward, if it is None or within float32's range, or a failure."""
    if reward is None:
        return Report()
    try:
        number = float(reward) if isinstance(reward, int | float) else math.nan
    except OverflowError:  # an integer beyond float64
        number = math.inf
    if not abs(number) <= LARGEST:
        return Report(
            failure=(f"reported the reward {short(reward)} for {WHERE}", "a finite float")
        )
    return Report(reward=number)
