"""Reference forward pass with transformers, for `hybridrl check --mismatch --reference`.

`reference_streams` is collective; rank 0 computes, and its error is raised on all ranks. It is a
float32 model's plain forward pass: eager attention, transformers' own masks and positions, one
sequence at a time, no cache. It shares no code with the decoding of the hf engine, because the
comparison may be about that engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.debug.residual import decoder_hooks
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.export import gather_tensors
from hybridrl.models.hf.transformers_model import transformers_model
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.weights import check_tensors, hf_layout, hf_shapes
from hybridrl.training.model import ParallelModel


def reference_streams(
    model: ParallelModel, prompts: Sequence[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Returns transformers' stages with the trainer's weights on rank 0; empty on others.

    A stage has one row per prompt token; `logits` has one row per prompt, for its last position.
    Raises ModelError on all ranks if transformers does not support the model, or its parameters
    differ from the family's.
    """
    world, source = model.world, model.source
    shapes = hf_shapes(source.family, source.shape)
    reference: Any = None
    live: dict[str, Tensor] = {}
    with world.all_agree("building the reference"):
        if world.rank == 0:
            cpu = torch.device("cpu")
            reference = transformers_model(source.computed_config, "float32", cpu, "eager")
            live = checkpoint_tensors(reference, source.hf_config, source.family)
            _check_parameters(live, shapes)
    weights = gather_tensors(model.whole_weights(), shapes, torch.float32, world)
    for name, tensor in weights:  # yields nothing on other ranks
        live[name].copy_(tensor)
    found: dict[str, Tensor] = {}
    with world.all_agree("computing the reference"):
        if reference is not None:
            found = plain_streams(reference, prompts)
    return found


@torch.no_grad()
def plain_streams(model: Any, prompts: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}

    def keep(stage: str, hidden: Tensor) -> None:
        if stage != "logits":  # the hook receives logits before the model scales or caps them
            found.setdefault(stage, []).append(hidden.detach().flatten(0, -2).float().clone())

    for prompt in prompts:
        with decoder_hooks(model, keep):
            output = model(input_ids=torch.tensor([prompt]), use_cache=False)
        found.setdefault("logits", []).append(output.logits[:, -1].float())
    return {stage: torch.cat(rows) for stage, rows in found.items()}


def _check_parameters(live: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    try:
        check_tensors(hf_layout(shapes), {name: tuple(t.shape) for name, t in live.items()})
    except ModelError as error:
        allowed = error.allowed.replace("its weight table", "the family's weight table")
        value = str(error.value).replace("the live model", "transformers' model")
        raise ModelError(error.name, value, allowed, error.remedy) from None
