"""`hybridrl launch --ray` on a cluster of two raylets, each on a node with one CPU slot."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_line import QUICKSTART, ROOT, exported_weights, run
from network_nodes import CAN_MAKE, Nodes, network_nodes
from restarted_runs import steps_and_sizes, went_on
from small_runs import SMALL

pytestmark = pytest.mark.dist
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or not CAN_MAKE, reason="needs Ray, root and iproute2"
)
RAY = "/tmp/hybridrl-ray"  # names of sockets may have 107 characters
NO_TOKEN = "RAY_AUTH_MODE=disabled"
KNOBS = (*SMALL, "train.tp=2", "steps.num_steps=2")


class Raylets:
    """A raylet on each of two nodes, the first with the cluster's state."""

    address = "10.77.0.1:6379"

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        for name in nodes.names:  # each has a folder of its own at the same place
            (nodes.home / name / "ray").mkdir()
            nodes.spoil(name, f"mkdir -p {RAY}; mount --bind {nodes.home / name / 'ray'} {RAY}")
        head = ("--head", "--port=6379", f"--temp-dir={RAY}", "--include-dashboard=false")
        self.raylets = [self._start(0, *head)]
        self.raylets.append(self._start(1, f"--address={self.address}"))

    def start(self, index: int, *command: str | Path, **kept: Any) -> subprocess.Popen[str]:
        """Runs a command on a node."""
        paths = f"env PATH={os.environ['PATH']} PYTHONPATH={ROOT / 'tests'} OMP_NUM_THREADS=1"
        # A `ray start` of the user's leaves a token in ~/.ray, which would be asked for here.
        told = f"cd {ROOT} && exec {paths} {NO_TOKEN} {shlex.join(map(str, command))}"
        program = [self._nodes.ssh, self._nodes.names[index], told]
        return subprocess.Popen(program, text=True, start_new_session=True, **kept)

    def _start(self, index: int, *options: str) -> subprocess.Popen[str]:
        address = f"--node-ip-address=10.77.0.{index + 1}"
        slots = ("--block", "--num-cpus=1", "--num-gpus=0", address)
        memory = ("--object-store-memory=80000000", "--disable-usage-stats")
        program = Path(sys.executable).with_name("ray")
        log = self._nodes.home / f"{index}.log"
        with log.open("w") as file:
            command = (program, "start", *slots, *memory, *options)
            process = self.start(index, *command, stdout=file, stderr=file)
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        return process

    def kill(self, index: int) -> None:
        """Kills a raylet as a node that loses its power: without a word."""
        children = psutil.Process(self.raylets[index].pid).children(recursive=True)
        found = [child for child in children if child.name() == "raylet"]
        assert len(found) == 1, children
        found[0].send_signal(signal.SIGKILL)

    def join(self, index: int) -> None:
        """Starts a raylet again that was killed, not the first."""
        self._end(self.raylets[index])
        self.raylets[index] = self._start(index, f"--address={self.address}")

    def close(self) -> None:
        for raylet in reversed(self.raylets):
            self._end(raylet)

    @staticmethod
    def _end(raylet: subprocess.Popen[str]) -> None:
        if raylet.poll() is None:
            children = psutil.Process(raylet.pid).children(recursive=True)
            for process in (*children, raylet):
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
        raylet.wait(30)


@pytest.fixture
def raylets(tmp_path: Path) -> Iterator[Raylets]:
    with network_nodes(("node-a", "node-b"), tmp_path / "nodes") as nodes:
        made = Raylets(nodes)
        try:
            yield made
        finally:
            made.close()


