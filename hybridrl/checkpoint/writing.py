"""Writes a checkpoint folder atomically: it is either complete under its final name, or absent.

Collective. A folder is written as `step_N.partial` and renamed when all its files are durable. An
existing `step_N` is first renamed to `step_N.replaced`, and later back if the process ends before
the second rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.checkpoint.folders import HF_FILES, PARTIAL, REPLACED, STATE
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_DIGEST,
    Ancestor,
    FileEntry,
    Manifest,
    entry_of,
    write_digested,
)
from hybridrl.checkpoint.model_state import Saved, sharded_state
from hybridrl.checkpoint.random_states import rng_file, rng_state
from hybridrl.checkpoint.saved_adapters import adapters_state
from hybridrl.checkpoint.sharded_files import BegunFiles, begin_sharded, first_failure
from hybridrl.errors import CheckpointError
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.hf.directory import write_side_files
from hybridrl.parallel.groups import Agreement, World


@dataclass(frozen=True)
class ModelFiles:
    """Files and values in a checkpoint that come from the policy's HF directory."""

    hf_config: Mapping[str, Any]  # content of config.json
    family: str  # value of `model.family` that is needed to load the weights
    dtype: str  # dtype of the policy's weights as torch spells it ("bfloat16")
    side_files: Path  # folder that may contain tokenizer files
    lora: Lora | None = None  # LoRA adapters; next: the model that they adapt
    base: BaseReference | None = None
    passed_over: BaseReference | None = None  # origin of tensors that training does not load
    trains_mtp: bool = False  # whether the layer for multi-token prediction is part of the model


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint; see `CheckpointStore.save` and `Manifest` for the fields. Random
    states are restored only in the same `layout`, and never if it is empty.
    """

    models: Mapping[str, Saved]
    state: Mapping[str, Any]
    files: ModelFiles
    step: int | None = None
    order: int = 0
    lineage: Sequence[Ancestor] = ()
    layout: str = ""
    unfinished: Ancestor | None = None

    @property
    def described(self) -> dict[str, Any]:
        files = self.files
        described: dict[str, Any] = {
            "layout": self.layout,
            "family": files.family,
            "dtype": files.dtype,
        }
        if files.trains_mtp:
            described["trains_mtp"] = True
        if files.passed_over is not None:
            described["passed_over"] = asdict(files.passed_over)
        return {**described, **adapters_state(files.lora, files.base)}


class BegunCheckpoint:
    """A checkpoint folder that is being written: call `begin`, `write` and `complete` in order.

    `begin` and `complete` are collective. If tensors are copied to `copies`, `write` may run in a
    thread, and tensors may change after `begin`. After an error, the attempt's files are removed.
    An existing checkpoint is replaced.
    """

    def __init__(
        self, folder: Path, world: World, content: Content, copies: HostCopies | None = None
    ) -> None:
        self.folder, self._world, self._content, self._copies = folder, world, content, copies
        self._partial = folder.with_name(folder.name + PARTIAL)
        state = {**content.state, **content.described}
        self._state = json.dumps(state, indent=1) if world.rank == 0 else ""
        self._begun: dict[str, BegunFiles] = {}
        self._entries: dict[str, FileEntry] = {}

    def begin(self) -> None:
        """Creates the folder and plans its files; CheckpointError if one is not writable."""
        world, folder, partial = self._world, self.folder, self._partial
        with self._removed_at_errors():
            with write_errors_are_told(world, "preparing the checkpoint folder", folder):
                if world.rank == 0:
                    remove_leftovers(folder.parent, folder.name)
                    for name in (*self._content.models, HF_FILES):
                        (partial / name).mkdir(parents=True)
            if self._copies is not None:
                with self._writing():
                    for name in self._content.models:
                        self._plan(name)
                    self._write_random_states()

    def _plan(self, name: str) -> None:
        model = self._content.models[name]
        with model.mesh.active():
            allocators = None if self._copies is None else self._copies.allocators(name)
            state = sharded_state(model, False, allocators)
            parts = self._partial / name, model.mesh.ranks, self._world, self._copies
            self._begun[name] = begin_sharded(state, *parts)

    def _write_random_states(self) -> None:
        name = rng_file(self._world.rank)
        self._entries[name] = write_digested(self._partial / name, save_tensors(rng_state()))

    @contextmanager
    def _writing(self) -> Iterator[Agreement]:
        with (
            write_errors_are_told(
                self._world, "writing the checkpoint", self.folder, True
            ) as agreement,
            self._world.platform.megatron_phase(),
        ):
            yield agreement

    def write(self) -> None:
        """Writes this rank's files. Errors are raised later, by `complete`."""
        for begun in self._begun.values():
            begun.write()

    def complete(self) -> Path:
        """Writes index and manifest, and renames the folder; CheckpointError if it cannot."""
        world, folder, partial, content = self._world, self.folder, self._partial, self._content
        with self._removed_at_errors():
            with self._writing() as agreement:
                for name in content.models:
                    if self._copies is None:  # one model at a time, to save memory
                        self._plan(name)
                        self._begun[name].write()
                    written = self._begun.pop(name).finish()
                    self._entries |= {f"{name}/{file}": one for file, one in written.items()}
                if self._copies is None:
                    self._write_random_states()
                agreement.value = self._entries
            with write_errors_are_told(world, "completing the checkpoint", folder):
                if world.rank == 0:
                    (partial / STATE).write_text(self._state, encoding="utf-8")
                    files = content.files
                    own = files.hf_config, files.dtype, files.side_files
                    write_side_files(partial / HF_FILES, *own)
                    every = [one for found in agreement.values for one in found.items()]
                    step, order, lineage = content.step, content.order, list(content.lineage)
                    manifest = Manifest(step=step, order=order, lineage=lineage, files=dict(every))
                    _seal(partial, folder, manifest)
        return folder

    @contextmanager
    def _removed_at_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            if self._world.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise


