"""The optimizer's state in a checkpoint: every data-parallel rank writes and reads its own part.

Megatron's distributed optimizer lays the parameters of a buffer end to end and cuts that line into
equal shares, one a data-parallel rank, wherever the cuts fall; a checkpoint has whole parameters,
so that any layout can read it. Megatron gathers all of the state on the first of those ranks, which
then writes alone, and lets every rank read all: 12 bytes of host memory a parameter of the part of
the model that they share. Here a parameter is written by the rank in whose share it begins, which
is sent what lies in the shares behind, and read by the ranks that have a piece of it. The files are
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

STATES = ("param", "exp_avg", "exp_avg_sq")  # as Megatron names them: fp32 weight, Adam's moments


def param_state(
    optimizer: Any,
    model_state: Mapping[str, Any],
    is_loading: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dict[int, dict[str, Any]]:
    """Stands in for `DistributedOptimizer.sharded_param_state_fully_reshardable`.

    Collective over the optimizer's data-parallel ranks when saving.

    Args:
        optimizer: a `DistributedOptimizer` that has its states.
        model_state: sharded state of the model, whose data are the parameters themselves.
        is_loading: whether the tensors are to be filled from a checkpoint.
        metadata: not used.

    Returns:
        By a parameter's number in the optimizer, Megatron's sharded tensors by STATES; only of
        parameters that this rank writes, or has a piece of.
    """
    group = optimizer.data_parallel_group_gloo
    rank = group.rank()
    tensors_of_model, _ = extract_sharded_tensors_and_factories(dict(model_state))
    described = {part.data: part for part in nested_values(tensors_of_model)}
    messages: list[dist.P2POp] = []
    found: dict[int, dict[str, Any]] = {}
    for index, (parameter, pieces) in enumerate(_parameters(optimizer, group.size())):
        owner = next(iter(pieces))
        if rank not in pieces:
            continue
        own = {} if is_loading else optimizer._get_main_param_and_optimizer_states(parameter)
        tensors = {}
        for name in STATES:
            if is_loading or (rank == owner and len(pieces) > 1):
                tensors[name] = torch.empty(parameter.numel(), dtype=torch.float32)
            elif rank == owner:
                tensors[name] = own[name].detach()
        if not is_loading and len(pieces) > 1:
            messages += _exchange(tensors, own, pieces, group)
        if tensors:
            found[index] = _sharded(described, parameter, tensors, is_main=rank == owner)
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return found


def _parameters(optimizer: Any, dp: int) -> Iterator[tuple[torch.nn.Parameter, dict[int, slice]]]:
    """Yields the parameters in the order in which Megatron numbers them, each with the
    data-parallel ranks that have a piece of it, first to last, and which elements.
    """
    for buffer in optimizer.buffers:
        for parameter, (start, end, which) in buffer.param_index_map.items():
            bucket = buffer.buckets[which]
            share = bucket.grad_data.numel() // dp
            first, last = start - bucket.offset, end - bucket.offset
            yield (
                parameter,
                {
                    rank: slice(
                        max(first, rank * share) - first, min(last, (rank + 1) * share) - first
                    )
                    for rank in range(first // share, (last - 1) // share + 1)
                },
            )


def _exchange(
    whole: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    pieces: Mapping[int, slice],
    group: dist.ProcessGroup,
) -> Iterator[dist.P2POp]:
    """Yields the messages that make a parameter's states `whole` on the rank that has its first
    piece; puts that rank's own piece there.
    """
    rank, owner = group.rank(), next(iter(pieces))
    for name in STATES:
        if rank != owner:
            piece = own[name].detach().cpu().contiguous()
            yield dist.P2POp(dist.isend, piece, group=group, group_peer=owner)
            continue
        for peer, span in pieces.items():
            if peer == owner:
                whole[name][span].copy_(own[name].detach())
            else:
                yield dist.P2POp(dist.irecv, whole[name][span], group=group, group_peer=peer)


def _sharded(
    described: Mapping[torch.Tensor, Any],
    parameter: torch.nn.Parameter,
    tensors: Mapping[str, torch.Tensor],
    is_main: bool,
) -> dict[str, Any]:
    """Returns states as Megatron describes their parameter in the model."""
    if parameter not in described:
        raise ValueError(f"a parameter of shape {parameter.shape} is not in the model's state")
    of_model = described[parameter]
    parts = {}
    for name, tensor in tensors.items():
        changes: dict[str, Any] = {
            "key": f"optimizer.state.{name}.{of_model.key}",
            "data": tensor.view(of_model.data.shape),
            # The last coordinate is the data-parallel one; 0 of all writes, and must be there once.
            "replica_id": (*of_model.replica_id[:-1], 0 if is_main else 1),
        }
        if not isinstance(of_model, ShardedTensorFactory):
            changes["dtype"] = tensor.dtype
        parts[name] = replace(of_model, **changes)
    return parts