def launch(raylets: Raylets, *knobs: str) -> subprocess.Popen[str]:
    """Starts a run from the first node."""
    program = (sys.executable, "-m", "hybridrl.cli.main", "launch", "--ray", raylets.address)
    command = (*program, QUICKSTART / "grpo.yaml", *KNOBS, *knobs)
    return raylets.start(0, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ended(job: subprocess.Popen[str], expect: int) -> str:
    """Returns what a run printed, which ends with a code."""
    try:
        output, _ = job.communicate(timeout=100)
    finally:
        job.kill()
    assert job.returncode == expect, output[-4000:]
    return output


@needs_ray
@pytest.mark.full
def test_two_raylets_give_the_weights_of_the_local_launcher(
    raylets: Raylets, tmp_path: Path
) -> None:
    ended(launch(raylets, f"run.dir={tmp_path / 'ray'}"), 0)
    logs = tmp_path / "ray" / "quickstart-grpo" / "logs"
    names = {path.name for path in logs.iterdir()}
    assert names == {f"rank_{rank}.{kind}" for rank in range(2) for kind in ("log", "phase")}
    assert "step 2/2" in (logs / "rank_0.log").read_text()
    local = ["train", QUICKSTART / "grpo.yaml", *KNOBS, "--world", "2"]
    run(*local, f"run.dir={tmp_path / 'local'}")
    found = exported_weights(tmp_path / "ray" / "quickstart-grpo", tmp_path / "hf_ray")
    expected = exported_weights(tmp_path / "local" / "quickstart-grpo", tmp_path / "hf_local")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # A mistake that only ranks meet, and a layout that does not fit the slots, end with code 2.
    knobs = ("reward.function=own_rewards:fails_on_odd_lengths", "reward.isolated=false")
    output = ended(launch(raylets, *knobs, f"run.dir={tmp_path / 'bad'}"), 2)
    assert "raised ValueError at" in output
    assert [path.name for path in (tmp_path / "bad").glob("*/*")] == ["logs"]


def lost_ranks(folder: Path) -> list[str]:
    """The command lines of what is left of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in line and "hybridrl.cli" in line and process.pid != os.getpid():
            found.append(line)
    return found


@needs_ray
@pytest.mark.full
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_raylet_ends_the_job_with_its_name(
    index: int, raylets: Raylets, tmp_path: Path
) -> None:
    job = launch(raylets, "steps.num_steps=100000", f"run.dir={tmp_path}")
    file, deadline = tmp_path / "quickstart-grpo" / "metrics.jsonl", time.monotonic() + 100
    while not file.exists() or not file.read_text():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    raylets.kill(index)
    output = ended(job, 1)
    assert f"the connection to host 10.77.0.{index + 1} was lost" in output, output
    deadline = time.monotonic() + 30
    while lost_ranks(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lost_ranks(tmp_path) == []


@needs_ray
@pytest.mark.full
def test_a_job_goes_on_without_a_rank_and_a_node_and_takes_a_node_in_again(
    raylets: Raylets, tmp_path: Path
) -> None:
    endless = (
        "--world",
        "2",
        "train.tp=1",
        "steps.num_steps=100000",
        "checkpoint.every=1",
        "run.max_restarts=5",
    )
    folder = tmp_path / "quickstart-grpo"
    job = launch(raylets, *endless, f"run.dir={tmp_path}")
    try:
        took = [went_on(job, folder, [2])]
        ranks = [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if (process.info["environ"] or {}).get("RANK") == "1"
            and str(tmp_path) in str(process.info["cmdline"])
        ]
        assert len(ranks) == 1
        ranks[0].kill()
        took.append(went_on(job, folder, [2, 2]))
        raylets.kill(1)
        took.append(went_on(job, folder, [2, 2, 1]))
        raylets.join(1)
        took.append(went_on(job, folder, [2, 2, 1, 2]))
        job.send_signal(signal.SIGTERM)
        output = ended(job, 143)
    finally:
        job.kill()
    print(f"training went on after {', '.join(f'{one:.1f}' for one in took)} s")
    both = r"10\.77\.0\.[12], 10\.77\.0\.[12]"
    assert re.search(
        rf"restart 1 of 5 \(run.max_restarts\): continuing with 2 ranks on {both}", output
    )
    assert "restart 2 of 5 (run.max_restarts): continuing with 1 ranks on 10.77.0.1" in output
    assert re.search(rf"are reachable again: continuing with 2 ranks on {both}", output)
    steps, sizes = steps_and_sizes(folder)
    assert sizes == [2, 2, 1, 2] and steps == list(range(1, len(steps) + 1))
    assert max(took[1:]) < 60, took


@needs_ray
@pytest.mark.full
def test_nodes_of_a_cluster_are_checked_though_its_slots_are_taken(
    raylets: Raylets, tmp_path: Path
) -> None:
    runs, busy = tmp_path / "runs", tmp_path / "busy.py"
    runs.mkdir()
    busy.write_text(
        "import ray, time\n"
        f"ray.init({raylets.address!r}, log_to_driver=False)\n"
        "taken = ray.util.placement_group([{'CPU': 1}] * 2)\n"
        "assert taken.wait(30)\nprint('taken', flush=True)\ntime.sleep(200)\n"
    )
    other = raylets.start(0, sys.executable, busy, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        program = (sys.executable, "-m", "hybridrl.cli.main", "check", "--cluster", "--json")
        options = ("--ray", raylets.address, "--run-dir", runs)
        job = raylets.start(0, *program, *options, stdout=subprocess.PIPE)
        output, _ = job.communicate(timeout=200)
    finally:
        other.kill()
        other.wait()
    found = json.loads(output.splitlines()[-1])
    facts = found["facts"]
    assert [node["node"] for node in facts["nodes"]] == ["10.77.0.1", "10.77.0.2"]
    assert facts["unreachable"] == {} and job.returncode == int(not found["ok"])
    (link,) = [pair for pair in facts["pairs"] if pair["backend"] == "gloo"]
    assert {link["first"], link["second"]} == {"10.77.0.1", "10.77.0.2"} and link["gb_per_s"] > 0
    assert list(facts["unseen"].values()) == [[], []]
    assert not list(runs.iterdir())
    assert all(abs(node["clock_ahead_s"]) < 1.0 for node in facts["nodes"]), facts["nodes"]
    # Of this machine: its room and rates.
    kinds = {one["kind"] for one in found["findings"]}
    assert kinds <= {"shared-slow", "memory", "processor-slow", "disk-full"}, found["findings"]
