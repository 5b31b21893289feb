"""A run that is killed goes on as if nothing had happened; at another layout, as sums allow.

Every run is the quickstart's model on few prompts, through the command line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from command_line import QUICKSTART, exported_weights, records, run, start
from killed_ranks import check_same, lose_a_rank, rank_process, wait_for
from launch import run_ranks
from packaged import CLASSES, needs

from hybridrl.checkpoint.run_lock import LOCK_FILE

MODEL = f"model.init={QUICKSTART / 'model'}"
SMALL = (
    "data.eval_prompts=null",
    "steps.eval_every=0",
    "log.tensorboard=false",
    "checkpoint.every=5",
    "checkpoint.keep=9",
)
GRPO = (
    QUICKSTART / "grpo.yaml",
    "model.path=null",
    MODEL,
    "steps.prompts_per_step=8",
    "steps.samples_per_prompt=4",
    "steps.num_steps=20",
    "reward.function=scripted_reward:digits",
    "reward.isolated=false",
    "reward.extract=null",
    "train.learning_rate=1e-3",
    *SMALL,
)
SFT = (
    QUICKSTART / "sft.yaml",
    "steps.prompts_per_step=16",
    "steps.num_steps=12",
    "steps.stop_at_accuracy=null",
    *SMALL,
)

PACKAGED_IN_FULL = [
    pytest.param(name, marks=(*needs(name), pytest.mark.slow, pytest.mark.full)) for name in CLASSES
]


def arguments(config: tuple[str | Path, ...], folder: Path, *more: str) -> list[str | Path]:
    return ["train", *config, f"run.dir={folder}", *more]


def hold_in_generation(
    launcher_pid: int, phase_file: Path, step: int
) -> tuple[psutil.Process, int]:
    """Stops rank 1 during generation, at `step` or later; returns its process and the step."""
    for later in range(step, step + 5):
        phase = f"generate, step {later}"
        wait_for(phase_file, phase)
        held = rank_process(launcher_pid, 1)
        held.suspend()
        while held.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        if phase_file.read_text().strip().endswith(phase):
            return held, later
        held.resume()
    raise AssertionError(f"rank 1 was never found in the generations from step {step} on")


def kill_rank(launcher_pid: int, rank: int, phase_file: Path, step: int) -> str:
    """Waits until the rank is in `step`, kills it with SIGKILL and returns the phase it was in."""
    wait_for(phase_file, f"step {step}")
    child = rank_process(launcher_pid, rank)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)  # until then it may have entered another one
    return phase_file.read_text().strip()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("unbroken")
    run(*arguments(GRPO, folder))
    weights = exported_weights(folder / "quickstart-grpo", folder / "hf")
    return folder / "quickstart-grpo", weights


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.full)])
def test_killed_run_ends_with_the_weights_of_an_unbroken_one(
    rank: int, unbroken: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    reference, expected = unbroken
    folder = tmp_path / "quickstart-grpo"
    # First it is asked to stop in the middle of generation: one rank alone, then the launcher.
    for first, number in ((3, signal.SIGTERM), (5, signal.SIGINT)):
        process = start(arguments(GRPO, tmp_path))
        held, step = hold_in_generation(process.pid, folder / "logs" / "rank_1.phase", first)
        is_rank = number == signal.SIGTERM
        asked = rank_process(process.pid, 3) if is_rank else psutil.Process(process.pid)
        asked.send_signal(number)
        time.sleep(1)  # the launcher hands it to the ranks
        held.resume()
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 128 + number and "Traceback" not in output, output
        stopped = f"stopped by {number.name}"
        assert f"{stopped} after step {step - 1} of 20: saved to" in output, output
        assert output.splitlines()[-1] == f"hybridrl: {stopped}"
        assert not (folder / LOCK_FILE).exists()

    process = start(arguments(GRPO, tmp_path))
    phase = kill_rank(process.pid, rank, folder / "logs" / f"rank_{rank}.phase", step + 2)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert time.monotonic() - killed < 30
    assert f"rank {rank}" in output and socket.gethostname() in output
    assert phase.split(",")[0] in output, f"{phase} is not in:\n{output[-1500:]}"
    assert "Traceback" not in output.splitlines()[-1]

    run(*arguments(GRPO, tmp_path))
    found = exported_weights(folder, tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [r["step"] for r in records(folder)] == list(range(1, 21))
    for key in ("reward/mean", "policy/loss", "policy/grad_norm"):
        assert [r[key] for r in records(folder)] == [r[key] for r in records(reference)]


@pytest.mark.dist
@pytest.mark.full
def test_ranks_that_are_killed_in_any_phase_are_started_again_with_the_same_weights(
    unbroken: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    _, expected = unbroken
    folder = tmp_path / "quickstart-grpo"
    knobs = ("run.max_restarts=3", "checkpoint.every=1")
    process = start(arguments(GRPO, tmp_path, *knobs))
    took = []
    for number, (rank, phase) in enumerate(((1, "generate"), (0, "update"), (3, "checkpoint"))):
        file, step = folder / "logs" / f"rank_{rank}.phase", 4 + 4 * number
        wait_for(file, f"{phase}, step {step}")
        child = rank_process(process.pid, rank)
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(folder / "logs" / "rank_2.phase", f"step {step + 1}")
        took.append(time.monotonic() - killed)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("(run.max_restarts): continuing with 4 ranks") == 3, output
    print(f"training went on after {', '.join(f'{one:.1f}' for one in took)} s")
    assert max(took) < 60
    found = exported_weights(folder, tmp_path / "hf")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.dist
@pytest.mark.full
def test_a_run_goes_on_with_fewer_ranks_and_the_same_losses(
    unbroken: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Rank 3 is killed and does not come back; three ranks cannot share tp=2."""
    knobs = ("train.tp=2", "train.pp=1", "steps.num_steps=8", "checkpoint.every=1")
    reward = ("reward.function=lost_ranks:digits", "reward.isolated=false")
    output, took = lose_a_rank(arguments(GRPO, tmp_path, *knobs, *reward), tmp_path, 3)
    assert took < 60
    said = [line for line in output.splitlines() if "(run.max_restarts)" in line]
    assert (
        "continuing with 4 ranks" in said[0]
        and "continuing with 2 ranks" in said[1]
        and not said[2:]
    ), output
    check_same(records(tmp_path / "quickstart-grpo"), records(unbroken[0])[:8])


