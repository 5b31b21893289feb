"""Kills ranks and whole nodes at random moments of one run, and says what that cost.

Nodes are network namespaces with memory of their own in place of /dev/shm; whoever kills one also
empties that, and some answer again only after a while.

    python tests/elastic_moments.py FOLDER COUNT [SEED]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from command_line import QUICKSTART, run, start
from network_nodes import Nodes, network_nodes
from small_runs import SMALL

NAMES = ("node-a", "node-b", "node-c")
KNOBS = (
    *SMALL,
    "steps.prompts_per_step=6",
    "rollout.engine=hf",
    "rollout.max_new_tokens=12",
    "train.learning_rate=1e-3",
    "train.lr_schedule=constant",  # the same whatever steps.num_steps is
    "checkpoint.copy_every=1",
    "checkpoint.every=10",
    "checkpoint.keep=2",
)
KEYS = ("reward/mean", "policy/loss", "policy/grad_norm")
AWAY_S = 25.0  # of a node that does not answer at once


@dataclass(frozen=True)
class Moment:
    """What was killed when, and what followed.

    Seconds: `since_s` the loss before, `took_s` until a step was finished again. `what` is "rank",
    "node" or "node, away"; `ranks` are those that went on; `lost_steps` were taken again.
    `num_losses` is 2 if a rank of another node was killed during a start: its node is left out.
    """

    what: str
    name: str
    phase: str
    since_s: float
    took_s: float
    ranks: int
    lost_steps: int
    num_losses: int


class Job:
    """A run on three nodes, with its files in `folder`; `nodes` are up."""

    def __init__(self, folder: Path, nodes: Nodes, *knobs: str) -> None:
        self.nodes, self.run_folder = nodes, folder / "runs" / "quickstart-grpo"
        self._away: dict[str, float] = {}
        given = [QUICKSTART / "grpo.yaml", *KNOBS, f"run.dir={folder / 'runs'}", *knobs]
        self.output = (folder / "output").open("w+")
        where = ["--hostfile", nodes.hostfile, "--ssh", str(nodes.ssh)]
        self.process = start(["launch", *where, *given], output=self.output)

    def records(self) -> list[dict[str, float]]:
        with suppress(OSError, ValueError):
            lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []

    def starts(self) -> list[dict[str, int]]:
        with suppress(OSError, ValueError):
            found: list[dict[str, int]] = json.loads((self.run_folder / "run.json").read_text())[
                "starts"
            ]
            return found
        return []

    def last(self) -> int:
        found = self.records()
        return int(found[-1]["step"]) if found else 0

    def phase(self) -> str:
        with suppress(OSError):
            return (self.run_folder / "logs" / "rank_0.phase").read_text().strip() or "start"
        return "start"

    def check(self) -> None:
        code = self.process.poll()
        self.output.flush()
        assert code is None, f"exit {code}:\n{Path(self.output.name).read_text()[-6000:]}"
        for name, until in list(self._away.items()):
            if time.monotonic() > until:
                del self._away[name]
                (self.nodes.home / f"{name}.away").rename(self.nodes.home / name)

    def up(self) -> list[str]:
        """Nodes on which ranks run."""
        return [name for name in self.nodes.names if name not in self._away and self._ranks(name)]

    def _processes(self, name: str) -> Iterator[psutil.Process]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.nodes.prefix + name],
            capture_output=True,
            text=True,
            check=False,
        )
        for pid in listed.stdout.split():
            with suppress(psutil.Error):
                yield psutil.Process(int(pid))

    def _ranks(self, name: str) -> list[psutil.Process]:
        found = []
        for process in self._processes(name):
            with suppress(psutil.Error):
                if "RANK" in process.environ() and "cli.main" in str(process.cmdline()):
                    found.append(process)
        return found

    def kill(self, what: str, name: str) -> None:
        """Kills a rank of a node, or the node with its memory."""
        if what == "rank":
            for process in self._ranks(name)[:1]:
                process.kill()
            return
        if what == "node, away":
            home = self.nodes.home / name
            home.rename(self.nodes.home / f"{name}.away")
            self._away[name] = time.monotonic() + AWAY_S
        for process in self._processes(name):
            with suppress(psutil.Error):
                process.kill()
        homes = [home for end in ("", ".away") if (home := self.nodes.home / (name + end)).exists()]
        for path in (homes[0] / "memory").iterdir():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def job_on_nodes(folder: Path, *knobs: str) -> Iterator[Job]:
    """Starts a run on three nodes, and ends it."""
    with network_nodes(NAMES, folder / "nodes") as nodes:
        for name in NAMES:
            (nodes.home / name / "memory").mkdir()
            nodes.spoil(name, f"mount --bind {nodes.home / name / 'memory'} /dev/shm")
        job = Job(folder, nodes, *knobs)
        try:
            yield job
        finally:
            job.output.flush()
            job.process.kill()
            job.process.wait()


def moments(job: Job, count: int, chance: random.Random) -> Iterator[Moment]:
    """Kills so often; yields each loss. One in four follows soon, while ranks are being started."""
    wait_for(job, 2)
    for number in range(count):
        since = chance.uniform(0, 12) if number % 4 == 3 else chance.uniform(0.5, 6)
        begun = time.monotonic()
        while time.monotonic() - begun < since:
            job.check()
            time.sleep(0.02)
        while not (up := job.up()):
            job.check()
            time.sleep(0.02)
        what = chance.choices(("rank", "node", "node, away"), (5, 3, 2))[0]
        if what == "node, away" and len(job.up()) < 3:
            what = "node"
        name, phase = chance.choice(up), job.phase()
        num_starts, before, killed = len(job.starts()), job.last(), time.monotonic()
        job.kill(what, name)
        before, num_losses = max(before, job.last()), 1
        if number % 4 == 2:  # the next one comes while ranks are started
            is_in_start = chance.uniform(2, 10)
            while time.monotonic() - killed < is_in_start:
                job.check()
                time.sleep(0.02)
            again = job.up()
            if again:
                num_losses = 2
                job.kill("rank", chance.choice(again))
        while len(job.starts()) == num_starts or job.last() <= job.starts()[-1]["after_step"]:
            job.check()
            assert time.monotonic() - killed < 300, Path(job.output.name).read_text()[-6000:]
            time.sleep(0.02)
        took, new = time.monotonic() - killed, job.starts()[num_starts:]
        lost = before - min(one["after_step"] for one in new)
        ranks = new[-1]["world_size"]
        yield Moment(what, name, phase, since, took, ranks, lost, num_losses)


def wait_for(job: Job, step: int) -> None:
    deadline = time.monotonic() + 240
    while job.last() < step:
        job.check()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def largest_differences(
    job: Job, folder: Path, world: int = 1, *knobs: str, keys: Sequence[str] = KEYS
) -> dict[str, float]:
    """Returns the differences in metrics `keys` to a run of `world` ranks without losses."""
    found = job.records()
    ends = (f"steps.num_steps={len(found)}", f"run.dir={folder}", "checkpoint.every=0")
    given = (*KNOBS, *knobs, *ends, "--world", str(world))
    run("train", QUICKSTART / "grpo.yaml", *given, timeout_s=600)
    lines = (folder / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    expected = [json.loads(line) for line in lines]
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    return {
        key: max(abs(a[key] - b[key]) for a, b in zip(found, expected, strict=True)) for key in keys
    }


def main(folder: Path, count: int, seed: int = 0) -> None:
    """Prints each moment as a line of JSON, then the differences."""
    knobs = ("steps.num_steps=1000000", "run.max_restarts=1000")
    with job_on_nodes(folder, *knobs) as job:
        for moment in moments(job, count, random.Random(seed)):
            print(json.dumps(asdict(moment)), flush=True)
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(120)
    print(json.dumps({"steps": job.last(), **largest_differences(job, folder / "unbroken")}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]).absolute(), *map(int, sys.argv[2:]))
