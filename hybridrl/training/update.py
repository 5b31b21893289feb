"""Optimizer step of one or more models: computes all gradients first, then applies all or none.

If a loss or a gradient is not finite, the step is skipped: weights, optimizer states and
learning-rate schedules of all models remain unchanged. All ranks decide from the same numbers,
which are on the host anyway: the loss over all ranks, and the gradient norm that clipping needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybridrl.algorithms.base import LossOutput, num_response_tokens
from hybridrl.contracts.batch import TrainBatch
from hybridrl.errors import UserError
from hybridrl.metrics.values import SKIPPED
from hybridrl.models.weight_bounds import exploded, explosion
from hybridrl.training.batches.batch_plan import ModelInput
from hybridrl.training.model import ParallelModel
from hybridrl.training.optimizer import learning_rate


@dataclass(frozen=True)
class LossPart:
    """One batch's part of a model's loss.

    Args:
        name: Prefix for the metrics: the model's name, or the name of an additional loss term.
        results: Results of the loss function; empty except on the last pipeline stage.
        metrics: Metrics, including `NAME/loss`; the same on all ranks.
    """

    name: str
    inputs: Sequence[ModelInput]
    results: Sequence[LossOutput]
    metrics: Mapping[str, float]

    @staticmethod
    def of(
        name: str,
        model: ParallelModel,
        batch: TrainBatch,
        inputs: Sequence[ModelInput],
        results: Sequence[LossOutput],
    ) -> LossPart:
        """Combines the losses from all ranks; `batch` is the whole mini-batch."""
        metrics = reduce_losses(model, f"{name}/loss", results, num_response_tokens(batch))
        return LossPart(name, inputs, results, metrics)

    @property
    def loss(self) -> float:
        return self.metrics[f"{self.name}/loss"]

    def bad_micro_batches(self) -> list[int]:
        """Returns the indices of this rank's micro-batches whose loss is not finite."""
        losses = [float(result.loss) for result in self.results]
        return [index for index, loss in enumerate(losses) if not math.isfinite(loss)]

    def rows(self, index: int) -> tuple[int, ...]:
        return self.inputs[index].whole.sample_indices


@dataclass(frozen=True)
class Gradients:
    """Accumulated but not yet applied gradients of one model for a mini-batch.

    Args:
        loss_parts: Loss of the mini-batch, followed by any additional loss terms.
        metrics: Metrics, the same on all ranks: `NAME/loss`, `NAME/grad_norm`,
            `NAME/learning_rate`, `moe/...` (router.py, load_metrics), `router/...`
            (router_replay.py, replay_metrics) and `mtp/loss`.
    """

    name: str
    model: ParallelModel
    loss_parts: Sequence[LossPart]
    metrics: dict[str, float]
    rate: float

    @staticmethod
    def of(
        name: str, model: ParallelModel, loss_parts: Sequence[LossPart], num_updates_in_run: int
    ) -> Gradients:
        """Computes the gradient norm and collects the metrics."""
        metrics = {**loss_parts[0].metrics, f"{name}/grad_norm": model.grad_norm()}
        experts = "moe" if name == "policy" else f"{name}/moe"
        metrics |= {f"{experts}/{what}": value for what, value in model.expert_load().items()}
        metrics |= {f"router/{what}": value for what, value in model.replays().items()}
        metrics |= model.mtp_loss()
        done, peak = model.num_updates, model.peak_learning_rate
        rate = learning_rate(model.train, peak, done, num_updates_in_run)
        metrics[f"{name}/learning_rate"] = rate
        return Gradients(name, model, loss_parts, metrics, rate)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.grad_norm, *(part.loss for part in self.loss_parts))))

    @property
    def loss(self) -> float:
        return self.loss_parts[0].loss

    @property
    def grad_norm(self) -> float:
        return self.metrics[f"{self.name}/grad_norm"]


def optimizer_step(found: Sequence[Gradients]) -> dict[str, float]:
    """Applies all models' gradients if all are finite, otherwise none; returns the metrics."""
    are_finite = all(one.is_finite for one in found)
    for one in found:
        if are_finite:
            one.model.apply(one.rate, one.grad_norm)
    metrics = {name: value for one in found for name, value in one.metrics.items()}
    return metrics | {SKIPPED: float(not are_finite)}


def detached(result: LossOutput) -> LossOutput:
    """Returns the result with a copy of its loss.

    The copy is needed because Megatron frees the original after the backward pass
    (`deallocate_pipeline_outputs`).
    """
    return replace(result, loss=result.loss.detach().clone())


def reduce_losses(
    model: ParallelModel, loss_name: str, results: Sequence[LossOutput], num_tokens: float
) -> dict[str, float]:
    """Combines the losses of all micro-batches on all ranks; every rank receives the result.

    The loss is summed, metrics are averaged over the `num_tokens` response tokens, and metrics
    whose names end in `_max` are combined with max.
    """
    world = model.world
    local = _local_sums(loss_name, results if model.mesh.reports else [])
    names: list[str] = sorted(
        {name for found in world.gather_objects(sorted(local)) for name in found}
    )
    absent = [-torch.inf if name.endswith("_max") else 0.0 for name in names]
    local_values = [local.get(name, value) for name, value in zip(names, absent, strict=True)]
    values = torch.tensor(local_values, dtype=torch.float64)
    totals, maxima = world.sum_over_world(values).tolist(), world.max_over_world(values).tolist()
    metrics = {}
    for name, total, largest in zip(names, totals, maxima, strict=True):
        mean = total if name == loss_name else total / num_tokens
        metrics[name] = largest if name.endswith("_max") else mean
    return metrics


def _local_sums(loss_name: str, results: Sequence[LossOutput]) -> Mapping[str, float]:
    sums: dict[str, float] = {}
    for result in results:
        for name, value in {loss_name: result.loss, **result.metrics}.items():
            number = float(value)
            if name.endswith("_max"):
                sums[name] = max(sums.get(name, number), number)
            else:
                sums[name] = sums.get(name, 0.0) + number
    return sums


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
