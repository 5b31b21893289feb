"""Keeps copies of the training state in host memory, so that a run can continue from them after a
rank has failed.

A copy consists of the files of a checkpoint (store.py), stored in memory. Hosts form a ring. Each
host stores the files from its own ranks and the files from the previous host, so that the failure
of one host loses no file. A run that is restarted on a single host loads the newest copy like any
other checkpoint, in any layout. If the run is restarted on several hosts, each of which has part of
the copy, the hosts first write the copy to the checkpoints folder together.

Who waits for whom: `take` is collective and copies all tensors to the host. Then training
continues, while a thread on every rank writes, sends and receives files. These threads wait for
each other in collectives of a separate process group. A thread that fails notifies the other
threads or closes its connections, so that all threads end. A copy becomes valid when its manifest
exists. Rank 0 writes the manifest after `seal`, which is called when the step is in the run's
records. Invariant: there are at most two copies on a host. The newest complete copy is kept until
the next copy is complete on all ranks. The older copy loses its manifest, and the next copy
overwrites its files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save as save_tensors

from hybridrl.checkpoint.folders import HF_FILES, PARTIAL, STATE, Checkpoint, newest_checkpoint
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_DIGEST,
    Ancestor,
    FileEntry,
    Manifest,
    entry_of,
    verify_file,
    verify_files,
    write_digested,
)
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
from hybridrl.checkpoint.model_state import sharded_state
from hybridrl.checkpoint.random_states import rng_file, rng_state
from hybridrl.checkpoint.reading import reading_threads
from hybridrl.checkpoint.reserved_memory import threads_beside_training
from hybridrl.checkpoint.sharded_files import BegunFiles, begin_sharded
from hybridrl.checkpoint.writing import Content, give_name, remove_leftovers
from hybridrl.errors import CheckpointError
from hybridrl.models.hf.directory import write_side_files
from hybridrl.parallel.groups import UNBOUNDED, World
from hybridrl.parallel.heartbeat import POLL_S
from hybridrl.parallel.ring import HostRing, close_connections

Notify = Callable[[str], None]
MAX_FAILED = 3  # after this many failures in a row, copies are turned off
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _KeptCopy:
    """A complete copy of a checkpoint in memory.

    Args:
        step: Number of finished steps.
        sizes: Size in bytes of each file that this rank has written or received.
    """

    step: int
    sizes: Mapping[Path, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all files in `sizes` still exist with the recorded sizes."""
        return all(_has_size(file, size) for file, size in self.sizes.items())


