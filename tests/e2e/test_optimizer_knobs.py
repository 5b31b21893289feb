"""What the optimizer's knobs do in a run: weight decay, its constants after a resume, schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import small_run

from hybridrl import Trainer


def decay_alone(trainer: Trainer) -> dict[str, float]:
    """Takes a step with gradients of zero; returns by how much it scales each parameter."""
    model = trainer.policy.model
    parameters = {
        name: parameter for chunk in model.chunks for name, parameter in chunk.named_parameters()
    }
    for parameter in parameters.values():
        parameter.main_grad.zero_()
    before = {name: float(parameter.detach().norm()) for name, parameter in parameters.items()}
    model.apply(0.1, model.grad_norm())
    return {
        name: float(parameter.detach().norm()) / before[name]
        for name, parameter in parameters.items()
        if before[name] > 0
    }


def test_weight_decay_leaves_norms_and_biases(tmp_path: Path) -> None:
    with small_run(tmp_path, "train.weight_decay=0.5") as trainer:
        scales = decay_alone(trainer)
    norms = {name for name in scales if "norm" in name}
    assert norms and len(norms) < len(scales)
    for name, scale in scales.items():
        assert scale == pytest.approx(1.0 if name in norms else 0.95, abs=1e-6), name


def test_a_resumed_run_uses_the_configurations_optimizer_knobs(tmp_path: Path) -> None:
    with small_run(tmp_path, "train.weight_decay=0.5", "steps.num_steps=2") as trainer:
        trainer.fit()
    changed = ("train.weight_decay=0.2", "train.adam_beta1=0.8", "train.adam_beta2=0.99")
    with small_run(tmp_path, *changed, "train.adam_eps=1e-5", "steps.num_steps=3") as trainer:
        trainer.fit()
        assert trainer.step == 3
        groups = trainer.policy.model.optimizer.param_groups
        found = {(g["wd_mult"], g["weight_decay"], g["betas"], g["eps"]) for g in groups}
        assert found == {(1.0, 0.2, (0.8, 0.99), 1e-5), (0.0, 0.0, (0.8, 0.99), 1e-5)}
        state = trainer.policy.model.optimizer.chained_optimizers[0].optimizer.state
        assert {float(one["step"]) for one in state.values()} == {3.0}, "moments were kept"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_policys_schedule_ends_with_its_own_last_update(tmp_path: Path, schedule: str) -> None:
    """Steps in which only the critic learns are no part of the policy's schedule."""
    knobs = (f"train.lr_schedule={schedule}", "train.learning_rate=0.001")
    rates: dict[int, list[float]] = {}
    for warmup, steps in ((0, 4), (4, 8)):
        more = (f"algorithm.critic_warmup_steps={warmup}", f"steps.num_steps={steps}")
        name = f"run.name=warmup-{warmup}"
        with small_run(tmp_path, *knobs, *more, name, config="ppo.yaml") as trainer:
            metrics = [trainer.train_step() for _ in range(steps)] if trainer.reshard() else []
        rates[warmup] = [m["policy/learning_rate"] for m in metrics if "policy/grad_norm" in m]
    assert len(rates[0]) == 4 and rates[0] == rates[4]
    assert rates[0][0] == 0.001
