"""The learning rate of every optimizer step, against its definition."""

from __future__ import annotations

import math

import pytest

from hybridrl.config.schema import TrainConfig
from hybridrl.trainer.optimizer import learning_rate

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
