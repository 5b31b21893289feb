"""A job on several hosts loses ranks and hosts, goes on without them, and takes hosts in again.

Hosts are names of this machine, reached by a script in place of ssh. A file takes a host away.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from command_line import QUICKSTART, run, start
from small_runs import SMALL

HOSTS = ("localhost", "127.0.0.1", "127.0.0.2")
STUB = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ -e "$0.$1.down" ] && { echo "ssh: connect to host $1: No route to host" >&2; exit 255; }
exec env -u HYBRIDRL_CACHE sh -c "$2"
"""
KNOBS = (
    *SMALL,
    "steps.prompts_per_step=12",
    "train.lr_schedule=constant",  # the same whatever steps.num_steps is
    "checkpoint.every=1",
    "checkpoint.keep=3",
    "run.max_restarts=5",
)
KEYS = ("reward/mean", "policy/loss", "policy/grad_norm")


class Hosts:
    """Three hosts and a job on them."""

    def __init__(self, folder: Path, slots: int = 1) -> None:
        self.folder, self.ssh, self.runs = folder, folder / "ssh", folder / "runs"
        self.ssh.write_text(STUB)
        self.ssh.chmod(0o755)
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("".join(f"{host} slots={slots}\n" for host in HOSTS))
        self.run_folder = self.runs / "quickstart-grpo"

    def down_file(self, host: str) -> Path:
        return Path(f"{self.ssh}.{host}.down")

    @contextmanager
    def job(self, *knobs: str) -> Iterator[subprocess.Popen[str]]:
        given = [QUICKSTART / "grpo.yaml", *KNOBS, f"run.dir={self.runs}", *knobs]
        process = start(["launch", "--hostfile", self.hostfile, "--ssh", str(self.ssh), *given])
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def kill_host(self, job: subprocess.Popen[str], index: int, is_down: bool = True) -> None:
        """Kills all that runs on a host, which answers no more."""
        if is_down:
            self.down_file(HOSTS[index]).touch()
        nodes = [p for p in psutil.Process(job.pid).children() if "launch.node" in str(p.cmdline())]
        nodes.sort(key=lambda one: (one.create_time(), one.pid))
        for process in [nodes[index], *nodes[index].children(recursive=True)]:
            process.kill()

    def records(self) -> list[dict[str, float]]:
        file = self.run_folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def sizes(self) -> list[int]:
        """The number of ranks of each start."""
        file = self.run_folder / "run.json"
        return [one["world_size"] for one in json.loads(file.read_text())["starts"]]

    def wait(self, job: subprocess.Popen[str], is_so: Callable[[], bool], for_s: float) -> float:
        """Waits until something is so; returns how long it took, seconds."""
        begun = time.monotonic()
        while not is_so():
            assert job.poll() is None and time.monotonic() - begun < for_s, self.logs()
            time.sleep(0.05)
        return time.monotonic() - begun

    def logs(self) -> str:
        logs = sorted((self.run_folder / "logs").glob("*.log"))
        return "\n".join(f"{one}\n{one.read_text()[-1500:]}" for one in logs)

    def went_on(self, job: subprocess.Popen[str], size: int) -> float:
        """Waits for two steps of a start with so many ranks; returns how long it took."""
        done = len(self.records())

        def is_so() -> bool:
            found = self.records()
            return self.sizes()[-1] == size and len(found) > 1 and found[-1]["step"] > done + 1

        return self.wait(job, is_so, 120)


def check_same(found: list[dict[str, float]], folder: Path) -> None:
    """Compares with a run of one rank that nothing happened to."""
    knobs = (*KNOBS, f"steps.num_steps={len(found)}", "checkpoint.every=0")
    run("train", QUICKSTART / "grpo.yaml", *knobs, f"run.dir={folder}", "--world", "1")
    lines = (folder / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    expected = [json.loads(line) for line in lines]
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for key in KEYS:
        most = max(abs(a[key] - b[key]) for a, b in zip(found, expected, strict=True))
        print(f"{key}: largest difference {most:.2g} in {len(found)} steps")
        assert most < 1e-5, key


@pytest.mark.dist
@pytest.mark.full
def test_a_job_goes_on_without_a_host_and_takes_it_in_again(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    with hosts.job("steps.num_steps=100000") as job:
        hosts.wait(job, lambda: len(hosts.records()) > 2, 120)
        hosts.kill_host(job, 2)
        took = [hosts.went_on(job, 2)]
        hosts.down_file(HOSTS[2]).unlink()
        took.append(hosts.went_on(job, 3))
        hosts.kill_host(job, 0)  # the host of rank 0 and of the job's store
        took.append(hosts.went_on(job, 2))
        hosts.kill_host(job, 1, is_down=False)  # answers at once, of two that are left
        took.append(hosts.went_on(job, 2))
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
    print(f"training went on after {', '.join(f'{one:.1f}' for one in took)} s")
    assert job.returncode == 143, output[-4000:]
    assert (
        "are reachable again: continuing with 3 ranks on localhost, 127.0.0.1, 127.0.0.2" in output
    )
    assert (
        "restart 2 of 5 (run.max_restarts): continuing with 2 ranks on 127.0.0.1, 127.0.0.2"
        in output
    )
    assert hosts.sizes() == [3, 2, 3, 2, 2] and max(took) < 60
    check_same(hosts.records(), tmp_path / "unbroken")


@pytest.mark.dist
@pytest.mark.full
def test_a_host_that_every_layout_needs_is_waited_for(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    with hosts.job("steps.num_steps=100000", "train.pp=3") as job:
        hosts.wait(job, lambda: len(hosts.records()) > 2, 120)
        hosts.kill_host(job, 1)
        time.sleep(8)
        assert job.poll() is None and hosts.sizes() == [3]
        hosts.down_file(HOSTS[1]).unlink()
        took = hosts.went_on(job, 3)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
    print(f"training went on after {took:.1f} s")
    assert "no layout fits without 127.0.0.1: waiting" in output
    assert job.returncode == 143 and took < 60, output[-4000:]
