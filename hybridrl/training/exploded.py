"""Detection of trainer failures that come from exploded weights."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.errors import UserError
from hybridrl.models.weight_bounds import exploded, explosion
from hybridrl.training.model import ParallelModel


def explosion_of(trained: Mapping[str, ParallelModel], symptom: object) -> UserError | None:
    """Returns the error that names the first trained model with exploded weights; None if there is
    none.

    Collective; all ranks get the same result. A model without an optimizer step so far is not
    blamed.

    Args:
        trained: Trained models by name, in the training phase.
        symptom: The failure, which all ranks met.
    """
    for name, model in trained.items():
        parts = model.world.gather_objects(exploded(model.weights_in_place()))
        found = next((part for part in parts if part is not None), None)
        if found is not None and model.num_updates:
            when, rate = f"optimizer step {model.num_updates}", model.peak_learning_rate
            return explosion(f"{name} {found}", when, symptom, rate)
    return None
