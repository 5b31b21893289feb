"""Creates a model's data-parallel wrapper and distributed optimizer; computes learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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

from hybridrl.checkpoint.host_memory import available_bytes
from hybridrl.checkpoint.optimizer_state import count_step
from hybridrl.config.rules_optimizer import level_of
from hybridrl.config.schema import TrainConfig
from hybridrl.models.expert_stacks import ordered_by_stack
from hybridrl.models.megatron.build import named_parameters
from hybridrl.models.megatron.layers import add_weight_gradients_in_place
from hybridrl.models.trainable import stack_frozen
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.muon import Muon, model_matrices
from hybridrl.training.peer_weights import PeerWeights
from hybridrl.training.piecewise_adam import PiecewiseAdam, packed_bytes
from hybridrl.training.staging import check_host_memory


def wrap_for_training(
    chunks: Sequence[torch.nn.Module],
    config: TransformerConfig,
    train: TrainConfig,
    peak_learning_rate: float,
    mesh: Mesh,
    layout_of: Callable[[int], RankLayout],
    peer_weights: PeerWeights | None = None,
) -> tuple[list[torch.nn.Module], MegatronOptimizer]:
    """Creates gradient buffers and a distributed optimizer for the trained parameters.

    The optimizer state is sharded across the replicas; frozen parameters have no optimizer state.
    The weights must already be loaded, because the optimizer of a bf16 model copies them into fp32
    masters. If `peer_weights` is given, the weights are moved there first. `layout_of` returns the
    layout of a rank, for Muon.

    Returns:
        The wrapped chunks, which training must call, and the optimizer.
    """
    num_replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=train.gradient_dtype == "float32",
        # Overlap needs several buckets, and each rank owns a slice of each bucket. With a single
        # bucket, a rank owns few long slices, so updating an engine takes fewer messages.
        overlap_grad_reduce=num_replicas > 1 and not train.fuse_param_gather,
        # With this flag, trained_weights.py gathers the parameters after a step.
        overlap_param_gather=train.fuse_param_gather,
    )
    wrapped: list[torch.nn.Module] = []
    for index, chunk in enumerate(chunks):
        with experts_in_stacks(chunk):
            wrapped.append(
                DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            )
    if ddp_config.overlap_grad_reduce:  # Megatron starts the reduction only in the last micro-batch
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
    level = level_of(train)
    if level.is_low_precision:
        # Megatron then creates no fp32 masters, and sets `decoupled_grad` of the weights' shards.
        # Its own switch, `use_precision_aware_optimizer`, would require transformer-engine's Adam.
        options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    with mesh.as_world(megatron_optimizer):
        # The gloo groups are used to load checkpoints and, on CPU, also to save them.
        optimizer = get_megatron_optimizer(options, wrapped, use_gloo_process_groups=True)
    # If only experts are trained, the optimizer for the other parameters is a stub on all ranks.
    optimizer = ChainedOptimizer(
        [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    )
    if level.on_host:
        needed = sum(
            packed_bytes(one.optimizer.param_groups) for one in optimizer.chained_optimizers
        )
        own = (mesh.world.host_ranks[0], needed, available_bytes())
        check_host_memory(mesh.gather_objects(own))
    device = mesh.platform.device
    is_muon = train.optimizer == "muon"
    if is_muon:
        matrices, peers = model_matrices(
            named_parameters(chunks),
            layout_of,
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
    for part in optimizer.chained_optimizers:
        number_as_in_groups(part)
        if is_muon:
            part.optimizer = Muon(part, matrices, peers, train.muon_momentum, device)
        if level.is_low_precision:
            groups = part.optimizer.param_groups
            num_ranks = len(set(mesh.world.host_ranks) & set(mesh.ranks))
            part.optimizer = PiecewiseAdam(groups, device, level.on_host, num_ranks)
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def number_as_in_groups(optimizer: Any) -> None:
    """Corrects the numbers by which a distributed optimizer finds the states of its parameters.

    In a 16-bit model, the optimizer's groups list fp32 parameters first, but Megatron (0.16.1,
    `_build_optimizer_group_ranges`) numbers parameters in the order of the gradient buffers.
    Megatron would therefore save and load the states of the wrong parameters.
    """
    for index, group in enumerate(optimizer.opt_group_ranges):
        if len({parameter.dtype for parameter in group["params"]}) < 2:
            continue
        in_order = sorted(group["params"], key=lambda one: one.dtype != torch.float32)
        for number, parameter in enumerate(in_order):
            optimizer.model_param_group_index_map[parameter] = (index, number)


@contextmanager
def experts_in_stacks(chunk: torch.nn.Module) -> Iterator[None]:
    """Context manager: a Megatron wrapper that is built in this context stores the experts of each
    layer contiguously.

    An engine that stacks the same experts can then use them in place (models/expert_stacks.py). The
    wrapper stores parameters in the order of `named_parameters`. In that order, the two matrices of
    separate experts alternate, and grouped experts are reversed.
    """
    named = dict(chunk.named_parameters())
    order = ordered_by_stack(list(named))
    chunk.named_parameters = lambda *_, **__: ((n, named[n]) for n in order)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del chunk.named_parameters


def owned_ranges(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, tuple[int, int]]:
    """Returns, for each parameter, the range of elements that this rank's optimizer updates.

    Elements are counted in row-major order; keys are local names. Parameters that only other ranks
    update are omitted.
    """
    found = {}
    for name, parameter in named_parameters(chunks).items():
        for part in optimizer.chained_optimizers:
            if parameter in part.model_param_gbuf_map:
                span = part._get_model_param_range_map(parameter)["param"]
                found[name] = (span.start, span.end)
    return found


def gradient_norm(optimizer: Any) -> float:
    """Completes the accumulated gradients and returns their global norm before clipping.

    The norm is the same on all ranks. It is not finite if a gradient is not finite or the norm
    overflows fp32. This is the first half of ChainedOptimizer.step (megatron-core 0.16.1), which
    would apply non-finite gradients if there is no loss scaler. Contains Megatron's own sync point:
    the norm is copied to the host.
    """
    optimizer.prepare_grads()
    parts = optimizer.chained_optimizers
    if any(isinstance(part.optimizer, PiecewiseAdam) for part in parts):
        return math.sqrt(sum(_squared_norm(part) for part in parts))
    return float(optimizer.get_grad_norm())


def _squared_norm(part: Any) -> float:
    """Returns the squared norm of gradients in fp32, even if their types differ. Collective."""
    if hasattr(part, "get_grads_for_grad_norm"):  # its name in megatron-core 0.19
        gradients = part.get_grads_for_grad_norm()
    else:
        gradients = part.get_main_grads_for_grad_norm()
    found = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    zero = torch.zeros((), dtype=torch.float32, device=part.optimizer.device)
    total = torch.stack([zero, *found]).square().sum()
    dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
    return float(total)  # a sync point: the norm is copied to the host


def apply_gradients(optimizer: Any, grad_norm: float) -> None:
    """Clips the gradients and updates the parameters: the second half of the step."""
    for part in optimizer.chained_optimizers:
        parameters, bound = part.get_parameters(), part.config.clip_grad
        if isinstance(part.optimizer, PiecewiseAdam):  # gradients are scaled in fp32 in the step
            part.optimizer.gradient_scale = min(1.0, bound / (grad_norm + 1e-6)) if bound else 1.0
        elif parameters and bound > 0:
            clip_grad_by_total_norm_fp32(parameters, bound, grad_norm)
    optimizer.step_with_ready_grads()
    for part in optimizer.chained_optimizers:
        count_step(part.optimizer)


def learning_rate(train: TrainConfig, peak: float, update: int, num_updates: int) -> float:
    """Returns the learning rate of one optimizer step.

    The rate rises linearly to `peak` over `train.warmup_steps`. It then stays constant, or decays
    along a cosine or a straight line that would reach `train.min_learning_rate` one step after the
    last of `num_updates`. As in Megatron, skipped steps do not advance the schedule: after k
    skipped steps, the run ends k steps before the end of the schedule.

    Args:
        update: Index of this model's optimizer step, starting at 0.
        num_updates: Number of optimizer steps that this model takes in the whole run.
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
    """Sets the learning rate, weight decay and Adam's constants of all groups for the next step.

    Megatron's parameter groups contain multipliers that only its own scheduler applies; `wd_mult`
    is 0 for norms and biases. Loading a checkpoint restores the constants that were used when it
    was saved, so they are set from the configuration before every step.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
        group["betas"] = (train.adam_beta1, train.adam_beta2)
        group["eps"] = train.adam_eps
