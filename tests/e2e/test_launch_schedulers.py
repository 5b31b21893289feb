"""`hybridrl launch --slurm` and `--k8s` as a user meets them; Slurm's commands are scripts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from command_line import QUICKSTART, ROOT, exported_weights, run, start
from network_nodes import CAN_MAKE, network_nodes
from restarted_runs import steps_and_sizes, went_on
from slurm_stub import scheduler_stubs, write_program
from small_runs import SMALL

CONFIG = QUICKSTART / "grpo.yaml"
KNOBS = (*SMALL, "train.tp=2", "steps.num_steps=2")


@pytest.mark.dist
@pytest.mark.full
def test_a_submitted_job_gives_the_weights_of_the_local_launcher(tmp_path: Path) -> None:
    """Two nodes of one rank each."""
    sizes = ("--nodes", "2", "--slots", "1", "--no-gpus")
    folder, local = tmp_path / "slurm", tmp_path / "local"
    environment = scheduler_stubs(tmp_path)
    job = start(["launch", "--slurm", *sizes, CONFIG, *KNOBS, f"run.dir={folder}"], environment)
    output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output[-4000:]
    run("train", CONFIG, *KNOBS, f"run.dir={local}", "--world", "2")
    logs = folder / "quickstart-grpo" / "logs"
    assert {path.name for path in logs.glob("rank_*.log")} == {"rank_0.log", "rank_1.log"}
    found = exported_weights(folder / "quickstart-grpo", tmp_path / "hf_slurm")
    expected = exported_weights(local / "quickstart-grpo", tmp_path / "hf_local")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.dist
@pytest.mark.full
def test_a_submitted_job_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    """Two nodes of one rank each, which the job keeps."""
    sizes = ("--nodes", "2", "--slots", "1", "--no-gpus")
    knobs = (*KNOBS, "checkpoint.every=1", "run.max_restarts=3", f"run.dir={tmp_path}")
    endless = ("--slurm", *sizes, CONFIG, *knobs, "steps.num_steps=100000")
    job = start(["launch", *endless], scheduler_stubs(tmp_path))
    try:
        begun, folder = time.monotonic(), tmp_path / "quickstart-grpo"
        took = [went_on(job, folder, [2])]
        for killed in ("1", "0"):  # rank 0 has the job's store
            rank_of(job, killed).kill()
            took.append(went_on(job, folder, [2] * (len(took) + 1)))
        assert time.monotonic() - begun < 300
        script = tmp_path / "quickstart-grpo" / "launch.sbatch"
        [batch] = [one for one in children(job) if one.cmdline()[-1:] == [str(script)]]
        batch.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=60)
    finally:
        for one in children(job):
            one.kill()
        job.kill()
    print(f"training went on after {', '.join(f'{one:.1f}' for one in took)} s")
    assert "restart 2 of 3 (run.max_restarts)" in output, output[-4000:]
    assert (tmp_path / "asked").read_text() == "requeue 77\n"  # as at the time limit
    steps, sizes = steps_and_sizes(folder)
    assert sizes == [2, 2, 2]
    assert steps == list(range(1, len(steps) + 1)) and max(took[1:]) < 60


def children(job: subprocess.Popen[str]) -> list[psutil.Process]:
    if job.poll() is not None:
        return []
    return psutil.Process(job.pid).children(recursive=True)


def environment_of(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return process.environ()
    return {}


def rank_of(job: subprocess.Popen[str], number: str) -> psutil.Process:
    """Returns the process of a rank, not those that it has started."""
    found = [one for one in children(job) if environment_of(one).get("RANK") == number]
    [first] = [one for one in found if one.ppid() not in {other.pid for other in found}]
    return first


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.skipif(not CAN_MAKE, reason="needs root and iproute2 for network namespaces")
def test_pods_of_a_jobset_give_the_weights_of_the_local_launcher(tmp_path: Path) -> None:
    """Two pods of one rank each, run as JobSet does: by index, and with its service's names."""
    sizes = ("--nodes", "2", "--slots", "1", "--no-gpus", "--folder", ROOT, "--image", "an/image:1")
    folder, local, run_name = tmp_path / "pods", tmp_path / "local", "quickstart-grpo"
    text = run("launch", "--k8s", "jobset", *sizes, CONFIG, *KNOBS, f"run.dir={folder}")
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    names = [f"{run_name}-node-0-{index}.{run_name}" for index in range(pods["completions"])]
    jobs, program = [], f'#!/bin/sh\nexec {sys.executable} -m hybridrl.cli.main "$@"\n'
    with network_nodes(names, tmp_path / "nodes") as nodes:
        for index, name in enumerate(names):
            write_program(nodes.home / name / "bin" / "hybridrl", program)
            own = {one["name"]: one["value"] for one in container["env"]}
            own |= {"JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"}
            told = " ".join(f"{key}={shlex.quote(value)}" for key, value in own.items())
            paths = f"PATH={os.environ['PATH']} PYTHONPATH={ROOT / 'tests'}"
            command = shlex.join(container["command"])
            line = f"cd {container['workingDir']} && exec env {told} {paths} {command}"
            jobs.append(
                subprocess.Popen(
                    [nodes.ssh, name, line],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for one in jobs:
            output, _ = one.communicate(timeout=240)
            assert one.returncode == 0, output[-4000:]
    run("train", CONFIG, *KNOBS, f"run.dir={local}", "--world", "2")
    found = exported_weights(folder / run_name, tmp_path / "hf_pods")
    expected = exported_weights(local / run_name, tmp_path / "hf_local")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.full
def test_a_dry_run_prints_the_file_and_writes_nothing(tmp_path: Path) -> None:
    knobs = (*KNOBS, f"run.dir={tmp_path / 'runs'}")
    sizes = ("--nodes", "2", "--slots", "2", "--sbatch=--partition=p")
    text = run("launch", "--slurm", "--dry-run", *sizes, CONFIG, *knobs)
    assert "#SBATCH --partition=p\n" in text and "--gpus-per-node=2" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--slurm", "--slots", "2"), "--nodes is missing"),
        (("--slurm", "--nodes", "1", "--slots", "3"), "train.tp"),
        (("--slurm", "--nodes", "1", "--slots", "2", "--world", "2"), "--world"),
        (("--slurm", "--nodes", "1", "--slots", "2", "--sbatch", "p"), "--sbatch"),
        (("--k8s", "jobset", "--nodes", "1", "--slots", "2"), "--image"),
        (("--k8s", "jobset", "--slurm"), "--slurm --k8s"),
        (("--node", "1", "--nodes", "1", "--slots", "2"), "--node"),
        ((), "no launcher"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_started(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    output = run("launch", *arguments, CONFIG, *KNOBS, f"run.dir={tmp_path / 'runs'}", expect=2)
    assert expected in output and "Traceback" not in output and output.count("allowed:") == 1
    assert not (tmp_path / "runs").exists()
