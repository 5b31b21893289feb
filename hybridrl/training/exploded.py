"""Whether a failure of the trainer comes of weights that training has made too large."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.errors import UserError
from hybridrl.models.weight_bounds import exploded, explosion
from hybridrl.training.model import ParallelModel


def explosion_of(trained: Mapping[str, ParallelModel], symptom: object) -> UserError | None:
    """Returns the error that names the first trained model whose weights have exploded, the same on
    all ranks; None if all are as they should be, or as they were given. Collective.

    Args:
        trained: the trained models by name, in the training phase.
        symptom: the failure, which all ranks met.
    """
    for name, model in trained.items():
        parts = model.world.gather_objects(exploded(model.weights_in_place()))
        found = next((part for part in parts if part is not None), None)
        if found is not None and model.num_updates:
            when, rate = f"optimizer step {model.num_updates}", model.peak_learning_rate
            return explosion(f"{name} {found}", when, symptom, rate)
    return None
