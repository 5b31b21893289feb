"""Finds out whether exploded weights caused a failure of the trainer."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.errors import UserError
from hybridrl.models.weight_bounds import exploded, explosion
from hybridrl.training.model import ParallelModel


def explosion_of(trained: Mapping[str, ParallelModel], symptom: object) -> UserError | None:
    """Returns an error that names the first trained model whose weights exploded; None if none did.

    Collective; all ranks receive the same result. Models that have not taken an optimizer step yet
    are ignored.

    Args:
        trained: Trained models by name; they must be in the training phase.
    """
    for name, model in trained.items():
        parts = model.world.gather_objects(exploded(model.weights_in_place()))
        found = next((part for part in parts if part is not None), None)
        if found is not None and model.num_updates:
            when, rate = f"optimizer step {model.num_updates}", model.peak_learning_rate
            return explosion(f"{name} {found}", when, symptom, rate)
    return None
