"""Saves and loads optimizer state. Each data-parallel rank writes and reads a part of the state.

Megatron's distributed optimizer concatenates the parameters of a bucket and cuts the result into
equal shares, one for each data-parallel rank, so a cut can fall inside a parameter. A checkpoint
contains whole parameters, so that any layout can read it. Megatron gathers the entire state on the
first data-parallel rank, which writes all of it, and every rank reads the entire state. This takes
12 bytes of host memory per parameter. Here, one of the ranks with a piece of a parameter writes and
reads the whole parameter, and exchanges the other pieces with their ranks. The files are the same
as Megatron's, except that Megatron 0.16.1 writes wrong states for the parameters after a padded
bucket: it gathers the state without the padding between buckets, but cuts it at offsets that
include the padding.

With more than one replica, nearly every parameter is cut, so most of the state is sent. GPUs send
saved states to each other over NCCL in rounds of bounded size, and then copy the states directly to
the page-locked memory of checkpoint copies, if there is any. With gloo, sending took 11 s for a
state of 13 GB per rank (benchmarks/results/restart_4gpu_h200.json). Loading uses gloo.

Adam's states are fp32 masters and fp32 moments. A PackedAdam has bf16 moments, and remainders in
place of masters; its states are saved as they are. Each kind of optimizer reads the files of the
other. Moments are then converted. A master is restored from a weight and its remainder, and a
remainder is the difference between a master and its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from hybridrl.checkpoint.fp32_remainders import joined
from hybridrl.errors import CheckpointError

# Megatron's names for the fp32 weight and Adam's moments.
MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
STATES = (MASTER, *MOMENTS)
MOMENTUM = "momentum_buffer"  # Muon's state of a matrix
REMAINDER = "remainder"  # low 16 bits of the fp32 weight (fp32_remainders.py)
STEPS = "steps"  # Key of the step count in the state of an Adam optimizer that has no parameters.
# Maximum total size of the pieces in transit on the host while loading. Waiting for each piece
# would be slow.
MOST_BYTES_UNDER_WAY = 256 << 20
ROUND_BYTES = 64 << 20  # maximum that a rank sends or receives per round; size of the GPU buffer

Kinds = Mapping[str, torch.dtype]
"""Names and data types of a parameter's states."""

Allocator = Callable[[tuple[int, str], int, torch.dtype, torch.device], Tensor]
"""Returns host memory for one state of a whole parameter, given the parameter's number in the
optimizer and the state's name, the number of elements, their type, and the device of the parameter.
"""


@runtime_checkable
class PackedAdam(Protocol):
    """An Adam with bf16 moments and remainders (training/piecewise_adam.py).

    Attributes:
        on_host: Whether the states are in host memory, from which checkpoints are written.
        state: States of each parameter's shard, by name.
    """

    on_host: bool
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Sets a state of a parameter's shard; Megatron calls this."""
        ...


@runtime_checkable
class MatrixOptimizer(Protocol):
    """An optimizer with momentum of some parameters, and Adam's moments of others
    (training/muon.py).

    Attributes:
        state: States of each parameter's shard, by name.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        """Returns the names of the states of a model parameter's shards."""
        ...


