"""Megatron's data parallel wrapper and distributed optimizer, and the learning-rate course."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.config.schema import TrainConfig
from hybridrl.platform import Platform
from hybridrl.trainer.peer_weights import PeerWeights


def wrap_for_training(
    chunks: Sequence[torch.nn.Module],
    config: TransformerConfig,
    train: TrainConfig,
    peak_learning_rate: float,
    platform: Platform,
    home: PeerWeights | None = None,
) -> tuple[list[torch.nn.Module], MegatronOptimizer]:
    """Gives the chunks gradient buffers and a distributed Adam whose state is shared out over the
    replicas.

    Weights must be in place: the optimizer copies them into its fp32 masters where the model is in
    bf16. They are moved to `home` first, if there is one.

    Returns:
        The wrapped chunks, which training must call, and the optimizer.
    """
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        # A step then leaves the gather of the parameters to us (trained_weights.py).
        overlap_param_gather=train.fuse_param_gather,
    )
    wrapped: list[torch.nn.Module] = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if train.fuse_param_gather:
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)  # type: ignore[operator]
    if home is not None:
        home.move(wrapped)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=peak_learning_rate,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            clip_grad=train.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        wrapped,
        use_gloo_process_groups=platform.is_cpu,
    )
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def owned_ranges(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, tuple[int, int]]:
    """Returns the elements, counted row by row, that this rank's optimizer updates of each of its
    parameters, under their local names; parameters that are other ranks' altogether are missing.
    """
    found = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            for part in optimizer.chained_optimizers:
                if parameter in part.model_param_gbuf_map:
                    span = part._get_model_param_range_map(parameter)["param"]
                    found[f"{index}/{name}"] = (span.start, span.end)
    return found


def learning_rate(train: TrainConfig, peak: float, update: int, num_updates: int) -> float:
    """Returns the learning rate of one optimizer step.

    Linear warm-up to `peak` over `train.warmup_steps`, then constant, or a cosine or straight line
    down to `train.min_learning_rate` at the last of `num_updates`.

    Args:
        update: index of the optimizer step, from 0.
        num_updates: optimizer steps of the whole run.
    """
    if update < train.warmup_steps:
        return peak * (update + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return peak
    decaying = max(num_updates - train.warmup_steps, 1)
    progress = min((update - train.warmup_steps) / decaying, 1.0)
    share = (
        1 - progress if train.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    )
    return train.min_learning_rate + (peak - train.min_learning_rate) * share


def set_learning_rate(optimizer: MegatronOptimizer, value: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value