class MemoryCopies:
    """Creates, keeps and restores the copies of one run.

    Args:
        run_folder: Folder of the run.
        world: All ranks.
        notify: Prints a message once for all ranks.

    Attributes:
        is_off: Whether copies are turned off, because memory is too small or because MAX_FAILED
            copies in a row have failed.
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
        self._begun: _BegunCopy | None = None
        self._kept: list[_KeptCopy] = []  # newest first
        self._restored: int | None = None  # step of the copy from which the run continued
        self._has_found_room, self._num_failed = False, 0
        self.is_off, self.busy_s = False, 0.0
        self.lineage: Sequence[Ancestor] = ()

    def _connect(self) -> None:
        """Creates the process group for the threads. Collective."""
        group = dist.new_group(backend="gloo", timeout=UNBOUNDED)
        assert isinstance(group, dist.ProcessGroup)
        self._group, self._ring = group, HostRing(group, self._hosts)

    def start(self, step: int, num_bytes: int) -> bool:
        """Removes copies from earlier starts of the run, except the copy from which the run
        continues. That copy is needed until the next copy is complete. Collective.

        Args:
            step: Last finished step, after which the run continues.
            num_bytes: Approximate size of this rank's part of a copy, in bytes.

        Returns:
            Whether this host has enough memory for copies of this size in addition to checkpoints.
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

        Args:
            content: Content of the copy.
            waits: Whether to wait for the previous copy. If not, no copy is begun while the
                previous one is being written.
            reserved: Bytes of host memory that this rank has already allocated for checkpoints.
        """
        if waits and self._begun is not None:
            self._begun.wait()
        if self.is_off or not self._is_ready() or not self._makes_room(content):
            return False
        assert self._copies is not None
        folder = host_folder(self._number) / f"step_{content.step}"
        begun = _BegunCopy(folder, self._world, self._group, self._ring, content)
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
        """Prepares the folder for the next copy. Reuses the folder of the older copy, or the folder
        of the newest copy if that copy has lost files. Returns whether all hosts succeeded.
        Collective.
        """
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
        """Makes the last copy valid. The step of the copy must be in the run's records.

        Args:
            evaluations: Evaluation results so far, by step.
        """
        if self._begun is not None:
            self._begun.seal(evaluations)

    def _is_ready(self) -> bool:
        """Whether another copy may begin, because no rank is still writing the last one.
        Collective.
        """
        begun = self._begun
        if begun is None:
            return True
        num_over = self._world.sum_on_host(torch.tensor([int(not begun.is_alive)]))
        if int(num_over) < self._world.size:
            return False
        self._conclude(begun)
        return not self.is_off

    def _conclude(self, begun: _BegunCopy) -> None:
        """Records whether the last copy succeeded. The threads of the copy must have ended.
        Collective.
        """
        self._begun, self.busy_s = None, begun.busy_s
        found = self._world.sum_on_host(torch.tensor([int(begun.is_complete)]))
        if int(found) == self._world.size:
            self._num_failed = 0
            self._kept = [_KeptCopy(begun.step, begun.sizes), *self._kept][:GENERATIONS]
        elif not self._is_right(begun.failure):
            dist.destroy_process_group(self._group)  # another rank may have closed connections
            self._connect()

    def _is_right(self, failure: BaseException | None) -> bool:
        """Returns whether the copy succeeded on all ranks. If not, reports the failure, and turns
        copies off if the next copy would fail too. Collective.
        """
        own = None
        if failure is not None:
            # Rank closed connections and failures reported by other ranks last, because they are
            # consequences of another failure.
            order = isinstance(failure, RuntimeError) + isinstance(failure, _FailedElsewhere)
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
        """Ranks whose files this host stores: the ranks on this host and the ranks on the previous
        host in the ring.
        """
        place = next(i for i, ranks in enumerate(self._hosts) if self._world.rank in ranks)
        kept = {place, place - 1 if len(self._hosts) > 1 else place}
        return [rank for i in kept for rank in self._hosts[i]]

    def _needed_bytes(self, found: Sequence[int]) -> int:
        """Returns how many bytes copies will occupy on this host, given the size of each rank's
        part.
        """
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
        """Returns the folder of the newest copy if this copy is newer than all checkpoints,
        otherwise None. If there are several hosts, they first write the copy to the checkpoints
        folder. Collective.

        Args:
            root: The run's `checkpoints` folder.
        """
        own = files_of_host(self._number, self._world.host_ranks) if self._leads else None
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
            if len(self._hosts) == 1:
                folder = host_folder(self._number) / f"step_{step}"
                if (damage := self._damage(folder, manifest, writers)) is None:
                    self._notify(f"step {step} was found in host memory; the run continues from it")
                    self._restored, self.lineage = step, manifest.lineage
                    return folder
                self._tell_damage(step, damage)
                continue
            folder = root / f"step_{step}"
            numbered = manifest.model_copy(update={"order": order + 1})
            if (damage := self._write_out(folder, numbered, writers)) is None:
                self._notify(f"step {step} was found in host memory and written to {folder}")
                return folder
            self._tell_damage(step, damage)
        return None

    def _tell_damage(self, step: int, damage: str) -> None:
        self._notify(f"step {step} was found in host memory but is not used: {damage}")

    def _damage(self, folder: Path, manifest: Manifest, readers: Mapping[str, int]) -> str | None:
        """Verifies a copy on this host. Each rank verifies a part of the copy. Returns a
        description of the damage, or None. Collective.
        """
        with self._world.all_agree("verifying a copy in memory", True) as agreement:
            try:
                mine = [name for name, reader in readers.items() if reader == self._world.rank]
                files = [(folder / name, manifest.files[name]) for name in mine]
                verify_files(files, self._num_threads)
            except CheckpointError as error:
                agreement.value = str(error)
        return next((one for one in agreement.values if one is not None), None)

    def _write_out(
        self, folder: Path, manifest: Manifest, writers: Mapping[str, int]
    ) -> str | None:
        """Writes a copy to disk as a checkpoint. Returns a description of the damage if the copy is
        damaged, otherwise None. Collective.
        """
        world, partial = self._world, folder.with_name(folder.name + PARTIAL)
        source = host_folder(self._number) / folder.name
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
                        verify_file(source / name, manifest.files[name], self._num_threads)
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


class _BegunCopy:
    """A copy that is being written on this rank.

    Args:
        folder: Folder of the copy on this host.
        world, group, ring: All ranks, the process group of the threads, and the ring of hosts.
        content: Content of the copy.

    Attributes:
        step: Number of finished steps.
        failure: Error that stopped the copy, or None.
        is_complete: Whether the copy is valid and every host has the files that it must store.
        sizes: Size in bytes of each file that this rank has written or received.
        busy_s: Seconds that the thread has spent working, without the wait for `seal`.
        is_sealed: Whether the copy may become valid.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        group: dist.ProcessGroup,
        ring: HostRing,
        content: Content,
    ) -> None:
        assert content.step is not None
        self.step, self.busy_s, self.is_sealed = content.step, 0.0, False
        self.failure: BaseException | None = None
        self.is_complete = False
        self.sizes: dict[Path, int] = {}
        self._folder, self._world, self._content = folder, world, content
        self._group, self._ring = group, ring
        self._begun: dict[str, BegunFiles] = {}
        self._random, self._state = b"", dict(content.state)
        self._may_end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copy in memory", daemon=True)

    def begin(self, copies: HostCopies) -> None:
        """Copies the tensors to host memory. Collective."""
        with (
            self._world.all_agree("copying the state to host memory", True),
            self._world.platform.megatron_phase(),
        ):
            for name, model in self._content.models.items():
                with model.mesh.active():
                    state = sharded_state(model, False, copies.allocators(name))
                    parts = self._folder / name, model.mesh.ranks, self._world, copies
                    num_files = threads_beside_training(len(self._world.host_ranks))
                    self._begun[name] = begin_sharded(state, *parts, num_files)
            self._random = save_tensors(rng_state())

    @property
    def names(self) -> list[str]:
        """Names of this rank's files with sharded tensors."""
        return [f"{name}/{file}" for name, begun in self._begun.items() for file in begun.names]

    @property
    def is_alive(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread that writes the files."""
        self._thread.start()

    def seal(self, evaluations: Mapping[str, Mapping[str, float]]) -> None:
        """Allows the copy to become valid."""
        if not self._may_end.is_set():
            self._state["evaluations"] = dict(evaluations)
            self.is_sealed = True
            self._may_end.set()

    def wait(self) -> None:
        """Waits for the thread if the copy is sealed. Otherwise returns, because the thread is
        waiting for `end`.

        Raises:
            PeerError: A rank has failed that the thread may be waiting for.
        """
        if self.is_sealed:
            self._join()

    def end(self) -> None:
        """Waits for the thread. A copy that was not sealed stays invalid. Raises as `wait` does."""
        self._may_end.set()
        if self._thread.ident is not None:
            self._join()

    def _join(self) -> None:
        with self._world.heartbeat.part("the last copy in memory", True):
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                self._world.check()

    def _work(self) -> None:
        """Runs in the thread: writes, sends and receives files."""
        begun = time.monotonic()
        try:
            waited_s = self._write_and_send()
        except BaseException as error:  # any error, because other ranks are waiting
            self.failure = error
            close_connections(self._group)
            return
        self.busy_s = time.monotonic() - begun - waited_s

    def _write_and_send(self) -> float:
        """Writes and exchanges the files. Returns how many seconds the thread waited for `seal`."""
        entries, results, failure = self._write_own()
        found: list[Any] | None = [None] * self._world.size if self._world.rank == 0 else None
        dist.gather_object((entries, results), found, 0, self._group)
        if not self._is_right(failure):
            return 0.0
        if not self._is_right(self._exchange(list(entries))):
            return 0.0
        since = time.monotonic()
        self._may_end.wait()
        waited_s = time.monotonic() - since
        names: list[str] = []
        failure = self._gone()
        if not self._is_right(failure):
            return 0.0
        if found is not None and self.is_sealed:
            try:
                names = self._write_of_all(found)
            except Exception as error:  # sent to the other ranks below
                failure = error
        is_right = self._is_right(self._exchange(names, failure))
        self.is_complete = is_right and self.is_sealed
        return waited_s

    def _exchange(self, names: Sequence[str], failure: Exception | None = None) -> Exception | None:
        """Sends this rank's files to the next host and receives files; see `HostRing.exchange`."""
        failure, received = self._ring.exchange(self._folder, names, failure)
        self.sizes |= received
        return failure

    def _gone(self) -> Exception | None:
        """Returns an error if a file of the copy no longer exists, otherwise None."""
        gone = [file for file, size in self.sizes.items() if not _has_size(file, size)]
        what = "the file no longer exists"
        return FileNotFoundError(errno.ENOENT, what, str(gone[0])) if gone else None

    def _write_own(self) -> tuple[dict[str, FileEntry], dict[str, Any], Exception | None]:
        """Writes this rank's files. Returns the manifest entries of the files, the index data of
        each model, and the error if writing failed.
        """
        entries: dict[str, FileEntry] = {}
        results: dict[str, Any] = {}
        try:
            for name, begun in self._begun.items():
                begun.write()
                files, results[name] = begun.written()
                entries |= {f"{name}/{file}": entry for file, entry in files.items()}
            name = rng_file(self._world.rank)
            entries[name] = write_digested(self._folder / name, self._random)
        except Exception as error:  # sent to all ranks, which wait for this rank
            return {}, {}, error
        self.sizes |= {self._folder / name: entry.bytes for name, entry in entries.items()}
        return entries, results, None

    def _write_of_all(self, found: Sequence[Any]) -> list[str]:
        """Writes the files that only rank 0 writes, the manifest last. Returns the names of the
        files.
        """
        folder, content = self._folder, self._content
        for name, begun in self._begun.items():
            begun.make_index([results[name] for _, results in found])
        files = content.files
        state = {**self._state, **content.described}
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        write_side_files(folder / HF_FILES, files.hf_config, files.dtype, files.side_files)
        listed = {name: entry for entries, _ in found for name, entry in entries.items()}
        paths = [path for path in folder.rglob("*") if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in paths]
        own = [name for name in names if name not in listed]
        listed |= {name: entry_of(folder / name) for name in own}
        manifest = Manifest(
            step=self.step,
            order=0,
            lineage=list(content.lineage),
            files=listed,
            unfinished=content.unfinished,
        )
        manifest.write(folder)
        written = [*own, MANIFEST_DIGEST, MANIFEST]
        self.sizes |= {folder / name: (folder / name).stat().st_size for name in written}
        return written

    def _is_right(self, failure: BaseException | None) -> bool:
        """Whether all ranks succeeded. Collective over the threads."""
        flag = torch.tensor([int(failure is not None)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, self._group)
        if failure is not None:
            self.failure = failure
        elif int(flag):
            self.failure = _FailedElsewhere("another rank could not write its part")
        return not int(flag)


class _FailedElsewhere(RuntimeError):
    """Raised if another rank failed to write its part of a copy."""


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False
