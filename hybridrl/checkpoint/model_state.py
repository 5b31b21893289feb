"""Sharded state of a model in a checkpoint: Megatron's weights and optimizer states.

Owns the state dictionaries that Megatron saves and loads, and corrects errors in them. All
functions that call Megatron's collective functions are collective too.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.checkpoint import torch_dist_format
from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.manifest import Manifest, damaged, read_listed
from hybridrl.checkpoint.opening import Notify, damage_is_told
from hybridrl.checkpoint.optimizer_state import (
    Allocator,
    count_step,
    hand_out,
    kept_bytes,
    own_shares,
)
from hybridrl.checkpoint.parameter_pieces import connect
from hybridrl.checkpoint.reading import reading_threads
from hybridrl.checkpoint.sharded_files import INDEX, ShardedReader, first_failure
from hybridrl.checkpoint.torch_dist_format import COMMON_FILE, FORMAT_FILE
from hybridrl.config.files import parse_json
from hybridrl.errors import CheckpointError, OtherModelError
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import Lora
from hybridrl.parallel.groups import World
from hybridrl.parallel.mesh import Mesh

_BITS = {2: torch.int16, 4: torch.int32}  # integers by their size in bytes
# Suffix of the keys of get_extra_state. transformer-engine numbers them for grouped experts.
EXTRA_STATE = re.compile(r"_extra_state\d*$")


class Saved(Protocol):
    """A model on the ranks of a mesh, with its weights and, if trained, its optimizer
    (ParallelModel). `base` is the model that `lora` adapts. `passed_over` is the model whose
    remaining tensors training does not load.
    """

    @property
    def mesh(self) -> Mesh: ...

    @property
    def chunks(self) -> list[torch.nn.Module]: ...

    @property
    def optimizer(self) -> Any: ...

    @property
    def frozen_parts(self) -> Sequence[str]: ...

    @property
    def lora(self) -> Lora | None: ...

    @property
    def base(self) -> BaseReference | None: ...

    @property
    def passed_over(self) -> BaseReference | None: ...

    @property
    def trains_mtp(self) -> bool: ...


def load_model(
    checkpoint: Checkpoint, part: str, model: Saved, world: World, notify: Notify = print
) -> None:
    """Loads a part of a checkpoint, `policy` or `critic`, into a model and its optimizer, if any.
    The shapes must be equal; the layout may differ. Raises CheckpointError if the part is damaged
    or missing, or belongs to a different model.
    """
    folder, manifest = checkpoint.folder, checkpoint.manifest
    if f"{part}/{INDEX}" not in manifest.files:
        parts = sorted({name.split("/")[0] for name in manifest.files if INDEX in name})
        raise CheckpointError(
            str(folder / part),
            "no such part",
            f"one of {', '.join(parts)}, which {folder} has",
            "Was it saved by this algorithm?",
        )
    with damage_is_told(world, f"verifying {folder / part}", folder, notify):
        plain = _plain_values(folder, part, manifest)
        threads = reading_threads(len(world.host_ranks))
        reader = ShardedReader(folder, part, manifest, threads)
    with (
        damage_is_told(world, f"loading {folder / part}", folder, notify, is_unbounded=True),
        model.mesh.active(),
        world.platform.megatron_phase(),
    ):
        try:
            asked = sharded_state(model, is_loading=True, stored=reader.keys)
            loaded = torch_dist_format.load(asked, plain, reader.load)
        except (CheckpointingException, CheckpointException) as error:
            met = first_failure(error) if isinstance(error, CheckpointException) else error
            if isinstance(met, CheckpointError):
                raise met from None
            raise _other_model(folder / part, met) from error
        for index, chunk in enumerate(model.chunks):
            _load_weights(model, chunk, loaded[f"model{index}"])
        if model.optimizer is not None:
            hand_out(model.optimizer.chained_optimizers, loaded["optimizer"])
            _adopt_learning_rates(model.optimizer.chained_optimizers, loaded["optimizer"])
            model.optimizer.load_state_dict(loaded["optimizer"])
            _separate_step_counts(model.optimizer)


def _adopt_learning_rates(optimizers: Sequence[Any], loaded: Mapping[Any, Any]) -> None:
    """Replaces the saved bounds of the learning rate with those of the configuration. Megatron-Core
    0.19 finds the saved state of a parameter group by these bounds, among other values, and would
    find none after a change.
    """
    parts = [loaded] if len(optimizers) == 1 else [loaded[i] for i in range(len(optimizers))]
    for optimizer, part in zip(optimizers, parts, strict=True):
        for bound in ("max_lr", "min_lr"):
            values = {group.get(bound) for group in optimizer.param_groups}
            if len(values) == 1:
                for group in part["optimizer"]["param_groups"]:
                    group[bound] = next(iter(values))


def _plain_values(folder: Path, part: str, manifest: Manifest) -> dict[str, Any]:
    """Reads the values that are not sharded tensors, on every rank; CheckpointError if damaged."""
    content = read_listed(folder, f"{part}/{FORMAT_FILE}", manifest)
    try:
        backends = [parse_json(content)[f"{kind}_backend"] for kind in ("sharded", "common")]
    except (ValueError, LookupError, TypeError):
        backends = []
    if backends != ["torch_dist", "torch"]:
        file = folder / part / FORMAT_FILE
        raise damaged(file, f"backends {backends}", "torch_dist and torch, Megatron's format")
    content = read_listed(folder, f"{part}/{COMMON_FILE}", manifest)
    try:
        found: dict[str, Any] = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        first = str(error).splitlines()[0][:200]
        raise damaged(folder / part / COMMON_FILE, first, "plain values and tensors") from None
    return found


def _other_model(part: Path, error: BaseException) -> OtherModelError:
    return OtherModelError(
        str(part),
        str(error).splitlines()[0][:300] if str(error) else type(error).__name__,
        "a checkpoint with this model's shapes",
        "Load the checkpoint with the model configuration that wrote it.",
    )


def sharded_state(
    model: Saved,
    is_loading: bool,
    allocators: Callable[[int], Allocator] | None = None,
    stored: Collection[str] | None = None,
) -> dict[str, Any]:
    """Returns the state dictionary that Megatron saves or fills; empty outside the mesh. Collective
    over the mesh, which must be active. See `own_shares` for `allocators`, `stored`.
    """
    if not model.mesh.is_member:
        return {}
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    parts = _sharded_weights(model, metadata)
    if model.optimizer is None:
        return parts
    described = parts
    # A single tensor for all layers would lack the frozen layers.
    if model.frozen_parts or model.lora is not None:
        described = _sharded_weights(model, {**metadata, "non_homogeneous_layers": True})
    weights = described["model0"] if len(model.chunks) == 1 else dict(described)
    for optimizer in model.optimizer.chained_optimizers:
        _make_states(optimizer)
    with own_shares(model.optimizer.chained_optimizers, allocators, stored):
        parts["optimizer"] = model.optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        )
    whole = parts["optimizer"]
    for one in [whole] if len(model.optimizer.chained_optimizers) == 1 else whole.values():
        if not one["param_state"]:  # Megatron would compare this empty entry between ranks
            del one["param_state"]
    if not is_loading:
        _separate_storages(whole)
    return parts


def _sharded_weights(model: Saved, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all weights, trained and frozen; for a model with LoRA, only the trained ones."""
    return {
        f"model{index}": _saved_weights(model, chunk, chunk.sharded_state_dict(metadata=metadata))  # type: ignore[operator]
        for index, chunk in enumerate(model.chunks)
    }


