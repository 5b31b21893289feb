"""Removes files of copies in memory at random moments of one run, and says what that cost.

Nodes are those of elastic_moments.py: network namespaces with memory of their own in place of
/dev/shm. The run must go on without a start, and its next copies must be whole.

    python tests/removed_copies.py FOLDER COUNT [SEED]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_moments import NAMES, Job, job_on_nodes, largest_differences, wait_for

from hybridrl.checkpoint.manifest import read_manifest
from hybridrl.errors import CheckpointError

WHAT = {"file": 6, "copy": 2, "all": 2}  # what is removed, and how often
MAX_S = 60.0


@dataclass(frozen=True)
class Removal:
    """What was removed when ("file", "copy" or "all", of one node), and what the run said.

    `since_s` is since the run had recovered; `took_s` until two more steps and a whole newer copy.
    """

    what: str
    name: str
    phase: str
    since_s: float
    took_s: float
    said: list[str]


def whole_copy(job: Job) -> int:
    """Returns the step of the newest copy of which the nodes have all files together; 0: none."""
    folders = [path for name in NAMES for path in _memory(job, name).glob("hybridrl-*/*/step_*")]
    for step in sorted({int(path.name[5:]) for path in folders}, reverse=True):
        of_step = [path for path in folders if path.name == f"step_{step}"]
        for folder in of_step:
            with suppress(CheckpointError, OSError):
                files = read_manifest(folder)[0].files
                if all(
                    any(_size(one / name) == entry.bytes for one in of_step)
                    for name, entry in files.items()
                ):
                    return step
    return 0


def removals(job: Job, count: int, chance: random.Random) -> Iterator[Removal]:
    """Removes so often; yields what each cost."""
    wait_for(job, 2)
    for _ in range(count):
        since = chance.uniform(0.0, 4.0)
        deadline = time.monotonic() + since
        while time.monotonic() < deadline:
            job.check()
            time.sleep(0.005)
        what = chance.choices(list(WHAT), list(WHAT.values()))[0]
        before, phase, said = job.last(), job.phase(), len(_said(job))
        gone = _remove(_memory(job, chance.choice(NAMES)), what, chance)
        began, num_starts = time.monotonic(), len(job.starts())
        while job.last() < before + 2 or whole_copy(job) <= before:
            job.check()
            took = time.monotonic() - began
            assert took < MAX_S, f"{what} {gone} in {phase}: {job.last()}, {whole_copy(job)}"
            time.sleep(0.02)
        assert len(job.starts()) == num_starts, "the run was started again"
        took = time.monotonic() - began
        yield Removal(what, gone, phase, since, took, _said(job)[said:])


def _remove(memory: Path, what: str, chance: random.Random) -> str:
    """Removes something of a node's copies; returns its name."""
    while True:
        copies = sorted(memory.glob("hybridrl-*/*/step_*"))
        files = sorted(path for copy in copies for path in copy.rglob("*") if path.is_file())
        with suppress(FileNotFoundError):
            if what == "file" and files:
                file = chance.choice(files)
                file.unlink()
                return str(file.relative_to(memory))
            if what == "copy" and copies:
                folder = chance.choice(copies)
                shutil.rmtree(folder, ignore_errors=True)
                return str(folder.relative_to(memory))
            if what == "all" and copies:
                for folder in memory.iterdir():
                    shutil.rmtree(folder, ignore_errors=True)
                return "all"
        time.sleep(0.01)


def _memory(job: Job, name: str) -> Path:
    return job.nodes.home / name / "memory"


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _said(job: Job) -> list[str]:
    lines = (job.run_folder / "logs" / "rank_0.log").read_text(errors="replace").splitlines()
    return [line for line in lines if "in host memory" in line]


def main(folder: Path, count: int, seed: int = 0) -> None:
    """Prints each removal as a line of JSON, then the differences to a run without any."""
    with job_on_nodes(folder, "steps.num_steps=1000000", "run.max_restarts=1000") as job:
        for removal in removals(job, count, random.Random(seed)):
            print(json.dumps(asdict(removal)), flush=True)
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(120)
        left = [str(path) for name in NAMES for path in _memory(job, name).rglob("step_*")]
    print(
        json.dumps({"steps": job.last(), "left": left, **largest_differences(job, folder / "un")})
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]).absolute(), *map(int, sys.argv[2:]))
