"""Starts the ranks of a multi-process test as torchrun would; shows their output if one fails."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAIL_LINES = 40


def run_ranks(world: int, module_or_script: str, args: Sequence[str], timeout_s: float) -> None:
    """Runs `world` processes of a script (`*.py`) or module until all end within `timeout_s`.

    Raises AssertionError with the end of each rank's output if one fails or is late.
    """
    is_script = module_or_script.endswith(".py")
    command = [sys.executable, *([] if is_script else ["-m"]), module_or_script, *args]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank_{rank}.log" for rank in range(world)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                environment = _environment(rank, world, port)
                with log.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            cwd=ROOT,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL,
                        )
                    )
            codes = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(code != 0 for code in codes):
            tails = "\n".join(
                f"--- rank {i}, exit {codes[i]}\n{_tail(log)}" for i, log in enumerate(logs)
            )
            raise AssertionError(f"{' '.join(command[1:])} failed:\n{tails}")


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Returns the exit codes once all ended, one failed, or time is up (None: running)."""
    while True:
        codes = [process.poll() for process in ranks]
        is_over = all(code is not None for code in codes) or any(code for code in codes)
        if is_over or time.monotonic() > deadline:
            if any(code for code in codes):
                time.sleep(2)  # the other ranks say what they saw
                codes = [process.poll() for process in ranks]
            return codes
        time.sleep(0.05)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def free_port() -> int:
    """Returns a free port that the system does not hand out by itself."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