def connect_shares(model: Saved) -> None:
    """Opens connections between GPUs before the first save. Collective over the mesh."""
    if model.mesh.is_member and model.optimizer is not None:
        connect(model.optimizer.chained_optimizers)


def saved_bytes(model: Saved) -> int:
    """Returns how many bytes this rank writes if the first replica writes all weights."""
    if not model.mesh.is_member:
        return 0
    with model.mesh.active():
        is_first = {
            True: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
            False: parallel_state.get_expert_data_parallel_rank() == 0,
        }
    found = sum(
        parameter.numel() * parameter.element_size()
        for chunk in model.chunks
        for parameter in chunk.parameters()
        if model.lora is None or parameter.requires_grad
        if is_first[getattr(parameter, "allreduce", True)]  # Megatron sets it to False for experts
    )
    return (
        found if model.optimizer is None else found + kept_bytes(model.optimizer.chained_optimizers)
    )


def _separate_storages(state: dict[str, Any]) -> None:
    """Gives each tensor in numpy's memory a separate storage of its size, without copying. The
    writer clones views of shared storages, and parameters on a CPU, whose storages must be
    resizable.
    """
    apply_factories(state)
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor) or not part.data.is_cpu:
            continue
        if not part.data.untyped_storage().resizable():
            bits = part.data.view(_BITS[part.data.element_size()])  # numpy has no bf16
            part.data = torch.from_numpy(bits.numpy()).view(part.data.dtype)


def _saved_weights(
    model: Saved, chunk: torch.nn.Module, state: Mapping[str, Any]
) -> dict[str, Any]:
    found = _only_weights(state)
    if model.lora is None:
        return found
    trained = _trained_names(chunk)
    return {name: part for name, part in found.items() if name in trained}


def _trained_names(chunk: torch.nn.Module) -> set[str]:
    return {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}


def _only_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chunk's state without layers' extra state, FP8 scales, empty for 16-bit weights.
    Layers of torch and transformer-engine then have the same keys and load each other's
    checkpoints.
    """
    return {name: part for name, part in state.items() if not EXTRA_STATE.search(name)}


def _load_weights(model: Saved, chunk: torch.nn.Module, state: Mapping[str, Any]) -> None:
    found = chunk.load_state_dict(state, strict=False)
    missing = set(found.missing_keys)
    if model.lora is not None:  # the frozen weights are those of the base model
        missing &= _trained_names(chunk)
    names = (*sorted(missing), *found.unexpected_keys)
    if lost := [name for name in names if not EXTRA_STATE.search(name)]:
        raise RuntimeError(f"parameters that only the checkpoint or only the model has: {lost}")


def _make_states(optimizer: Any) -> None:
    """Creates the states that Megatron saves and loads, if the optimizer has not taken a step."""
    adam = optimizer.optimizer
    count_step(adam, 0)
    if len(adam.state) or not any(group["params"] for group in adam.param_groups):
        return
    # Megatron would take a step with zero gradients, which increases the step count and decays the
    # weights.
    if not isinstance(adam, torch.optim.Adam):  # transformer-engine counts steps per group
        for group in adam.param_groups:
            group["step"] = 0
            for parameter in group["params"]:
                if parameter.numel() > 0:
                    adam.initialize_state(parameter, store_param_remainders=False)
        return
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _separate_step_counts(optimizer: Any) -> None:
    """Gives every parameter a separate step count again: for torch's Adam, megatron-core 0.16.1
    loads a single tensor for all, which each optimizer step would increase once per parameter.
    """
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
