"""Saves and loads optimizer state. Each data-parallel rank writes and reads a part of the state.

Megatron's distributed optimizer concatenates the parameters of a bucket and cuts the result into
equal shares for the data-parallel ranks, so a cut can fall inside a parameter. A checkpoint
contains whole parameters, so that any layout can read it. Megatron gathers the entire state on the
first rank, which takes 12 bytes of host memory per parameter, and every rank reads all of it. Here,
one of the ranks with a piece of a parameter writes and reads the whole parameter, and exchanges the
other pieces with their ranks. The files are Megatron's, except that Megatron 0.16.1 writes wrong
states for the parameters after a padded bucket: it gathers the state without the padding between
buckets, but cuts it at offsets that include the padding.

States are saved as they are (optimizer_kinds.py). Each kind of Adam reads the files of the other.
Moments are then converted. A master is restored from a weight and its remainder, and a remainder is
the difference between a master and its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from hybridrl.checkpoint.fp32_remainders import joined
from hybridrl.checkpoint.optimizer_kinds import (
    MASTER,
    MOMENTS,
    MOMENTUM,
    REMAINDER,
    Kinds,
    PackedAdam,
    kinds_of,
    kinds_to_read,
)
from hybridrl.checkpoint.parameter_pieces import (
    Cut,
    PieceExchange,
    cuts_of,
    rounds_of,
    send_round,
    staging_buffer,
)
from hybridrl.errors import CheckpointError

STEPS = "steps"  # key of the step count of an Adam without parameters

Allocator = Callable[[tuple[int, str], int, torch.dtype, torch.device], Tensor]
"""Returns host memory for one state of a whole parameter, given the parameter's number in the
optimizer and the state's name, the number of elements, their type, and the device of the parameter.
"""


@contextmanager
def own_shares(
    optimizers: Iterable[Any],
    allocators: Callable[[int], Allocator] | None = None,
    stored: Collection[str] | None = None,
) -> Iterator[None]:
    """Makes `sharded_state_dict` of Megatron's `DistributedOptimizer`s return this rank's share.

    These are the parameters that it writes and reads; states must exist. Collective over the
    data-parallel ranks when saving. `allocators` maps an optimizer's number to an allocator of host
    memory for saved states; None for new memory. `stored` has the keys of the tensors in the
    checkpoint that will be loaded; None when saving.
    """
    name = "sharded_param_state_fully_reshardable"
    optimizers = list(optimizers)
    for number, optimizer in enumerate(optimizers):
        allocate = None if allocators is None else allocators(number)
        setattr(optimizer, name, partial(_param_state, optimizer, allocate, stored or ()))
    try:
        yield
    finally:
        for optimizer in optimizers:
            delattr(optimizer, name)


def hand_out(optimizers: Sequence[Any], states: Any) -> None:
    """Completes loaded states with other ranks' pieces, and restores masters from remainders. The
    model's weights must be loaded. Collective over the data-parallel ranks. `states` is the state
    of a single `DistributedOptimizer`, or a mapping by number.
    """
    for number, optimizer in enumerate(optimizers):
        state = states if len(optimizers) == 1 else states[number]
        found = state.setdefault("param_state", {})
        exchange = PieceExchange(optimizer.data_parallel_group_gloo)
        cuts = list(cuts_of(optimizer, exchange.size))
        kinds = exchange.all_kinds(found)
        for index, cut in enumerate(cuts):
            if exchange.rank not in cut.pieces or len(cut.pieces) == 1:
                continue
            if exchange.rank != cut.keeper:
                found[index] = {name: cut.empty(dtype) for name, dtype in kinds[index].items()}
            for name in kinds[index]:
                whole = found[index][name].reshape(-1)
                if exchange.rank != cut.keeper:
                    exchange.receive(whole[cut.pieces[exchange.rank]], cut.keeper)
                    continue
                for peer, span in cut.others:
                    exchange.send(whole[span], peer)
        exchange.wait()
        if not isinstance(optimizer.optimizer, PackedAdam):
            for index, cut in enumerate(cuts):
                if exchange.rank in cut.pieces and MASTER not in found[index]:
                    found[index][MASTER] = _master(cut.parameter, found[index])


@torch.no_grad()
def _master(parameter: Tensor, states: dict[str, Tensor]) -> Tensor:
    """Returns the flat fp32 master of a whole parameter, on the host. Removes the remainder."""
    weight = parameter.detach().flatten().cpu()
    if (remainder := states.pop(REMAINDER, None)) is None:
        return weight.float()
    return joined(weight.to(torch.bfloat16), remainder.reshape(-1).cpu())


def count_step(adam: Any, num_steps: int = 1) -> None:
    """Counts the steps of an Adam without parameters, as on a stage of frozen layers. Megatron
    takes the step count for all ranks from rank 0, which must have one.
    """
    if any(group["params"] for group in adam.param_groups):
        return
    if isinstance(adam, torch.optim.Adam):
        state: dict[Any, Any] = adam.state
        state.setdefault(STEPS, {"step": torch.tensor(0.0)})["step"] += num_steps
        return
    for group in adam.param_groups:  # transformer-engine's Adam counts steps per group
        group["step"] = group.get("step", 0) + num_steps


def kept_bytes(optimizers: Iterable[Any]) -> int:
    groups = [(one, one.data_parallel_group_gloo) for one in optimizers]
    return sum(
        dtype.itemsize * cut.parameter.numel()
        for optimizer, group in groups
        for cut in cuts_of(optimizer, group.size())
        if cut.keeper == group.rank()
        for dtype in kinds_of(optimizer, cut.parameter).values()
    )


def _param_state(
    optimizer: Any,
    allocate: Allocator | None,
    stored: Collection[str],
    model_state: Mapping[str, Any],
    is_loading: bool,
    metadata: Mapping[str, Any],
) -> dict[int, dict[str, Any]]:
    """Replaces `DistributedOptimizer.sharded_param_state_fully_reshardable`.

    Returns Megatron's sharded tensors, by the number of the parameter and the name of the state.
    The tensors of `model_state` are the parameters themselves. When loading, the optimizer's own
    tensors are returned for parameters that only this rank has.
    """
    tensors_of_model, _ = extract_sharded_tensors_and_factories(dict(model_state))
    described = {part.data: part for part in nested_values(tensors_of_model)}
    group = optimizer.data_parallel_group_gloo
    cuts = list(cuts_of(optimizer, group.size()))
    # If several tensor-parallel ranks or stages have the same parameter, only one of them writes
    # it.
    writes = [
        cut.parameter in described and not any(described[cut.parameter].replica_id[:-1])
        for cut in cuts
    ]
    if is_loading:
        kinds = [
            kinds_to_read(optimizer, cut.parameter, _names(optimizer, described, cut, stored))
            for cut in cuts
        ]
        kept = _to_fill(optimizer, cuts, kinds)
    else:
        kept = _gathered(optimizer, cuts, writes, allocate)
    return {
        index: _sharded(described, cut.parameter, kept[index])
        for index, cut in enumerate(cuts)
        if group.rank() == cut.keeper
    }


def _names(
    optimizer: Any, described: Mapping[Tensor, Any], cut: Cut, stored: Collection[str]
) -> list[str]:
    """Returns the names of a parameter's states in a checkpoint. Raises CheckpointError if it has
    no master of a parameter that needs one, or the states of another optimizer.
    """
    if cut.parameter not in described:
        raise ValueError(f"a parameter of shape {cut.parameter.shape} is not in the model's state")
    key = described[cut.parameter].key
    own = [name for name in kinds_of(optimizer, cut.parameter) if name in (MOMENTUM, *MOMENTS)]
    is_muon, was_muon = (MOMENTUM in own, _is_stored(_key(MOMENTUM, key), stored))
    if is_muon != was_muon and (was_muon or _is_stored(_key(MOMENTS[0], key), stored)):
        names = {True: "muon", False: "adamw"}
        raise CheckpointError(
            _key(MOMENTUM if was_muon else MOMENTS[0], key),
            f"a state of train.optimizer={names[was_muon]}",
            f"a checkpoint of train.optimizer={names[is_muon]}, which this run has",
            f"Continue with train.optimizer={names[was_muon]}, or begin a run with "
            "model.path=FOLDER, which takes only the weights.",
        )
    for name in (REMAINDER, MASTER):
        if _is_stored(_key(name, key), stored):
            return [name, *own]
    if not _is_stored(_key(own[0], key), stored):
        return [MASTER, *own]  # the reader reports that they are missing
    if cut.parameter.dtype != torch.float32:
        raise CheckpointError(
            _key(MASTER, key),
            "missing",
            "a checkpoint with an fp32 master or a remainder of each 16-bit parameter",
            "Load the checkpoint with the model.dtype with which it was saved.",
        )
    return [*MOMENTS]  # an fp32 parameter of a PackedAdam is its own master


def _is_stored(key: str, stored: Collection[str]) -> bool:
    """Whether a checkpoint has a tensor, or the parts of a tensor that is stored in parts."""
    return key in stored or any(one.startswith(f"{key}.") for one in stored)


def _key(name: str, key_of_weight: str) -> str:
    return f"optimizer.state.{name}.{key_of_weight}"


def _to_fill(
    optimizer: Any, cuts: Sequence[Cut], kinds: Sequence[Kinds]
) -> dict[int, dict[str, Tensor]]:
    """Returns the destinations of the states that this rank reads, by parameter number."""
    rank, found = optimizer.data_parallel_group_gloo.rank(), {}
    for index, cut in enumerate(cuts):
        if rank not in cut.pieces:
            continue
        own = _own_states(optimizer, cut) if len(cut.pieces) == 1 else {}
        if MASTER in own and own[MASTER].dtype == cut.parameter.dtype:
            # This is the model's parameter itself. The model's weights are loaded into it at the
            # same time, and Megatron overwrites them with the loaded state afterwards.
            del own[MASTER]
        found[index] = {
            name: own[name] if name in own else cut.empty(dtype)
            for name, dtype in kinds[index].items()
        }
    return found


def _gathered(
    optimizer: Any, cuts: Sequence[Cut], writes: Sequence[bool], allocate: Allocator | None
) -> dict[int, dict[str, Tensor]]:
    """Returns the states that this rank writes, by parameter number. Those of uncut parameters are
    the optimizer's own tensors; others are assembled on the host, and so are all if any is cut and
    `allocate` is given. Collective over the data-parallel ranks.
    """
    rank = optimizer.data_parallel_group_gloo.rank()
    own = {
        index: _own_states(optimizer, cut) for index, cut in enumerate(cuts) if rank in cut.pieces
    }
    kept = dict(own)
    # torch requires that all parts of a tensor on a rank are on the same device, and all layers are
    # parts of one tensor. If one parameter is assembled on the host, all parameters must be.
    are_cut = any(len(cut.pieces) > 1 for cut in cuts)
    for index, cut in enumerate(cuts):
        stays = allocate is None or not are_cut or not writes[index]
        if rank not in cut.pieces or (len(cut.pieces) == 1 and stays):
            continue
        if rank != cut.keeper:
            del kept[index]
            continue
        size, device = cut.parameter.numel(), cut.parameter.device
        kept[index] = {
            name: cut.empty(dtype)
            if allocate is None
            else allocate((index, name), size, dtype, device)
            for name, dtype in kinds_of(optimizer, cut.parameter).items()
        }
        for name, whole in kept[index].items():
            whole[cut.pieces[rank]].copy_(own[index][name].view(-1), non_blocking=True)
    kinds = [kinds_of(optimizer, cut.parameter) for cut in cuts]
    rounds = list(rounds_of(cuts, kinds, optimizer.data_parallel_group_gloo.size()))
    if not rounds:
        return kept
    device = cuts[0].parameter.device
    staging = staging_buffer(device)
    over_host = staging is None
    group = optimizer.data_parallel_group_gloo if over_host else optimizer.data_parallel_group
    for sent in rounds:
        send_round(sent, own, kept, group, staging)
    if device.type == "cuda":  # a sync point: afterwards the assembled states are on the host
        torch.cuda.current_stream(device).synchronize()
    return kept


def _own_states(optimizer: Any, cut: Cut) -> dict[str, Tensor]:
    inner = optimizer.optimizer
    if isinstance(inner, PackedAdam):
        group, index = optimizer.model_param_group_index_map[cut.parameter]
        return dict(inner.state[inner.param_groups[group]["params"][index]])
    states = optimizer._get_main_param_and_optimizer_states(cut.parameter)
    return {name: states[name].detach() for name in kinds_of(optimizer, cut.parameter)}


def _sharded(
    described: Mapping[Tensor, Any], parameter: torch.nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns a parameter's states as Megatron's sharded tensors, sharded as in the model."""
    if parameter not in described:
        raise ValueError(f"a parameter of shape {parameter.shape} is not in the model's state")
    of_model = described[parameter]
    parts = {}
    for name, tensor in tensors.items():
        changes: dict[str, Any] = {
            "key": _key(name, of_model.key),
            "data": tensor.view(of_model.data.shape),
            # The last coordinate is the data-parallel rank. It is 0, because only the keeper has
            # the tensor.
            "replica_id": (*of_model.replica_id[:-1], 0),
        }
        if isinstance(of_model, ShardedTensorFactory):
            changes["merge_fn"] = partial(_merged, changes["data"], of_model.merge_fn)
        else:
            changes["dtype"] = tensor.dtype
        parts[name] = replace(of_model, **changes)
    return parts


def _merged(whole: Tensor, merge: Callable[[Any], Tensor], parts: Any) -> Tensor:
    """Replaces `ShardedTensorFactory.merge_fn`, which would concatenate the parts in new memory:
    for the halves of feed-forward layers, more than half of the state. Parts that were read
    directly into `whole` are not copied; Megatron's function, `merge`, merges others.
    """
    return whole if _fill(parts, whole) else merge(parts)


def _fill(parts: Any, whole: Tensor) -> bool:
    """Whether the parts, in this order, exactly cover the memory of a tensor."""
    if not isinstance(parts, list) or not whole.is_contiguous():
        return False
    place = whole.data_ptr()
    for part in parts:
        is_next = isinstance(part, Tensor) and part.is_contiguous() and part.data_ptr() == place
        if not is_next or part.dtype != whole.dtype:
            return False
        place += part.nbytes
    return place == whole.data_ptr() + whole.nbytes
