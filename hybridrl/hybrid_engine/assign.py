"""Which rank generates with which part of which engine replica. Pure, no torch."""

from __future__ import annotations

from hybridrl.parallel.layout import RolloutLayout, TrainLayout


def assign(train: TrainLayout, rollout_tp: int) -> RolloutLayout:
    """Returns the rollout layout over the ranks of `train`: replicas are runs of consecutive ranks.

    Args:
        train: the training layout.
        rollout_tp: tensor-parallel size of one engine replica; divides the world.
    """
    return RolloutLayout.consecutive(train.world_size, rollout_tp)
