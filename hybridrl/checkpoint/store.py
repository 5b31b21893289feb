"""Checkpoints of a run: Megatron's sharded format for models, JSON for the loop, complete or not
there at all.

A checkpoint is the folder `checkpoints/step_N` with one sharded part a trained model (`policy/`,
`critic/`), `state.json` (what the loop needs to go on), `hf/` (config.json and tokenizer files, so
that it converts by itself), `rng_rank_R.safetensors`, and `manifest.json`, the size of every other
file. It is written as `step_N.partial` and renamed at the end, so a folder without the suffix was
complete once; the manifest finds what was lost since. Any layout loads any other's checkpoint. All
ranks must see the same folder.

Collective: every rank calls `save` and `load` together.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint.folders import (
    HF_FILES,
    MANIFEST,
    PARTIAL,
    STATE,
    newest_checkpoint,
    read_state,
    step_folders,
)
from hybridrl.checkpoint.optimizer_state import hand_out, own_shares
from hybridrl.errors import CheckpointError
from hybridrl.models.directory import write_side_files
from hybridrl.parallel.groups import World

EXTRA_STATE = "_extra_state"  # torch's ending of the names of get_extra_state's results


class Saved(Protocol):
    """A model over all ranks that has weights and, when it is trained, an optimizer."""

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """Megatron's modules, their parameters whole."""
        ...

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer, None for a model that is not trained."""
        ...


@dataclass(frozen=True)
class ModelFiles:
    """What a checkpoint keeps of the HF directory that its policy came from.

    Args:
        hf_config: content of config.json.
        family: what `model.family` would have to say.
        dtype: of the policy's weights, as torch calls it ("bfloat16").
        side_files: folder with tokenizer files; they need not exist.
    """

    hf_config: Mapping[str, Any]
    family: str
    dtype: str
    side_files: Path


class CheckpointStore:
    """Saves and loads the checkpoints of one run.

    Args:
        root: the run's `checkpoints` folder.
        world: this rank's place.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, root: Path, world: World, keep: int) -> None:
        self.root, self.world, self.keep = root, world, keep

    def newest(self) -> Path | None:
        """Returns the newest complete checkpoint, the same on all ranks, or None."""
        return newest_checkpoint(self.root)

    def save(
        self, step: int, models: Mapping[str, Saved], state: Mapping[str, Any], files: ModelFiles
    ) -> Path:
        """Writes the checkpoint of a step and removes those beyond `keep`.

        Args:
            step: number of finished steps, names the folder.
            models: trained models by name.
            state: what the loop needs besides; JSON.
            files: of the policy's HF directory.
        """
        folder = self.root / f"step_{step}"
        write_checkpoint(folder, self.world, models, state, files)
        if self.world.rank == 0:
            for old in list(step_folders(self.root).values())[: -self.keep]:
                shutil.rmtree(old)
        return folder

    def load(self, folder: Path, models: Mapping[str, Saved]) -> dict[str, Any]:
        """Restores models, optimizers and, in the same layout, random states.

        Returns:
            The `state` that was saved.

        Raises:
            CheckpointError: the checkpoint is damaged or of a model of other shapes.
        """
        with self.world.all_agree("reading the checkpoint"):
            state = read_state(folder)
        for name, model in models.items():
            load_model(folder / name, model, self.world)
        if state["layout"] == _layout_name(self.world):
            set_rng_state(load_file(folder / _rng_file(self.world.rank)))
        return state