def write_checkpoint(
    folder: Path,
    world: World,
    models: Mapping[str, Saved],
    state: Mapping[str, Any],
    files: ModelFiles,
    layout: str = "",
) -> None:
    """Writes a checkpoint that does not belong to a run; see `Content`. Collective. Removes all
    files of the attempt and raises CheckpointError if a file could not be written.
    """
    checkpoint = BegunCheckpoint(folder, world, Content(models, state, files, layout=layout))
    checkpoint.begin()
    checkpoint.complete()


def _seal(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Adds rank 0's files to the manifest, flushes all files to disk and renames the folder."""
    files = dict(manifest.files)
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        name = path.relative_to(partial).as_posix()
        if name not in files:
            files[name] = entry_of(path)
            _make_durable(path)
    manifest = manifest.model_copy(update={"files": dict(sorted(files.items()))})
    manifest.write(partial)
    give_name(partial, folder)


def give_name(partial: Path, folder: Path) -> None:
    """Flushes a written folder to disk and renames it, in place of an existing checkpoint."""
    for path in (partial / MANIFEST, partial / MANIFEST_DIGEST, partial, *partial.rglob("*/")):
        _make_durable(path)
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        folder.rename(replaced)  # `put_back_replaced` can undo this
    partial.rename(folder)
    _make_durable(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the next checkpoint removes any remains


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(root: Path, name: str) -> None:
    """Removes the remains of earlier attempts to write the checkpoints that match `name`."""
    put_back_replaced(root)
    for ending in (PARTIAL, REPLACED):
        for path in root.glob(name + ending):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def put_back_replaced(root: Path) -> None:
    """Restores the name of a checkpoint that was being replaced when writing was interrupted."""
    for path in root.glob(f"step_*{REPLACED}"):
        folder = path.with_name(path.name.removesuffix(REPLACED))
        if not folder.exists():
            path.rename(folder)


@contextmanager
def write_errors_are_told(
    world: World, what: str, folder: Path, is_unbounded: bool = False
) -> Iterator[Agreement]:
    """Converts file system errors in `folder` to CheckpointErrors (see `World.all_agree`)."""
    with world.all_agree(what, is_unbounded) as agreement:
        try:
            yield agreement
        except (OSError, CheckpointException) as error:
            cause = first_failure(error) if isinstance(error, CheckpointException) else error
            if cause is error and isinstance(error, CheckpointException):
                return  # torch reports failures only to rank 0, which informs the other ranks
            if not isinstance(cause, OSError):
                raise RuntimeError(f"{type(cause).__name__}: {cause}") from error
            raise _cannot_write(folder, cause) from error


def _cannot_write(folder: Path, error: OSError) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(folder.parent).free / 1e9:.3g} GB are free on its file system"
    except OSError:
        free = "The free disk space is unknown"
    return CheckpointError(
        str(folder),
        f"{error.strerror or error} (rank {os.environ.get('RANK', '0')})",
        "a writable folder with enough space for the checkpoint",
        f"{free}. Free some space, or change run.dir. Complete checkpoints are unchanged.",
    )
