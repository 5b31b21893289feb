"""Finds the newest copy of the training state in host memory after a restart.

A run on a single host loads the copy from memory. Several hosts, each with a part, first write it
to the checkpoints folder together.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.folders import PARTIAL, Checkpoint, newest_checkpoint
from hybridrl.checkpoint.manifest import Ancestor, Manifest, verify_file, verify_files
from hybridrl.checkpoint.memory_folders import files_of_host, host_folder, usable
from hybridrl.checkpoint.writing import give_name, remove_leftovers
from hybridrl.errors import CheckpointError
from hybridrl.parallel.groups import World


@dataclass(frozen=True)
class RestoredCopy:
    """A complete copy from which a run can continue, in memory or among the checkpoints, and its
    lineage without checkpoints that do not exist.
    """

    folder: Path
    step: int
    is_in_memory: bool
    lineage: Sequence[Ancestor]


def restored_copy(
    number: str,
    root: Path,
    world: World,
    num_hosts: int,
    num_threads: int,
    notify: Callable[[str], None],
) -> RestoredCopy | None:
    """Returns the newest copy if it is newer than all checkpoints in `root`, otherwise None.
    `number` is the run's (memory_folders.py). Collective.
    """
    ranks = world.host_ranks
    own = files_of_host(number, ranks) if world.rank == ranks[0] else None
    hosts = [one for one in world.gather_objects(own) if one is not None]
    if not any(host.manifests for host in hosts):
        return None
    with world.all_agree("choosing a copy in memory") as agreement:
        if world.rank == 0:
            newest = newest_checkpoint(root)
            opened = None if newest is None else Checkpoint.open(newest)
            ancestor = None if opened is None else opened.ancestor
            order = 0 if opened is None else opened.manifest.order
            agreement.value = order, list(usable(hosts, ancestor))
    order, found = agreement.values[0]

    def tell_damage(step: int, damage: str) -> None:
        notify(f"step {step} was found in host memory but is not used: {damage}")

    for step, manifest, writers in found:
        source = host_folder(number) / f"step_{step}"
        if num_hosts == 1:
            if (damage := _damage(source, manifest, writers, world, num_threads)) is None:
                notify(f"step {step} was found in host memory; the run continues from it")
                return RestoredCopy(source, step, True, manifest.lineage)
            tell_damage(step, damage)
            continue
        folder = root / f"step_{step}"
        numbered = manifest.model_copy(update={"order": order + 1})
        if (damage := _write_out(folder, numbered, writers, source, world, num_threads)) is None:
            notify(f"step {step} was found in host memory and written to {folder}")
            return RestoredCopy(folder, step, False, ())
        tell_damage(step, damage)
    return None


def _damage(
    folder: Path, manifest: Manifest, readers: Mapping[str, int], world: World, num_threads: int
) -> str | None:
    """Verifies a copy on this host, each rank a part; returns damage, or None. Collective."""
    with world.all_agree("verifying a copy in memory", True) as agreement:
        try:
            mine = [name for name, reader in readers.items() if reader == world.rank]
            files = [(folder / name, manifest.files[name]) for name in mine]
            verify_files(files, num_threads)
        except CheckpointError as error:
            agreement.value = str(error)
    return next((one for one in agreement.values if one is not None), None)


def _write_out(
    folder: Path,
    manifest: Manifest,
    writers: Mapping[str, int],
    source: Path,
    world: World,
    num_threads: int,
) -> str | None:
    """Writes a copy to disk as a checkpoint; returns damage, or None. Collective."""
    partial = folder.with_name(folder.name + PARTIAL)
    with world.all_agree("making a checkpoint of a copy in memory"):
        if world.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder.parent, folder.name)
            for name in manifest.files:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
    with world.all_agree("writing a copy in memory to a checkpoint", True) as agreement:
        try:
            for name, writer in writers.items():
                if writer == world.rank:
                    verify_file(source / name, manifest.files[name], num_threads)
                    _copy(source / name, partial / name)
        except CheckpointError as error:
            agreement.value = str(error)
    damage = [one for one in agreement.values if one is not None]
    with world.all_agree("completing the checkpoint"):
        if world.rank == 0 and damage:
            shutil.rmtree(partial, ignore_errors=True)
        elif world.rank == 0:
            manifest.write(partial)
            give_name(partial, folder)
    return damage[0] if damage else None


def _copy(source: Path, target: Path) -> None:
    """Copies a file durably."""
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())
