"""Runs whose ranks are killed: how they are found, and one that does not come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from command_line import start

KEYS = ("reward/mean", "policy/loss", "policy/kl", "policy/grad_norm")


def wait_for(phase_file: Path, end: str) -> None:
    """Waits until a rank's phase file ends with these words."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):  # the next start removes those of the one before
            if phase_file.read_text().strip().endswith(end):
                return
        time.sleep(0.005)
    raise AssertionError(f"{phase_file} never said {end}")


def rank_process(launcher_pid: int, rank: int, world: int = 4) -> psutil.Process:
    """Returns the process of a rank: the launcher starts each in a session of its own, in turn."""
    children = psutil.Process(launcher_pid).children()
    ranks = [child for child in children if os.getsid(child.pid) == child.pid]
    assert len(ranks) == world, children
    return sorted(ranks, key=lambda child: (child.create_time(), child.pid))[rank]


def check_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Another number of ranks adds in another order: float32 sums differ by 1e-7 of themselves, and
    losses are means of a few hundred terms of about 1.
    """
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for key in KEYS:
        differences = [abs(a[key] - b[key]) for a, b in zip(found, expected, strict=True)]
        print(f"{key}: largest difference {max(differences):.2g}")
        assert max(differences) < 1e-5, key


def lose_a_rank(
    arguments: Sequence[str | Path], folder: Path, rank: int, world: int = 4
) -> tuple[str, float]:
    """Runs the quickstart with a rank killed for good in step 4; returns output and seconds."""
    broken = folder / "broken"
    process = start(
        [*arguments, "run.max_restarts=3", "--world", str(world)],
        {"LOST_RANKS": str(broken)},
    )
    try:
        logs = folder / "quickstart-grpo" / "logs"
        wait_for(logs / f"rank_{rank}.phase", "update, step 4")
        broken.write_text(f"{world} {rank}")
        os.kill(rank_process(process.pid, rank, world).pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(logs / "rank_0.phase", "step 6")
        took = time.monotonic() - killed
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    print(f"training went on after {took:.1f} s")
    return output, took
