"""Megatron's data parallel wrapper and distributed optimizer, its step in two halves, and the
learning-rate schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.checkpoint.optimizer_state import count_step
from hybridrl.config.schema import TrainConfig
from hybridrl.models.expert_stacks import in_stacks
from hybridrl.models.megatron.build import named_parameters
from hybridrl.models.megatron.layers import add_weight_gradients_in_place
from hybridrl.models.trainable import stack_frozen
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.peer_weights import PeerWeights


def wrap_for_training(
    chunks: Sequence[torch.nn.Module],
    config: TransformerConfig,
    train: TrainConfig,
    peak_learning_rate: float,
    mesh: Mesh,
    peer_weights: PeerWeights | None = None,
) -> tuple[list[torch.nn.Module], MegatronOptimizer]:
    """Gives the trained parameters gradient buffers and a distributed Adam whose state is shared
    out over the replicas; frozen ones have none of it.

    Weights must be in place: the optimizer copies them into its fp32 masters where the model is in
    bf16. They are moved to `peer_weights` first, if there is one.

    Returns:
        The wrapped chunks, which training must call, and the optimizer.
    """
    num_replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        # In buckets, of which each rank owns a part. One bucket is owned in few, long pieces, from
        # which an engine is written in fewer messages.
        overlap_grad_reduce=num_replicas > 1 and not train.fuse_param_gather,
        # A step then leaves the gather of the parameters to us (trained_weights.py).
        overlap_param_gather=train.fuse_param_gather,
    )
    wrapped: list[torch.nn.Module] = []
    for index, chunk in enumerate(chunks):
        with experts_in_stacks(chunk):
            wrapped.append(
                DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            )
    if ddp_config.overlap_grad_reduce:  # but for the last micro-batch, which starts it
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    for chunk in wrapped:
        add_weight_gradients_in_place(chunk)
    if train.fuse_param_gather:
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)  # type: ignore[operator]
    if peer_weights is not None:
        peer_weights.move(wrapped)
    else:
        stack_frozen(named_parameters(chunks))
    options = OptimizerConfig(
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
    )
    with mesh.as_world(megatron_optimizer):
        # What is loaded of a checkpoint goes over the gloo groups; on CPU what is saved too.
        optimizer = get_megatron_optimizer(options, wrapped, use_gloo_process_groups=True)
    # Where only experts are trained on all ranks, the optimizer of the other parameters is a stub.
    optimizer = ChainedOptimizer(
        [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    )
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


@contextmanager
def experts_in_stacks(chunk: torch.nn.Module) -> Iterator[None]:
    """Lets Megatron's wrapper, made in this context, hold the experts of a layer one after another:
    an engine that stacks the same ones then reads them where they are (models/expert_stacks.py).

    The wrapper takes parameters in the order of `named_parameters`, which with experts one by one
    has the two matrices of each beside each other, and with grouped ones the last expert first.
    """
    named = dict(chunk.named_parameters())
    order = in_stacks(list(named))
    chunk.named_parameters = lambda *_, **__: ((n, named[n]) for n in order)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del chunk.named_parameters


def owned_ranges(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, tuple[int, int]]:
    """Returns the elements, counted row by row, that this rank's optimizer updates of each of its
    parameters, under their local names; parameters that are other ranks' altogether are missing.
    """
    found = {}
    for name, parameter in named_parameters(chunks).items():
        for part in optimizer.chained_optimizers:
            if parameter in part.model_param_gbuf_map:
                span = part._get_model_param_range_map(parameter)["param"]
                found[name] = (span.start, span.end)
    return found


def gradient_norm(optimizer: Any) -> float:
    """Makes accumulated gradients ready and returns their global norm before clipping, the same on
    all ranks; it is not finite where any of them is not, or where it is beyond fp32.

    The first half of ChainedOptimizer.step (megatron-core 0.16.1), which without a loss scaler goes
    on to apply such gradients. Megatron's own sync point is in it: the norm comes to the host.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def apply_gradients(optimizer: Any, grad_norm: float) -> None:
    """Clips gradients of this norm and updates the parameters: the second half."""
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                part.config.clip_grad,
                grad_norm,
                part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    for part in optimizer.chained_optimizers:
        count_step(part.optimizer)


def learning_rate(train: TrainConfig, peak: float, update: int, num_updates: int) -> float:
    """Returns the learning rate of one optimizer step.

    Linear warm-up to `peak` over `train.warmup_steps`, then constant, or a cosine or straight line
    that would reach `train.min_learning_rate` at the step after the last of `num_updates`. Skipped
    steps do not count, as in Megatron: after k of them the schedule ends k steps early.

    Args:
        update: index of the optimizer step, from 0; steps that train another model do not count.
        num_updates: optimizer steps that this model takes in the whole run.
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


def set_step_options(optimizer: MegatronOptimizer, train: TrainConfig, rate: float) -> None:
    """Sets what the next step uses, in every parameter group: the learning rate, and weight decay
    and Adam's constants as the configuration has them.

    Megatron's groups carry multipliers, which its own scheduler applies and Adam does not know:
    `wd_mult` is 0 for norms and biases. A checkpoint brings the constants that it was written with,
    so they are set here, from the configuration, and not only where the optimizer is made.

    Args:
        optimizer: Megatron's.
        train: decay and constants.
        rate: learning rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
        group["betas"] = (train.adam_beta1, train.adam_beta2)
        group["eps"] = train.adam_eps