def write_checkpoint(
    folder: Path,
    world: World,
    models: Mapping[str, Saved],
    state: Mapping[str, Any],
    files: ModelFiles,
) -> None:
    """Writes a checkpoint folder; it has its name only when it is complete. Collective."""
    partial = folder.with_name(folder.name + PARTIAL)
    with world.all_agree("preparing the checkpoint folder"):
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for name in (*models, HF_FILES):
                (partial / name).mkdir(parents=True)
    with world.all_agree("writing the checkpoint"), world.platform.megatron_phase():
        for name, model in models.items():
            dist_checkpointing.save(_sharded(model, is_loading=False), str(partial / name))
        save_file(rng_state(), partial / _rng_file(world.rank))
    with world.all_agree("completing the checkpoint"):
        if world.rank == 0:
            content = {
                **state,
                "layout": _layout_name(world),
                "family": files.family,
                "dtype": files.dtype,
            }
            (partial / STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")
            write_side_files(partial / HF_FILES, files.hf_config, files.dtype, files.side_files)
            _seal(partial, folder)


def _seal(partial: Path, folder: Path) -> None:
    """Writes the manifest, makes all files durable and gives the folder its name."""
    written = sorted(path for path in partial.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in written}
    (partial / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for path in [*written, partial / MANIFEST]:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_model(folder: Path, model: Saved, world: World) -> None:
    """Loads one sharded part into a model and, when the model is trained, its optimizer."""
    with world.all_agree(f"loading {folder}"), world.platform.megatron_phase():
        if not (folder / ".metadata").is_file():
            raise CheckpointError(
                str(folder),
                "no such part",
                "a sharded checkpoint",
                "Was it saved by this algorithm?",
            )
        try:
            loaded = dist_checkpointing.load(_sharded(model, is_loading=True), str(folder))
        except CheckpointingException as error:
            raise CheckpointError(
                str(folder),
                str(error).splitlines()[0],
                "a checkpoint of this model's shapes",
                "Load it with the model configuration that wrote it.",
            ) from error
        for index, chunk in enumerate(model.chunks):
            _load_weights(chunk, loaded[f"model{index}"])
        if model.optimizer is not None:
            hand_out(model.optimizer.chained_optimizers, loaded["optimizer"])
            model.optimizer.load_state_dict(loaded["optimizer"])
            _separate_step_counts(model.optimizer)


def _sharded(model: Saved, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    parts: dict[str, Any] = {
        f"model{index}": _only_weights(chunk.sharded_state_dict(metadata=metadata))  # type: ignore[operator]
        for index, chunk in enumerate(model.chunks)
    }
    if model.optimizer is None:
        return parts
    weights = parts["model0"] if len(model.chunks) == 1 else dict(parts)
    for optimizer in model.optimizer.chained_optimizers:
        _make_states(optimizer)
    with own_shares(model.optimizer.chained_optimizers):
        parts["optimizer"] = model.optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        )
    if not is_loading:
        _separate_storages(parts["optimizer"])
    return parts


def _separate_storages(state: dict[str, Any]) -> None:
    """Gives tensors in numpy's memory a storage that ends where they do, in the same memory.

    The writer would clone every view: the two halves of a feed-forward layer. Live tensors of a CPU
    it clones: their storages must stay resizable, which those that numpy has seen are not.
    """
    apply_factories(state)
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor) or not part.data.is_cpu:
            continue
        if not part.data.untyped_storage().resizable():
            part.data = torch.from_numpy(part.data.numpy())


def _only_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chunk's state without what layers keep beside weights: FP8 scales, none in 16 bit.

    With Megatron's own renaming of norms, what is left is the same for torch's layers and for
    transformer-engine's, so that either kind loads the other's checkpoints.
    """
    return {name: part for name, part in state.items() if not name.endswith(EXTRA_STATE)}


def _load_weights(chunk: torch.nn.Module, state: Mapping[str, Any]) -> None:
    found = chunk.load_state_dict(state, strict=False)
    names = (*found.missing_keys, *found.unexpected_keys)
    if lost := [name for name in names if not name.endswith(EXTRA_STATE)]:
        raise RuntimeError(f"not a parameter of checkpoint and model alike: {lost}")


def _make_states(optimizer: Any) -> None:
    """Gives an optimizer that has taken no step yet the states that Megatron saves and loads."""
    adam = optimizer.optimizer
    if len(adam.state):
        return
    # Not by Megatron's own way, a step with zero gradients: it would count, and decay the weights.
    if not isinstance(adam, torch.optim.Adam):  # transformer-engine's, which counts by group
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
    """Gives every parameter a step count of its own again.

    For torch's Adam megatron-core 0.16.1 loads one tensor as the count of all parameters, which a
    step would then advance once for each of them.
    """
    for inner in optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _layout_name(world: World) -> str:
    layout = world.layout
    return f"{layout.order} tp{layout.tp} cp{layout.cp} dp{layout.dp} pp{layout.pp} vpp{layout.vpp}"


def _rng_file(rank: int) -> str:
    return f"rng_rank_{rank}.safetensors"


def rng_state() -> dict[str, torch.Tensor]:
    """Returns this rank's random states, torch's and those that Megatron tracks; no sync."""
    states = {f"tracker.{k}": v.clone() for k, v in get_cuda_rng_tracker().get_states().items()}
    states["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, torch.Tensor]) -> bool:
    """Sets what `rng_state` returned, unless another kind of device did; says whether it did."""
    if _kinds(states) != _kinds(rng_state()):
        return False
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker."
    get_cuda_rng_tracker().set_states(
        {k.removeprefix(prefix): v for k, v in states.items() if k.startswith(prefix)}
    )
    return True


def _kinds(states: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (state.dtype, state.shape) for name, state in states.items()}