@dataclass(frozen=True)
class _Cut:
    """A parameter, the data-parallel ranks with a piece of it, and the elements in each piece."""

    parameter: torch.nn.Parameter
    pieces: Mapping[int, slice]
    keeper: int  # rank that writes and reads the whole parameter

    @property
    def others(self) -> Iterator[tuple[int, slice]]:
        """Ranks and slices of the pieces that are not on the keeper."""
        return ((rank, span) for rank, span in self.pieces.items() if rank != self.keeper)

    def empty(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns uninitialized memory for one state of the whole parameter. Its pages are
        allocated when they are written.

        numpy allocates the memory, so that each view can become a tensor with a separate storage.
        """
        num_bytes = self.parameter.numel() * dtype.itemsize
        return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype)


def kinds_of(optimizer: Any, parameter: Tensor) -> Kinds:
    """Returns the states that a distributed optimizer has of a parameter."""
    if isinstance(optimizer.optimizer, MatrixOptimizer):
        names = optimizer.optimizer.state_names(parameter)
        return dict.fromkeys((MASTER, *names), torch.float32)
    if not isinstance(optimizer.optimizer, PackedAdam):
        return dict.fromkeys(STATES, torch.float32)
    found = dict.fromkeys(MOMENTS, torch.bfloat16)
    return found if parameter.dtype == torch.float32 else {**found, REMAINDER: torch.int16}


def _kinds_to_read(optimizer: Any, parameter: Tensor, names: Collection[str]) -> Kinds:
    """Returns the states that `names`, a checkpoint's states of a parameter, allow to load."""
    own, others = kinds_of(optimizer, parameter), {MASTER: torch.float32, REMAINDER: torch.int16}
    return {name: own.get(name) or others[name] for name in names}


@contextmanager
def own_shares(
    optimizers: Iterable[Any],
    allocators: Callable[[int], Allocator] | None = None,
    stored: Collection[str] | None = None,
) -> Iterator[None]:
    """Context manager: until it exits, `sharded_state_dict` of Megatron's distributed optimizers
    returns only the parameters that this rank writes and reads. The optimizer states must exist.

    Collective over the data-parallel ranks when saving.

    Args:
        optimizers: `DistributedOptimizer`s.
        allocators: Function that maps an optimizer's number to an allocator of host memory for
            saved states. If None, new memory is allocated for each save.
        stored: Keys of the tensors in the checkpoint that will be loaded; None when saving.
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
    """Completes loaded states with the pieces that other ranks have read, and restores masters
    from remainders. The model's weights must be loaded. Collective over the data-parallel ranks.

    Args:
        optimizers: `DistributedOptimizer`s.
        states: Loaded states of the optimizers: the state itself if there is one optimizer,
            otherwise a mapping by optimizer number.
    """
    for number, optimizer in enumerate(optimizers):
        state = states if len(optimizers) == 1 else states[number]
        found = state.setdefault("param_state", {})
        exchange = _Exchange(optimizer.data_parallel_group_gloo)
        cuts = list(_cuts(optimizer, exchange.size))
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
    """Counts the steps of an Adam without parameters, such as on a stage whose layers are all
    frozen. Megatron takes the step count for all ranks from rank 0, so rank 0 must have a count
    even without parameters.
    """
    if any(group["params"] for group in adam.param_groups):
        return
    if isinstance(adam, torch.optim.Adam):
        state: dict[Any, Any] = adam.state
        state.setdefault(STEPS, {"step": torch.tensor(0.0)})["step"] += num_steps
        return
    for group in adam.param_groups:  # Adam from transformer-engine, which counts steps per group
        group["step"] = group.get("step", 0) + num_steps


def kept_bytes(optimizers: Iterable[Any]) -> int:
    """Returns how many bytes of optimizer state this rank writes."""
    groups = [(one, one.data_parallel_group_gloo) for one in optimizers]
    return sum(
        dtype.itemsize * cut.parameter.numel()
        for optimizer, group in groups
        for cut in _cuts(optimizer, group.size())
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

    Args:
        optimizer: A `DistributedOptimizer`.
        allocate: Allocator of memory for saved states; if None, new memory is allocated.
        stored: Keys of the tensors in the checkpoint that will be loaded.
        model_state: Sharded state of the model; its tensors are the parameters themselves.
        is_loading: Whether a checkpoint will be loaded into the tensors. For parameters that only
            this rank has, the optimizer's own tensors are returned.
        metadata: Unused.

    Returns:
        Megatron's sharded tensors, by the number of the parameter in the optimizer and then by the
        name of the state.
    """
    tensors_of_model, _ = extract_sharded_tensors_and_factories(dict(model_state))
    described = {part.data: part for part in nested_values(tensors_of_model)}
    group = optimizer.data_parallel_group_gloo
    cuts = list(_cuts(optimizer, group.size()))
    # If several tensor-parallel ranks or stages have the same parameter, only one of them writes
    # it.
    writes = [
        cut.parameter in described and not any(described[cut.parameter].replica_id[:-1])
        for cut in cuts
    ]
    if is_loading:
        kinds = [
            _kinds_to_read(optimizer, cut.parameter, _names(optimizer, described, cut, stored))
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
    optimizer: Any, described: Mapping[Tensor, Any], cut: _Cut, stored: Collection[str]
) -> list[str]:
    """Returns the names of a parameter's states in a checkpoint.

    Raises:
        CheckpointError: The checkpoint has no master of a parameter that needs one, or has the
            states of another optimizer.
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
    optimizer: Any, cuts: Sequence[_Cut], kinds: Sequence[Kinds]
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
    optimizer: Any, cuts: Sequence[_Cut], writes: Sequence[bool], allocate: Allocator | None
) -> dict[int, dict[str, Tensor]]:
    """Returns the states that this rank writes, by parameter number. States of uncut parameters are
    the optimizer's own tensors; states of cut parameters are assembled on the host. With
    `allocate`, the states of all parameters are assembled on the host if any parameter is cut.
    Collective over the data-parallel ranks.
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
    rounds = list(_rounds(cuts, kinds, optimizer.data_parallel_group_gloo.size()))
    if not rounds:
        return kept
    device = cuts[0].parameter.device
    staging = _staging(device)
    over_host = staging is None
    group = optimizer.data_parallel_group_gloo if over_host else optimizer.data_parallel_group
    for sent in rounds:
        _send_round(sent, own, kept, group, staging)
    if device.type == "cuda":  # a sync point: afterwards the assembled states are on the host
        torch.cuda.current_stream(device).synchronize()
    return kept


def _staging(device: torch.device) -> Tensor | None:
    """Returns a GPU buffer that receives the pieces of a round before they are copied to the host.
    Returns None on CPU, because pieces are received directly there.
    """
    if not _is_gpu(device):
        return None
    return torch.empty(ROUND_BYTES, dtype=torch.uint8, device=device)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _own_states(optimizer: Any, cut: _Cut) -> dict[str, Tensor]:
    inner = optimizer.optimizer
    if isinstance(inner, PackedAdam):
        group, index = optimizer.model_param_group_index_map[cut.parameter]
        return dict(inner.state[inner.param_groups[group]["params"][index]])
    states = optimizer._get_main_param_and_optimizer_states(cut.parameter)
    return {name: states[name].detach() for name in kinds_of(optimizer, cut.parameter)}


def connect(optimizers: Iterable[Any]) -> None:
    """Sends a number between GPUs that will exchange pieces, so that NCCL allocates its memory now
    and not during the first save. Collective over the data-parallel ranks.
    """
    for optimizer in optimizers:
        group = optimizer.data_parallel_group
        cuts = list(_cuts(optimizer, group.size()))
        if not cuts or not _is_gpu(cuts[0].parameter.device):
            continue
        ways = sorted({(sender, cut.keeper) for cut in cuts for sender, _ in cut.others})
        one = torch.zeros(2, dtype=torch.float32, device=cuts[0].parameter.device)
        transfers = []
        for sender, keeper in ways:
            if group.rank() == sender:
                transfers.append(dist.P2POp(dist.isend, one[:1], group=group, group_peer=keeper))
            if group.rank() == keeper:
                transfers.append(dist.P2POp(dist.irecv, one[1:], group=group, group_peer=sender))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()


class _Sent(NamedTuple):
    """Elements that one rank sends to another. `span` is their range in the parameter, and `part`
    is their range in the sender's piece.
    """

    key: tuple[int, str]
    sender: int
    keeper: int
    span: slice
    part: slice


def _rounds(cuts: Sequence[_Cut], kinds: Sequence[Kinds], num_ranks: int) -> Iterator[list[_Sent]]:
    """Yields the rounds, which are identical on all ranks. No rank sends or receives more than
    ROUND_BYTES per round.
    """
    found: list[_Sent] = []
    counts = np.zeros((2, num_ranks), np.int64)
    for index, cut in enumerate(cuts):
        for name, dtype in kinds[index].items():
            most = ROUND_BYTES // dtype.itemsize
            for sender, piece in cut.others:
                for begin in range(piece.start, piece.stop, most):
                    end = min(begin + most, piece.stop)
                    size = (end - begin) * dtype.itemsize
                    if max(counts[0, sender], counts[1, cut.keeper]) + size > ROUND_BYTES:
                        yield found
                        found, counts = [], np.zeros_like(counts)
                    counts[0, sender] += size
                    counts[1, cut.keeper] += size
                    span, part = (slice(begin - start, end - start) for start in (0, piece.start))
                    found.append(_Sent((index, name), sender, cut.keeper, span, part))
    if found:
        yield found


def _send_round(
    sent: Sequence[_Sent],
    own: Mapping[int, Mapping[str, Tensor]],
    kept: Mapping[int, Mapping[str, Tensor]],
    group: dist.ProcessGroup,
    staging: Tensor | None,
) -> None:
    """Sends and receives this rank's pieces of a round.

    Args:
        sent: Pieces of the round.
        own, kept: Pieces on this rank, and parameters that this rank assembles.
        group: Data-parallel ranks.
        staging: Receive buffer on the GPU, uint8; if None, pieces are received directly.
    """
    rank, used = group.rank(), 0
    transfers: list[dist.P2POp] = []
    arrivals: list[tuple[Tensor, Tensor]] = []
    for (index, name), sender, keeper, span, part in sent:
        if rank == sender:
            piece = own[index][name].reshape(-1)[part].view(torch.uint8)  # NCCL lacks int16
            piece = piece if staging is None else piece.to(staging.device)
            transfers.append(dist.P2POp(dist.isend, piece, group=group, group_peer=keeper))
        elif rank == keeper:
            place = kept[index][name][span].view(torch.uint8)
            if staging is not None:
                arrivals.append((place, staging[used : used + place.numel()]))
                place = arrivals[-1][1]
                used += place.numel()
            transfers.append(dist.P2POp(dist.irecv, place, group=group, group_peer=sender))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    for place, arrived in arrivals:
        place.copy_(arrived, non_blocking=True)


def _cuts(optimizer: Any, dp: int) -> Iterator[_Cut]:
    """Yields the parameters in the order in which Megatron numbers them."""
    kept = [0] * dp  # elements, by rank
    for buffer in optimizer.buffers:
        for parameter, (start, end, which) in buffer.param_index_map.items():
            bucket = buffer.buckets[which]
            share = bucket.grad_data.numel() // dp
            first, last = start - bucket.offset, end - bucket.offset
            pieces = {
                rank: slice(max(first, rank * share) - first, min(last, (rank + 1) * share) - first)
                for rank in range(first // share, (last - 1) // share + 1)
            }
            keeper = min(pieces, key=lambda rank: kept[rank])
            kept[keeper] += parameter.numel()
            yield _Cut(parameter, pieces, keeper)


def _sharded(
    described: Mapping[Tensor, Any], parameter: torch.nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns the states of a parameter as Megatron's sharded tensors, with the sharding of the
    parameter in the model.
    """
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
    """Replaces `ShardedTensorFactory.merge_fn`, which would concatenate the parts in new memory.
    For the halves of feed-forward layers, this is more than half of the state. If the parts were
    read directly into `whole`, nothing is copied.

    Args:
        whole: Tensor that Megatron's `build_fn` split into parts.
        merge: Megatron's function, used for parts in other memory.
        parts: Parts that were read.
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


class _Exchange:
    """Pieces in transit between the ranks of a gloo group, on the host.

    Who waits for whom: whenever too many bytes are in transit, a rank waits until all pieces that
    it has begun to send or receive have arrived. All ranks process parameters and states in the
    same order, so the slowest rank never waits for another rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._under_way: list[tuple[Any, Tensor]] = []
        self._num_bytes = 0

    def all_kinds(self, found: Mapping[int, Mapping[str, Tensor]]) -> dict[int, Kinds]:
        """Returns the kinds of all states that the ranks have read, by parameter number.
        Collective.
        """
        own = {i: {name: one.dtype for name, one in states.items()} for i, states in found.items()}
        kinds: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(kinds, own, group=self._group)
        return {index: one for read in kinds for index, one in read.items()}

    def send(self, piece: Tensor, peer: int) -> None:
        """Begins to send a contiguous piece."""
        piece = piece.view(torch.uint8)
        self._add(dist.isend(piece, group=self._group, group_dst=peer), piece)

    def receive(self, place: Tensor, peer: int) -> None:
        """Begins to receive a piece at its destination."""
        place = place.view(torch.uint8)
        self._add(dist.irecv(place, group=self._group, group_src=peer), place)

    def wait(self) -> None:
        """Waits until all pieces are sent and received."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way, self._num_bytes = [], 0

    def _add(self, work: Any, tensor: Tensor) -> None:
        self._under_way.append((work, tensor))
        self._num_bytes += tensor.nbytes
        if self._num_bytes > MOST_BYTES_UNDER_WAY:
            self.wait()
