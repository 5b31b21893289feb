"""One copy of the training state that a rank is writing to host memory.

Who waits for whom: `BegunCopy.begin` is collective and copies all tensors to the host. Then a
thread on every rank writes, sends and receives files. The threads wait for each other in
collectives of a separate process group. A thread that fails notifies the others or closes its
connections, so that all threads end. The copy becomes valid when its manifest exists, which rank 0
writes after `seal`.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save as save_tensors

from hybridrl.checkpoint.folders import HF_FILES, STATE
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_DIGEST,
    FileEntry,
    Manifest,
    entry_of,
    write_digested,
)
from hybridrl.checkpoint.model_state import sharded_state
from hybridrl.checkpoint.random_states import rng_file, rng_state
from hybridrl.checkpoint.reserved_memory import threads_beside_training
from hybridrl.checkpoint.sharded_files import BegunFiles, begin_sharded
from hybridrl.checkpoint.writing import Content
from hybridrl.models.hf.directory import write_side_files
from hybridrl.parallel.groups import World
from hybridrl.parallel.heartbeat import POLL_S
from hybridrl.parallel.ring import HostRing, close_connections


class BegunCopy:
    """A copy that is being written on this rank.

    Args:
        folder: Folder of the copy on this host.
        world, group, ring: All ranks, the process group of the threads, and the ring of hosts.

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
        return [f"{name}/{file}" for name, begun in self._begun.items() for file in begun.names]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def seal(self, evaluations: Mapping[str, Mapping[str, float]]) -> None:
        if not self._may_end.is_set():
            self._state["evaluations"] = dict(evaluations)
            self.is_sealed = True
            self._may_end.set()

    def wait(self) -> None:
        """Waits for the thread unless it waits for `end`; PeerError if a rank has failed."""
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
        begun = time.monotonic()
        try:
            waited_s = self._write_and_send()
        except BaseException as error:  # any error, because other ranks are waiting
            self.failure = error
            close_connections(self._group)
            return
        self.busy_s = time.monotonic() - begun - waited_s

    def _write_and_send(self) -> float:
        """Writes and exchanges files. Returns how many seconds the thread waited for `seal`."""
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
        failure, received = self._ring.exchange(self._folder, names, failure)
        self.sizes |= received
        return failure

    def _gone(self) -> Exception | None:
        gone = [file for file, size in self.sizes.items() if not has_size(file, size)]
        what = "the file no longer exists"
        return FileNotFoundError(errno.ENOENT, what, str(gone[0])) if gone else None

    def _write_own(self) -> tuple[dict[str, FileEntry], dict[str, Any], Exception | None]:
        """Writes this rank's files; returns manifest entries, models' index data, and an error."""
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
            self.failure = FailedElsewhereError("another rank could not write its part")
        return not int(flag)


class FailedElsewhereError(RuntimeError):
    """Raised if another rank failed to write its part of a copy."""


def has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False
