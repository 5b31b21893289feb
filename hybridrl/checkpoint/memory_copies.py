"""Keeps copies of the training state in host memory, to continue from after a rank has failed.

A copy consists of the files of a checkpoint (store.py), stored in memory. Hosts form a ring; each
stores the files of its ranks and of the previous host, so that the failure of one host loses no
file. A restarted run loads the newest copy like any other checkpoint, in any layout.

Who waits for whom: `take` is collective and copies all tensors to the host. Then training
continues, while threads write the files (begun_copy.py). A copy becomes valid after `seal`, which
is called when the step is in the run's records. Invariant: there are at most two copies on a host.
The newest complete copy is kept until the next copy is complete on all ranks. The older copy loses
its manifest, and the next copy overwrites its files.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.checkpoint.begun_copy import BegunCopy, FailedElsewhereError, has_size
from hybridrl.checkpoint.folders import HF_FILES, PARTIAL, Checkpoint, newest_checkpoint
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.manifest import Ancestor, Manifest, verify_files
from hybridrl.checkpoint.memory_folders import (
    GENERATIONS,
    SHARDED,
    files_of_host,
    free_bytes,
    host_folder,
    keep_files,
    make_host_folder,
    remove_copies,
    renew_copy,
    run_id,
    usable,
)
from hybridrl.checkpoint.reading import reading_threads
from hybridrl.checkpoint.writing import Content, give_name, remove_leftovers
from hybridrl.errors import CheckpointError
from hybridrl.parallel.groups import UNBOUNDED, World
from hybridrl.parallel.ring import HostRing

Notify = Callable[[str], None]
MAX_FAILED = 3  # after this many failures in a row, copies are turned off
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _KeptCopy:
    """A complete copy in memory, with the bytes of each file that this rank wrote or received."""

    step: int
    sizes: Mapping[Path, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return all(has_size(file, size) for file, size in self.sizes.items())


class MemoryCopies:
    """Creates, keeps and restores the copies of one run.

    Attributes:
        is_off: Whether copies are turned off, because memory is too small or MAX_FAILED in a row
            failed.
        busy_s: Seconds that this rank's thread spent working on the last copy.
        lineage: Lineage of the copy that `restore` returned, without checkpoints that do not exist.
    """

    def __init__(self, run_folder: Path, world: World, notify: Notify) -> None:
        self._run_folder, self._world, self._notify = run_folder, world, notify
        with world.all_agree("looking for copies in memory") as agreement:
            if world.rank == 0:
                agreement.value = run_id(run_folder)
        self._number: str = agreement.values[0]
        self._leads = world.rank == world.host_ranks[0]
        self._num_threads = reading_threads(len(world.host_ranks))
        hosts = sorted({tuple(one) for one in world.gather_objects(world.host_ranks)})
        self._hosts: list[tuple[int, ...]] = hosts
        self._connect()
        self._copies: HostCopies | None = None
        self._begun: BegunCopy | None = None
        self._kept: list[_KeptCopy] = []  # newest first
        self._restored: int | None = None  # step of the copy from which the run continued
        self._has_found_room, self._num_failed = False, 0
        self.is_off, self.busy_s = False, 0.0
        self.lineage: Sequence[Ancestor] = ()

    def _connect(self) -> None:
        group = dist.new_group(backend="gloo", timeout=UNBOUNDED)
        assert isinstance(group, dist.ProcessGroup)
        self._group, self._ring = group, HostRing(group, self._hosts)

    def start(self, step: int, num_bytes: int) -> bool:
        """Removes the copies of earlier starts. That of `step` is kept until the next copy is
        complete. Collective. Returns whether this host has memory for copies (`num_bytes` on this
        rank) in addition to checkpoints.
        """
        self._end_copy()
        self._kept = [_KeptCopy(step)] if self._restored == step else []
        self._restored, self._has_found_room, self._copies = None, False, HostCopies()
        self._world.arrive("removing old copies")
        why = ""
        if self._leads:
            remove_copies(self._number, [copy.step for copy in self._kept])
            try:
                make_host_folder(self._run_folder, self._number)
            except OSError as error:
                why = f"on host {os.uname().nodename} {error.strerror or error.args[-1]}"
        self._turn_off_if(why)
        if self.is_off:
            return False
        found, mates = self._world.gather_objects(num_bytes), self._world.host_ranks
        has_room = self._needed_bytes(found) <= free_bytes(-sum(found[rank] for rank in mates))
        if has_room:
            self._copies.reserve(num_bytes, len(mates))
        return has_room

    def take(self, content: Content, waits: bool, reserved: int = 0) -> bool:
        """Begins to copy the state after a step. Returns whether a copy was begun. Collective.
        Without `waits`, no copy is begun while the previous one is being written. Checkpoints have
        reserved `reserved` bytes on this rank.
        """
        if waits and self._begun is not None:
            self._begun.wait()
        if self.is_off or not self._is_ready() or not self._makes_room(content):
            return False
        assert self._copies is not None
        folder = host_folder(self._number) / f"step_{content.step}"
        begun = BegunCopy(folder, self._world, self._group, self._ring, content)
        begun.begin(self._copies)
        found = self._world.gather_objects(begun.names)
        written = {folder / name for rank in self._kept_ranks for name in found[rank]}
        if self._leads:
            with suppress(OSError):  # remove files from another layout to free memory
                keep_files(folder, lambda path: path.suffix != SHARDED or path in written)
        if not self._has_found_room and not self._has_room(reserved):
            return False
        self._begun = begun
        begun.start()
        return True

    def _makes_room(self, content: Content) -> bool:
        """Prepares a folder for the next copy; returns whether all hosts succeeded. Collective."""
        assert content.step is not None
        whole = self._world.gather_objects([copy.is_whole for copy in self._kept])
        newest = self._kept[:1]
        self._kept = [copy for copy, *of in zip(self._kept, *whole, strict=True) if all(of)][:1]
        if newest != self._kept:
            names = ", ".join(str(rank) for rank, of in enumerate(whole) if not of[0])
            self._notify(
                f"files of the copy of step {newest[0].step} in host memory no longer exist on "
                f"the hosts of ranks {names}; {self._what_stays}"
            )
        failure: Exception | None = None
        if self._leads:
            try:
                if not host_folder(self._number).is_dir():
                    make_host_folder(self._run_folder, self._number)
                stays = self._kept[0].step if self._kept else None
                renew_copy(self._number, content.step, stays, (*content.models, HF_FILES))
            except OSError as error:
                failure = error
        return self._is_right(failure)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of this rank's part of a copy; 0 before the first copy."""
        return 0 if self._copies is None else self._copies.num_bytes

    def seal(self, evaluations: Mapping[str, Mapping[str, float]]) -> None:
        """Makes the last copy valid, and adds evaluations; the run's records must have its step."""
        if self._begun is not None:
            self._begun.seal(evaluations)

    def _is_ready(self) -> bool:
        """Whether no rank is still writing the last copy. Collective."""
        begun = self._begun
        if begun is None:
            return True
        num_over = self._world.sum_on_host(torch.tensor([int(not begun.is_alive)]))
        if int(num_over) < self._world.size:
            return False
        self._conclude(begun)
        return not self.is_off

    def _conclude(self, begun: BegunCopy) -> None:
        """Records whether the last copy succeeded; its threads must have ended. Collective."""
        self._begun, self.busy_s = None, begun.busy_s
        found = self._world.sum_on_host(torch.tensor([int(begun.is_complete)]))
        if int(found) == self._world.size:
            self._num_failed = 0
            self._kept = [_KeptCopy(begun.step, begun.sizes), *self._kept][:GENERATIONS]
        elif not self._is_right(begun.failure):
            dist.destroy_process_group(self._group)  # another rank may have closed connections
            self._connect()

    def _is_right(self, failure: BaseException | None) -> bool:
        """Whether all ranks succeeded; if not, reports why, and may turn copies off. Collective."""
        own = None
        if failure is not None:
            # Closed connections, and failures that other ranks report, are sorted last, because
            # they are consequences of another failure.
            order = isinstance(failure, RuntimeError) + isinstance(failure, FailedElsewhereError)
            is_full = isinstance(failure, OSError) and failure.errno in NO_ROOM
            said = f"{type(failure).__name__}: {failure}" if str(failure) else repr(failure)
            where = f"rank {self._world.rank} on host {os.uname().nodename}"
            own = order, f"{where}: {said}", is_full
        found = [one for one in self._world.gather_objects(own) if one is not None]
        if not found:
            return True
        self._num_failed += 1
        _, why, _ = min(found, key=lambda one: one[0])
        self._notify(f"a copy of the state in host memory failed; {self._what_stays} ({why})")
        is_full = any(is_full for *_, is_full in found)
        self._turn_off_if(why if is_full or self._num_failed >= MAX_FAILED else "")
        return False

    @property
    def _what_stays(self) -> str:
        kept = self._kept
        return f"the copy of step {kept[0].step} is kept" if kept else "there is no other copy"

    def _has_room(self, reserved: int) -> bool:
        """Whether all hosts have enough memory for copies of the current size. Collective."""
        found = self._world.gather_objects((self.num_bytes, reserved))
        needed = self._needed_bytes([num_bytes for num_bytes, _ in found])
        free = free_bytes(sum(found[rank][1] for rank in self._world.host_ranks))
        said = f"host {os.uname().nodename} has {free / 1e9:.3g} GB available in memory and "
        said += f"/dev/shm, but copies need {needed / 1e9:.3g} GB"
        self._turn_off_if(said if self._leads and free < needed else "")
        self._has_found_room = not self.is_off
        return self._has_found_room

    @property
    def _kept_ranks(self) -> list[int]:
        """Ranks whose files this host stores: its own, and those of the previous host."""
        place = next(i for i, ranks in enumerate(self._hosts) if self._world.rank in ranks)
        kept = {place, place - 1 if len(self._hosts) > 1 else place}
        return [rank for i in kept for rank in self._hosts[i]]

    def _needed_bytes(self, found: Sequence[int]) -> int:
        missing = GENERATIONS - len(self._kept[:1])
        return missing * sum(found[rank] for rank in self._kept_ranks)

    def _turn_off_if(self, why: str) -> None:
        """Turns copies off if `why` is not empty on any rank. Keeps the newest copy. Collective."""
        found = list(dict.fromkeys(one for one in self._world.gather_objects(why) if one))
        if found:
            self.is_off, self._copies, self._begun = True, None, None
            if self._leads:
                remove_copies(self._number, [copy.step for copy in self._kept[:1]])
            more = f", and {len(found) - 1} more" if found[1:] else ""
            self._notify(f"no copies of the state in host memory: {found[0]}{more}")

    def _end_copy(self) -> None:
        """Waits for the threads. A copy that was not sealed remains invalid. Collective."""
        if self._begun is not None:
            self._begun.end()
            self._conclude(self._begun)

    def close(self) -> None:
        """Removes all copies, because a checkpoint has replaced them. Collective."""
        self._end_copy()
        self._world.arrive("the last copy in memory")
        if self._leads:
            remove_copies(self._number)
        self._copies = None

    def restore(self, root: Path) -> Path | None:
        """Returns the folder of the newest copy if it is newer than all checkpoints, or None.
        Several hosts first write it to the run's `checkpoints` folder, `root`. Collective.
        """
        ranks = self._world.host_ranks
        own = files_of_host(self._number, ranks) if self._leads else None
        hosts = [one for one in self._world.gather_objects(own) if one is not None]
        if not any(host.manifests for host in hosts):
            return None
        with self._world.all_agree("choosing a copy in memory") as agreement:
            if self._world.rank == 0:
                newest = newest_checkpoint(root)
                opened = None if newest is None else Checkpoint.open(newest)
                ancestor = None if opened is None else opened.ancestor
                order = 0 if opened is None else opened.manifest.order
                agreement.value = order, list(usable(hosts, ancestor))
        order, found = agreement.values[0]
        for step, manifest, writers in found:
            source = folder = host_folder(self._number) / f"step_{step}"
            if len(self._hosts) == 1:
                use = "; the run continues from it"
                damage = self._damage(source, manifest, writers)
            else:
                folder = root / f"step_{step}"
                use = f" and written to {folder}"
                numbered = manifest.model_copy(update={"order": order + 1})
                damage = self._write_out(folder, numbered, writers, source)
            if damage is None:
                self._notify(f"step {step} was found in host memory{use}")
                if folder == source:
                    self._restored, self.lineage = step, manifest.lineage
                return folder
            self._notify(f"step {step} was found in host memory but is not used: {damage}")
        return None

    def _damage(self, folder: Path, manifest: Manifest, readers: Mapping[str, int]) -> str | None:
        """Verifies a copy on this host, a part on each rank; returns any damage. Collective."""
        with self._world.all_agree("verifying a copy in memory", True) as agreement:
            try:
                mine = [name for name, reader in readers.items() if reader == self._world.rank]
                files = [(folder / name, manifest.files[name]) for name in mine]
                verify_files(files, self._num_threads)
            except CheckpointError as error:
                agreement.value = str(error)
        return next((one for one in agreement.values if one is not None), None)

    def _write_out(
        self, folder: Path, manifest: Manifest, writers: Mapping[str, int], source: Path
    ) -> str | None:
        """Writes a copy to disk as a checkpoint; returns the damage found, or None. Collective."""
        world, partial = self._world, folder.with_name(folder.name + PARTIAL)
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
                        verify_files([(source / name, manifest.files[name])], self._num_threads)
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
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())