@pytest.mark.dist
def test_sft_continues_under_another_layout_with_the_same_losses(tmp_path: Path) -> None:
    run(*arguments(SFT, tmp_path))
    folder = tmp_path / "quickstart-sft"
    expected = records(folder)
    for name, layout, world in (
        ("dp", ("train.tp=1", "train.pp=1"), 2),
        ("pp", ("train.tp=1", "train.order=pp-tp-cp-ep-dp"), 4),
    ):
        copy = tmp_path / name / "quickstart-sft"
        shutil.copytree(folder, copy)
        shutil.rmtree(copy / "checkpoints" / "step_12")
        run(*arguments(SFT, tmp_path / name, *layout), "--world", str(world))
        found = records(copy)
        assert [r["step"] for r in found] == [r["step"] for r in expected]
        for ours, theirs in zip(found[10:], expected[10:], strict=True):
            assert abs(ours["policy/loss"] - theirs["policy/loss"]) < 1e-4
        assert found[10]["policy/loss"] != 0


@pytest.mark.dist
@pytest.mark.full
def test_experts_continue_under_another_layout_with_the_same_losses(tmp_path: Path) -> None:
    """Weights and optimizer states of experts, which lie on ranks of their own."""
    model = shutil.copytree(QUICKSTART / "model", tmp_path / "model") / "config.json"
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    model.write_text(json.dumps(json.loads(model.read_text()) | kind | experts))
    config = (*SFT, f"model.init={model.parent}", "train.ep=2", "steps.num_steps=9")
    run(*arguments(config, tmp_path))
    folder = tmp_path / "quickstart-sft"
    expected = records(folder)
    layout = ("train.tp=1", "train.pp=1", "train.ep=1", "train.etp=2")
    copy = tmp_path / "etp" / "quickstart-sft"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step_9")
    run(*arguments(config, tmp_path / "etp", *layout), "--world", "2")
    found = records(copy)
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for ours, theirs in zip(found[5:], expected[5:], strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(ours[name] / theirs[name] - 1) < 1e-4, (ours["step"], name)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recurrent_layers_continue_under_another_layout_with_the_same_losses(
    dtype: str, tmp_path: Path
) -> None:
    """Layers of two kinds, fused projections of unequal parts, and fp32 parameters in bf16."""
    model = shutil.copytree(QUICKSTART / "model", tmp_path / "model") / "config.json"
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    kind = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    sizes |= {"linear_value_head_dim": 24, "full_attention_interval": 2}
    model.write_text(json.dumps(json.loads(model.read_text()) | kind | sizes))
    own = (f"model.init={model.parent}", f"model.dtype={dtype}", "steps.num_steps=9")
    config = (*SFT, *own)
    run(*arguments(config, tmp_path))
    expected = records(tmp_path / "quickstart-sft")
    # As many replicas, which sum gradients of bf16 layers in the same order.
    copy = tmp_path / "one" / "quickstart-sft"
    shutil.copytree(tmp_path / "quickstart-sft", copy)
    shutil.rmtree(copy / "checkpoints" / "step_9")
    run(*arguments(config, tmp_path / "one", "train.tp=1", "train.pp=1"), "--world", "2")
    found = records(copy)
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    tolerance = 1e-4 if dtype == "float32" else 2e-2  # rounding of bf16 in another order
    for ours, theirs in zip(found[5:], expected[5:], strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(ours[name] / theirs[name] - 1) < tolerance, (ours["step"], name)


@pytest.mark.full
@pytest.mark.dist
def test_grpo_on_scripted_rollouts_continues_with_the_same_gradient(tmp_path: Path) -> None:
    scripted = ("rollout.engine=scripted", "steps.num_steps=6")
    run(*arguments(GRPO, tmp_path, *scripted))
    folder = tmp_path / "quickstart-grpo"
    expected = records(folder)[5]["policy/grad_norm"]
    assert expected > 1e-3
    for name, layout, world in (
        ("one", ("train.tp=1", "train.pp=1"), 1),
        ("pp", ("train.tp=1",), 4),
    ):
        copy = tmp_path / name / "quickstart-grpo"
        shutil.copytree(folder, copy)
        shutil.rmtree(copy / "checkpoints" / "step_6")
        run(*arguments(GRPO, tmp_path / name, *scripted, *layout), "--world", str(world))
        found = records(copy)[5]["policy/grad_norm"]
        assert abs(found / expected - 1) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["hf", *PACKAGED_IN_FULL])
def test_rollouts_begun_before_a_checkpoint_are_finished_after_it_on_fewer_replicas(
    engine: str, tmp_path: Path
) -> None:
    worker = str(Path(__file__).with_name("unfinished_worker.py"))
    run_ranks(2, worker, ["save", engine, str(tmp_path)], timeout_s=240)
    run_ranks(1, worker, ["load", engine, str(tmp_path)], timeout_s=240)
