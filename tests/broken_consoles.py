"""Breaks the console of one run after another at random moments, and says how the runs ended.

    python tests/broken_consoles.py FOLDER COUNT [SEED [WAY...]]

Each run has two ranks and prints much. It is to end with the right exit code, and with a checkpoint
of its last step.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_starts
from command_line import QUICKSTART, ROOT
from launch import free_port
from scripted_reward import digits
from small_runs import SMALL

NUM_STEPS = 40
KNOBS = (
    *SMALL,
    "log.console=true",
    "log.rollouts_every=1",
    f"steps.num_steps={NUM_STEPS}",
    "reward.function=broken_consoles:noisy",
)
END_S = 60.0


def noisy(prompt: str, response: str, columns: Mapping[str, Any]) -> float:
    """A reward that prints: a rank whose output nobody takes away waits soon."""
    print("o" * 200, flush=True)
    print("e" * 4000, file=sys.stderr, flush=True)
    return digits(prompt, response, columns)


@dataclass
class Started:
    """A run, and this side of its console; `console` is None if this side is closed."""

    process: subprocess.Popen[bytes]
    console: int | None
    is_read: bool = True


def by_pipe(command: list[str], to_stdout: bool = True, to_stderr: bool = True) -> Started:
    """Starts a run whose console is a pipe that is read."""
    reads, writes = os.pipe()
    process = popen(
        command,
        stdout=writes if to_stdout else subprocess.DEVNULL,
        stderr=writes if to_stderr else subprocess.DEVNULL,
    )
    os.close(writes)
    return Started(process, reads)


def by_terminal(command: list[str], is_nohup: bool = False) -> Started:
    """Starts a run as the leader of a session with a terminal, as a shell's."""
    master, terminal = pty.openpty()
    if is_nohup:
        command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command]
    command = ["setsid", "--ctty", *command]
    process = popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    return Started(process, master)


def under_torchrun(command: list[str]) -> Started:
    """Starts a run whose ranks are started by torchrun, with a pipe that is read."""
    python, m, module, *arguments = command
    at = arguments.index("--world")
    del arguments[at : at + 2]
    torchrun = [python, m, "torch.distributed.run", "--nproc-per-node=2"]
    return by_pipe([*torchrun, f"--master-port={free_port()}", m, module, *arguments])


def on_full_disk(command: list[str]) -> Started:
    """Starts a run whose output goes to files on a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    started = Started(popen(command, stdout=full, stderr=full), os.open("/dev/null", os.O_RDONLY))
    os.close(full)
    return started


def popen(command: list[str], **streams: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
        ),
    }
    streams.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)  # type: ignore[call-overload,no-any-return]


def close(run: Started) -> None:
    """The other side of the console goes away."""
    assert run.console is not None
    os.close(run.console)
    run.console = None


def close_and_send(number: int) -> Callable[[Started], None]:
    """The other side goes away, and a signal comes, as by Ctrl-C before `| tee log`."""

    def act(run: Started) -> None:
        close(run)
        run.process.send_signal(number)

    return act


def stop_reading(run: Started) -> None:
    """Nobody reads any more, and nothing is closed, as by `| less`."""
    run.is_read = False


@dataclass(frozen=True)
class Way:
    """How a console breaks; the run must end with `code`, 0 after all its steps."""

    start: Callable[[list[str]], Started]
    act: Callable[[Started], None]
    code: int


WAYS = {
    "Ctrl-C, | tee": Way(by_pipe, close_and_send(signal.SIGINT), 130),
    "| head": Way(lambda command: by_pipe(command, to_stderr=False), close, 0),
    "2> closed pipe": Way(lambda command: by_pipe(command, to_stdout=False), close, 0),
    "terminal closed": Way(by_terminal, close, 143),
    "nohup, terminal closed": Way(lambda command: by_terminal(command, is_nohup=True), close, 0),
    "full disk, SIGTERM": Way(
        on_full_disk, lambda run: run.process.send_signal(signal.SIGTERM), 143
    ),
    "full disk": Way(on_full_disk, lambda run: None, 0),
    "| less": Way(by_pipe, stop_reading, 0),
    "torchrun 2>&1 | head": Way(under_torchrun, close, 0),
}


@dataclass(frozen=True)
class Ended:
    """How a run ended: code 128 + N after signal N, steps in metrics.jsonl, newest checkpoint."""

    code: int
    steps: int
    saved: int | None
    took_s: float

    def is_right(self, way: Way) -> bool:
        """Whether the run ended so and lost no step; a signal may come too late to stop it."""
        is_done = self.code == 0 and self.steps == NUM_STEPS
        is_stopped = self.code == way.code != 0
        return (is_done or is_stopped) and self.steps == (self.saved or 0)


def ended_run(folder: Path, way: Way, moment_s: float, *knobs: str) -> Ended:
    """Trains a run and breaks its console `moment_s` after its ranks were started."""
    run_folder = folder / "quickstart-grpo"
    command = [sys.executable, "-m", "hybridrl.cli.main", "train", str(QUICKSTART / "grpo.yaml")]
    run = way.start([*command, "--world", "2", *KNOBS, f"run.dir={folder}", *knobs])
    assert run.console is not None
    os.set_blocking(run.console, False)
    try:
        log = run_folder / "logs" / "rank_0.log"
        until(run, 60, log.exists)
        until(run, moment_s)
        way.act(run)
        acted = time.monotonic()
        until(run, END_S)
        assert run.process.poll() is not None, f"it does not end; {log.read_text()[-2000:]}"
    finally:
        run.process.kill()
        code = run.process.wait()
        if run.console is not None:
            os.close(run.console)
    lines = run_folder / "metrics.jsonl"
    steps = (
        [json.loads(line)["step"] for line in lines.read_text().splitlines()]
        if lines.exists()
        else []
    )
    checkpoints = (run_folder / "checkpoints").glob("step_*")
    saved = max((int(one.name.removeprefix("step_")) for one in checkpoints), default=None)
    assert steps == sorted(set(steps)), steps
    return Ended(
        128 - code if code < 0 else code, max(steps, default=0), saved, time.monotonic() - acted
    )


def until(run: Started, timeout_s: float, is_met: Callable[[], bool] = lambda: False) -> None:
    """Reads the console until the run ends, or something is met, or for so long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and run.process.poll() is None and not is_met():
        with suppress(BlockingIOError, OSError):
            while run.console is not None and run.is_read and os.read(run.console, 65536):
                pass
        time.sleep(0.02)


def whole_s(folder: Path, start: Callable[[list[str]], Started]) -> float:
    """Returns how long a run takes from the start of its ranks whose console stays."""
    way = Way(start, lambda run: None, 0)
    ended = ended_run(folder, way, 0)
    assert ended.is_right(way), ended
    return ended.took_s


def main() -> None:
    fork_starts.install(ROOT)
    folder, count = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    chance = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    for number, name in enumerate(sys.argv[4:] or WAYS):
        way = WAYS[name]
        found = []
        longest = whole_s(folder / f"{number}_whole", way.start)
        print(f"{name}: a run takes {longest:.1f} s from the start of its ranks")
        for index in range(count):
            moment_s = chance.uniform(0, longest)
            try:
                ended = ended_run(folder / f"{number}_{index}", way, moment_s)
                found.append(ended.is_right(way))
                print(f"{name}: after {moment_s:.2f} s: {ended}", "" if found[-1] else "WRONG")
            except AssertionError as error:
                found.append(False)
                print(f"{name}: after {moment_s:.2f} s: WRONG: {error}")
        print(f"{name}: {sum(found)} of {count} as they should be", flush=True)


if __name__ == "__main__":
    main()
