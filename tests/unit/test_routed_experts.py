"""Blobs of samples on their way into a batch and through JSON; routed experts among them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import FEATURES, rollouts

from hybridrl.contracts.batch import BatchError, Producer, Rollout, RolloutBatch
from hybridrl.contracts.blobs import BlobKind, blobs_from_json, blobs_to_json, declare
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS, experts_dtype

WIDTH = 6


def drawn(rollout: Rollout, num_experts: int) -> np.ndarray:
    rng = np.random.default_rng(rollout.sample_id)
    num = len(rollout.prompt.tokens) + len(rollout.tokens) - 1
    return rng.integers(0, num_experts, (num, WIDTH)).astype(experts_dtype(num_experts))


def batch_of(made: list[Rollout]) -> RolloutBatch:
    return RolloutBatch.from_rollouts(
        made, [one.sample_id // 2 for one in made], Producer.here("test engine")
    )


def with_experts(rollout: Rollout, experts: np.ndarray) -> Rollout:
    return replace(rollout, blobs={ROUTED_EXPERTS: experts})


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_batch_has_the_rows_of_each_sample(num_experts: int, dtype: torch.dtype) -> None:
    made = [with_experts(one, drawn(one, num_experts)) for one in rollouts()]
    features = np.arange(18, dtype=np.float16).reshape(3, 2, 3)
    made[2] = replace(made[2], blobs={**made[2].blobs, FEATURES.name: features})
    batch = batch_of(made)
    blob = batch.blobs[ROUTED_EXPERTS]
    assert blob.values_N.dtype == dtype and torch.equal(blob.num_rows_B, batch.lengths_B - 1)
    parts = blob.values_N.split(blob.num_rows_B.tolist())
    for one, rows_PK in zip(made, parts, strict=True):
        assert np.array_equal(rows_PK.numpy(), one.blobs[ROUTED_EXPERTS])
    ragged = batch.blobs[FEATURES.name]
    assert ragged.num_rows_B.tolist() == [0, 0, 3, 0, 0, 0]
    assert np.array_equal(ragged.values_N.numpy(), features)


def test_batch_refuses_samples_with_other_rows_than_the_first() -> None:
    made = [with_experts(one, drawn(one, 8)) for one in rollouts()]
    whole = made[3].blobs[ROUTED_EXPERTS]
    for wrong in (whole[:-1], whole[:, :-1], whole.astype(np.int16)):
        changed = [*made[:3], with_experts(made[3], wrong), *made[4:]]
        with pytest.raises(BatchError, match=r"sample 3.*\[routed_experts\]"):
            batch_of(changed)
    with pytest.raises(BatchError, match="no blob for sample 0"):
        batch_of([replace(made[0], blobs={}), *made[1:]])
    with pytest.raises(BatchError, match="blob pictures, which is not declared"):
        batch_of([replace(made[0], blobs={"pictures": whole}), *made[1:]])
    with pytest.raises(BatchError, match="float32 with 2 dimensions"):
        batch_of([with_experts(one, drawn(one, 8).astype(np.float32)) for one in made])


def test_a_batch_refuses_a_blob_of_other_samples() -> None:
    batch = batch_of([with_experts(one, drawn(one, 8)) for one in rollouts()])
    blob, here = batch.blobs[ROUTED_EXPERTS], Producer.here("test")
    wrong = replace(blob, num_rows_B=blob.num_rows_B + 1), replace(blob, values_N=blob.values_N[1:])
    for one in wrong:
        with pytest.raises(BatchError, match="routed_experts"):
            batch.join_blob(here, ROUTED_EXPERTS, one)


def test_a_name_is_declared_once() -> None:
    assert declare(BlobKind("routed_experts", ("uint8", "int16"), rows="input")).row_dims == 1
    with pytest.raises(ValueError, match="routed_experts is already declared"):
        declare(BlobKind("routed_experts", ("uint8",), rows="any"))


@pytest.mark.parametrize("num_experts", [8, 300])
def test_blobs_survive_json(num_experts: int) -> None:
    experts = drawn(rollouts()[1], num_experts)
    given = {ROUTED_EXPERTS: experts, FEATURES.name: np.zeros((0, 2, 3), np.float16)}
    saved = json.loads(json.dumps(blobs_to_json(given)))
    for fields in ({"blobs": saved}, {"experts": saved[ROUTED_EXPERTS]}):  # as older versions wrote
        back = blobs_from_json(fields)
        assert back[ROUTED_EXPERTS].dtype == experts.dtype
        assert np.array_equal(back[ROUTED_EXPERTS], experts)
    assert blobs_from_json({"blobs": saved})[FEATURES.name].shape == (0, 2, 3)
    assert blobs_from_json({}) == blobs_from_json({"experts": None}) == {}
