"""The optimizer step: its learning rate, against its definition, and clipping."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hybridrl.config.schema import TrainConfig
from hybridrl.platform import Platform
from hybridrl.training.optimizer import apply_gradients, learning_rate

PEAK, LEAST, NUM = 1e-3, 1e-4, 12


def rates(schedule: str, warmup: int) -> list[float]:
    train = TrainConfig(
        lr_schedule=schedule, warmup_steps=warmup, learning_rate=PEAK, min_learning_rate=LEAST
    )
    return [learning_rate(train, PEAK, update, NUM) for update in range(NUM + 1)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_warm_up_rises_to_the_peak_and_loses_no_step(schedule: str) -> None:
    assert rates(schedule, 4)[:5] == pytest.approx([PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK, PEAK])


def test_schedules_fall_from_the_peak_to_the_least_after_the_last_step() -> None:
    assert rates("constant", 0) == [PEAK] * (NUM + 1)
    places = [update / NUM for update in range(NUM + 1)]
    linear = [PEAK + (LEAST - PEAK) * place for place in places]
    assert rates("linear", 0) == pytest.approx(linear)
    cosine = [LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi * place)) / 2 for place in places]
    assert rates("cosine", 0) == pytest.approx(cosine)


@pytest.mark.parametrize(("bound", "expected"), [(1.0, [0.6, 0.8]), (6.0, [3, 4]), (0.0, [3, 4])])
def test_gradients_beyond_the_bound_are_scaled_to_it(bound: float, expected: list[float]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    config = SimpleNamespace(clip_grad=bound, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
    adam = SimpleNamespace(param_groups=[{"params": [parameter]}])
    part = SimpleNamespace(config=config, get_parameters=lambda: [parameter], optimizer=adam)
    taken: list[torch.Tensor] = []
    optimizer = SimpleNamespace(
        chained_optimizers=[part],
        step_with_ready_grads=lambda: taken.append(parameter.grad.clone()),
    )
    with Platform.detect().megatron_phase():
        apply_gradients(optimizer, grad_norm=5.0)
    assert taken[0].tolist() == pytest.approx(expected, rel=1e-5)
