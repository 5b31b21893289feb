"""One optimizer step of one model or of several: gradients first, then all are applied, or none.

A step that cannot be trusted, because a loss or a gradient is not finite, leaves weights, optimizer
states and the learning-rate schedule of all its models as they were. Every rank decides by the same
numbers, which are on the host anyway: the loss over all ranks, and the norm that clipping needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybridrl.algorithms.base import LossOutput, num_response_tokens
from hybridrl.contracts.batch import TrainBatch
from hybridrl.metrics.values import SKIPPED
from hybridrl.training.batches.batch_plan import ModelInput
from hybridrl.training.model import ParallelModel
from hybridrl.training.optimizer import learning_rate


@dataclass(frozen=True)
class LossPart:
    """What one batch gives to the loss of a model.

    Args:
        name: first part of its metrics' names: the model's, or of a further term of its loss.
        inputs, results: micro-batches of this rank; what losses returned, on the last stage.
        metrics: the same on all ranks, `NAME/loss` among them.
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
        """Combines the losses of all ranks; arguments as above, `batch` the whole mini-batch."""
        metrics = reduce_losses(model, f"{name}/loss", results, num_response_tokens(batch))
        return LossPart(name, inputs, results, metrics)

    @property
    def loss(self) -> float:
        """The mini-batch's, over all ranks."""
        return self.metrics[f"{self.name}/loss"]

    def bad_micro_batches(self) -> list[int]:
        """Returns which micro-batches of this rank have a loss that is not finite."""
        losses = [float(result.loss) for result in self.results]
        return [index for index, loss in enumerate(losses) if not math.isfinite(loss)]

    def rows(self, index: int) -> tuple[int, ...]:
        """Returns which samples of the mini-batch a micro-batch holds."""
        return self.inputs[index].whole.sample_indices


@dataclass(frozen=True)
class Gradients:
    """What one model's passes over a mini-batch left in its gradient buffers, not yet applied.

    Args:
        name: of the model, first part of its metrics' names.
        model: holds the gradients.
        loss_parts: of the mini-batch, and of further terms of the loss.
        metrics: the same on all ranks, `NAME/loss`, `NAME/grad_norm` and `NAME/learning_rate`
            among them, and of a mixture of experts `moe/max_load` and the like (router.py,
            load_metrics) and `router/replayed_share` and the like (router_replay.py,
            replay_metrics).
        rate: learning rate to apply them with.
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
        """Takes the gradients' norm; the metrics are the first part's.

        Args:
            name, model, loss_parts: as above.
            num_updates_in_run: optimizer steps of this model in the whole run.
        """
        metrics = {**loss_parts[0].metrics, f"{name}/grad_norm": model.grad_norm()}
        experts = "moe" if name == "policy" else f"{name}/moe"
        metrics |= {f"{experts}/{what}": value for what, value in model.expert_load().items()}
        metrics |= {f"router/{what}": value for what, value in model.replays().items()}
        done, peak = model.num_updates, model.peak_learning_rate
        rate = learning_rate(model.train, peak, done, num_updates_in_run)
        metrics[f"{name}/learning_rate"] = rate
        return Gradients(name, model, loss_parts, metrics, rate)

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradients are, on all ranks."""
        return all(map(math.isfinite, (self.grad_norm, *(part.loss for part in self.loss_parts))))

    @property
    def loss(self) -> float:
        """The mini-batch's, over all ranks, without further terms."""
        return self.loss_parts[0].loss

    @property
    def grad_norm(self) -> float:
        """Of all ranks' gradients, before clipping."""
        return self.metrics[f"{self.name}/grad_norm"]


def optimizer_step(found: Sequence[Gradients]) -> dict[str, float]:
    """Applies the gradients of all models if all are finite, else of none; returns all metrics,
    `train/skipped_steps` among them.
    """
    are_finite = all(one.is_finite for one in found)
    for one in found:
        if are_finite:
            one.model.apply(one.rate, one.grad_norm)
    metrics = {name: value for one in found for name, value in one.metrics.items()}
    return metrics | {SKIPPED: float(not are_finite)}


def detached(result: LossOutput) -> LossOutput:
    """Returns the result with a loss of its own memory: Megatron frees the one that it was given
    as soon as the backward pass has it (`deallocate_pipeline_outputs`).
    """
    return replace(result, loss=result.loss.detach().clone())


def reduce_losses(
    model: ParallelModel, loss_name: str, results: Sequence[LossOutput], num_tokens: float
) -> dict[str, float]:
    """Combines the losses of all micro-batches on all ranks; the same on every rank afterwards.

    Sums become means over the `num_tokens` response tokens; names that end in `_max` are maxima.
    """
    world = model.world
    local = _local_sums(loss_name, results if model.mesh.reports else [])
    names: list[str] = sorted(
        {name for found in world.gather_objects(sorted(local)) for name in found}
    )
    sums = torch.tensor(
        [0.0 if name.endswith("_max") else local.get(name, 0.0) for name in names],
        dtype=torch.float64,
    )
    maxima = torch.tensor(
        [local.get(name, -torch.inf) if name.endswith("_max") else 0.0 for name in names],
        dtype=torch.float64,
    )
    sums, maxima = world.sum_over_world(sums), world.max_over_world(maxima)
    metrics = {}
    for name, total, largest in zip(names, sums.tolist(), maxima.tolist(), strict=True):
        if name.endswith("_max"):
            metrics[name] = largest
        else:
            metrics[name] = total if name == loss_name else total / num_tokens
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
