"""Two nodes under torchrun, both on this machine, against the local launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from command_line import QUICKSTART, ROOT, exported_weights, run
from killed_ranks import wait_for
from launch import free_port

OVERRIDES = (
    "steps.num_steps=3",
    "steps.prompts_per_step=8",
    "steps.samples_per_prompt=2",
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    "data.eval_prompts=null",
    "steps.eval_every=0",
    "log.tensorboard=false",
    "reward.function=scripted_reward:tells_digits",
    "reward.isolated=false",
    "reward.extract=null",
    "train.learning_rate=1e-3",
)


def start_node(node: int, port: int, folder: Path) -> subprocess.Popen[str]:
    script = ROOT / "examples" / "torchrun" / "several_nodes.sh"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "tests"),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NNODES": "2",
        "NODE_RANK": str(node),
        "NPROC": "2",
    }
    return subprocess.Popen(
        [script, QUICKSTART / "grpo.yaml", *OVERRIDES, f"run.dir={folder}"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def check_logs(folder: Path) -> None:
    """Every rank has a log and a phase, and rank 0's log says what the console does."""
    names = {path.name for path in folder.iterdir()}
    assert names >= {f"rank_{rank}.{kind}" for rank in range(4) for kind in ("log", "phase")}, names
    first, *others = ((folder / f"rank_{rank}.log").read_text() for rank in range(4))
    assert all(first.count(f"\nstep {step}/3 [gen]") == 1 for step in (1, 2, 3)), first
    assert "engine and trainer agree" in first and "Warning" in first
    assert not any("step 1/3" in other for other in others)
    assert all("said by rank" in other for other in others)


@pytest.mark.dist
@pytest.mark.full
def test_two_torchrun_nodes_give_the_weights_of_the_local_launcher(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(node, port, tmp_path / "nodes") for node in range(2)]
    for node in nodes:
        output, _ = node.communicate(timeout=180)
        assert node.returncode == 0, output[-4000:]
    check_logs(tmp_path / "nodes" / "quickstart-grpo" / "logs")
    local = tmp_path / "local"
    run("train", QUICKSTART / "grpo.yaml", *OVERRIDES, f"run.dir={local}", "--world", "4")
    check_logs(local / "quickstart-grpo" / "logs")
    found = exported_weights(tmp_path / "nodes" / "quickstart-grpo", tmp_path / "hf_nodes")
    expected = exported_weights(local / "quickstart-grpo", tmp_path / "hf_local")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.dist
@pytest.mark.full
def test_ranks_that_torchrun_starts_again_go_on_from_a_copy_in_memory(tmp_path: Path) -> None:
    """The agent's store still has the addresses of the ranks that it started before."""
    folder = tmp_path / "quickstart-grpo"
    knobs = ("run.max_restarts=1", "checkpoint.copy_every=1", "steps.num_steps=8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", f"--master-port={free_port()}", "-m", "hybridrl.cli.main"]
    command += ["train", str(QUICKSTART / "grpo.yaml"), *OVERRIDES, *knobs]
    command += ["train.tp=2", "train.pp=1", f"run.dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(folder / "logs" / "rank_1.phase", "generate, step 5")
        ranks = psutil.Process(job.pid).children()
        next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
        output, _ = job.communicate(timeout=200)
    finally:
        job.kill()
    assert job.returncode == 0, output[-4000:]
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert len(starts) == 2 and starts[1]["after_step"] >= 3
    assert not (folder / "checkpoints" / "step_1").exists()  # no other checkpoint was written
