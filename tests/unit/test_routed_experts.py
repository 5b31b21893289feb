"""The experts that an engine chose, on their way into a batch and through JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import rollouts

from hybridrl.contracts.batch import BatchError, Producer, Rollout, RolloutBatch
from hybridrl.contracts.routed_experts import (
    Experts,
    experts_dtype,
    experts_from_json,
    experts_to_json,
)

WIDTH = 6


def drawn(rollout: Rollout, num_experts: int) -> Experts:
    rng = np.random.default_rng(rollout.sample_id)
    num = len(rollout.prompt.tokens) + len(rollout.tokens) - 1
    return rng.integers(0, num_experts, (num, WIDTH)).astype(experts_dtype(num_experts))


def batch_of(made: list[Rollout]) -> RolloutBatch:
    return RolloutBatch.from_rollouts(
        made, [one.sample_id // 2 for one in made], Producer.here("test engine")
    )


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_batch_has_a_row_of_experts_for_each_token_but_the_last_of_a_sample(
    num_experts: int, dtype: torch.dtype
) -> None:
    made = [replace(one, experts=drawn(one, num_experts)) for one in rollouts()]
    batch = batch_of(made)
    assert batch.routed_experts_TK is not None and batch.routed_experts_TK.dtype == dtype
    for one, rows_LK in zip(
        made, batch.routed_experts_TK.split(batch.lengths_B.tolist()), strict=True
    ):
        assert np.array_equal(rows_LK[:-1].numpy(), one.experts)
        assert not rows_LK[-1].any()


def test_batch_refuses_samples_with_other_experts_than_the_first() -> None:
    made = [replace(one, experts=drawn(one, 8)) for one in rollouts()]
    whole = made[3].experts
    assert whole is not None
    for wrong in (None, whole[:-1], whole[:, :-1], whole.astype(np.int16)):
        changed = [*made[:3], replace(made[3], experts=wrong), *made[4:]]
        with pytest.raises(BatchError, match=r"sample 3.*\[routed_experts_TK\]"):
            batch_of(changed)
    with pytest.raises(BatchError, match="none for sample 0"):
        batch_of([replace(made[0], experts=None), *made[1:]])


@pytest.mark.parametrize("num_experts", [8, 300])
def test_experts_survive_json(num_experts: int) -> None:
    experts = drawn(rollouts()[1], num_experts)
    back = experts_from_json(json.loads(json.dumps(experts_to_json(experts))))
    assert back is not None and back.dtype == experts.dtype and np.array_equal(back, experts)
    assert experts_from_json(experts_to_json(None)) is None
