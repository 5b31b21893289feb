"""What a run folder says of a run whose ranks are started again."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path


def steps_and_sizes(folder: Path) -> tuple[list[int], list[int]]:
    """Returns the steps that a run has recorded, and the number of ranks of each start."""
    file, about = folder / "metrics.jsonl", folder / "run.json"
    if not file.exists() or not about.exists():
        return [], []
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
    sizes = [one["world_size"] for one in json.loads(about.read_text())["starts"]]
    return [json.loads(line)["step"] for line in lines], sizes


def went_on(job: subprocess.Popen[str], folder: Path, sizes: list[int]) -> float:
    """Waits for starts of so many ranks and two more steps; returns the seconds."""
    done, begun = len(steps_and_sizes(folder)[0]), time.monotonic()
    while True:
        assert job.poll() is None and time.monotonic() - begun < 120, steps_and_sizes(folder)
        steps, found = steps_and_sizes(folder)
        if found == sizes and steps and steps[-1] > done + 1:
            return time.monotonic() - begun
        time.sleep(0.05)
