"""Ranks of several hosts as real processes, with a script in place of ssh and of training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridrl.services.launch import connections, hosts_job
from hybridrl.services.launch.connections import Host
from hybridrl.services.launch.hosts import SshCluster, shares
from hybridrl.services.launch.hosts_job import HostsJob
from hybridrl.services.launch.restarts import ElasticLaunch

# ssh OPTIONS HOST COMMAND; a host whose file is there does not answer.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ -e "$(dirname "$0")/down_$1" ] && exit 255
exec sh -c "$2"
"""
# A rank: prints where it is; in the first start the rank of a file `WHAT_RANK` does that.
RANK = """
import os, signal, sys, time
from pathlib import Path
from hybridrl.errors import UserError
from hybridrl.parallel.failure import Failure, report

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def act(what):
    file = folder / f"{what}_{rank}"
    return file.exists() and (file.unlink() or True)
print("world", os.environ["WORLD_SIZE"], flush=True)
def stopped(number, frame):
    os._exit(128 + number)
signal.signal(signal.SIGTERM, stopped)
(folder / f"started_{rank}_{os.getpid()}").touch()
if act("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
if act("lose"):
    os.kill(os.getppid(), signal.SIGKILL)
if act("refuse"):
    report(Failure.of(UserError("reward", "x", "y", "Correct it.")))
    os._exit(2)
if act("error"):
    report(Failure.of(RuntimeError("boom")))
    os._exit(1)
if (folder / f"wait_{rank}").exists():
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    monkeypatch.setattr(hosts_job, "PROGRAM", (str(program),))
    monkeypatch.setattr(hosts_job, "WAIT_S", 0.1)
    monkeypatch.setattr(connections, "KILL_AFTER_S", 1.0)
    monkeypatch.setattr(hosts_job, "BACK_S", 20.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return tmp_path


def launch(folder: Path, max_restarts: int = 0, least: int = 1) -> int:
    """Runs a rank on each of two hosts; `least` ranks can train too. Returns the exit code."""
    hosts = [Host("localhost", 1), Host("127.0.0.1", 1)]
    cluster = SshCluster(hosts, [str(folder / "ssh")])
    fits = (lambda size: size >= least) if max_restarts else None
    job = HostsJob(cluster, hosts, shares(hosts, 2, "127.0.0.1", 0), None, fits)
    logs = folder / "logs"
    logs.mkdir()
    return ElasticLaunch(max_restarts, job)([str(folder)], 2, logs)


@pytest.mark.parametrize(
    ("does", "code", "told"),
    [
        ("kill", 1, "rank 1 on host"),
        ("error", 1, "boom"),
        ("refuse", 2, "reward: got x; allowed: y. Correct it."),
        ("lose", 1, "the connection to host 127.0.0.1"),
        ("", 0, ""),
    ],
)
def test_the_end_of_a_host_s_rank_is_that_of_the_job(
    does: str, code: int, told: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if does:
        (folder / f"{does}_1").touch()
        (folder / "wait_0").touch()
    began = time.monotonic()
    assert launch(folder) == code
    said = capfd.readouterr()
    assert told in said.err and said.out.startswith("world 2")
    assert time.monotonic() - began < 30
    assert sorted(one.name for one in (folder / "logs").glob("*.log")) == [
        "rank_0.log",
        "rank_1.log",
    ]


@pytest.mark.parametrize(("does", "worlds"), [("kill", "22"), ("lose", "22"), ("down", "21")])
def test_lost_ranks_start_again_on_the_hosts_that_answer(
    does: str, worlds: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / f"{'lose' if does == 'down' else does}_1").touch()
    if does == "down":

        def goes_down() -> None:
            while not list(folder.glob("started_1_*")):
                time.sleep(0.01)
            (folder / "down_127.0.0.1").touch()

        threading.Thread(target=goes_down).start()
    assert launch(folder, max_restarts=1) == 0
    said = capfd.readouterr()
    assert "".join(line[-1] for line in said.out.splitlines()) == worlds
    assert "restart 1 of 1 (run.max_restarts)" in said.err


def test_an_error_of_its_own_is_not_started_again(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "error_1").touch()
    assert launch(folder, max_restarts=3) == 1
    assert "restart" not in capfd.readouterr().err


def test_a_signal_reaches_the_ranks_of_all_hosts(folder: Path) -> None:
    for rank in range(2):
        (folder / f"wait_{rank}").touch()

    def stop() -> None:
        while len(list(folder.glob("started_*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    assert launch(folder, max_restarts=1) == 143


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_host_that_every_layout_needs_is_waited_for(
    is_stopped: bool, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down = folder / "down_127.0.0.1"
    (folder / "lose_1").touch()

    def act() -> None:
        while not list(folder.glob("started_1_*")):
            time.sleep(0.01)
        down.touch()
        time.sleep(3.0)
        if is_stopped:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            down.unlink()

    threading.Thread(target=act).start()
    assert launch(folder, max_restarts=1, least=2) == (130 if is_stopped else 0)
    assert "no layout fits without 127.0.0.1: waiting" in capfd.readouterr().err


def test_ranks_end_with_their_launcher(folder: Path) -> None:
    for rank in range(2):
        (folder / f"wait_{rank}").touch()
    code = (
        f"import test_hosts_job as t; from pathlib import Path; folder = Path({str(folder)!r}); "
        "t.hosts_job.PROGRAM = (str(folder / 'rank.py'),); t.launch(folder)"
    )
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    variables = {**os.environ, "PYTHONPATH": paths}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=variables)
    while len(pids := [int(f.name.split("_")[2]) for f in folder.glob("started_*")]) < 2:
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
