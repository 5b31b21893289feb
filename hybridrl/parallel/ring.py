"""Hosts in a ring: every rank sends files to a rank of the next host.

Collective over a group of its own, so that a thread can do it while the main thread uses others.
Who waits for whom: a rank waits for those that send to it, and until what it sends has arrived. A
rank that cannot read its files sends none, and one that cannot write still receives, so that nobody
waits for it in vain. Where the exchange itself fails, `close_connections` wakes those that wait.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

CHUNK_BYTES = 16 << 20
PARTIAL = ".partial"
UNUSED_TAG = 1 << 20  # of sends and receives


def next_of(hosts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns the rank that each rank sends to, on the next host; of one host nothing.

    Args:
        hosts: the ranks of each, in the order of the ring.
    """
    if len(hosts) < 2:
        return {}
    pairs = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return {rank: there[i % len(there)] for here, there in pairs for i, rank in enumerate(here)}


class HostRing:
    """This rank's place in the ring.

    Args:
        group: of all ranks, over gloo.
        hosts: the ranks of each host, in the order of the ring.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> None:
        targets, rank = next_of(hosts), dist.get_rank()
        self._group, self._target = group, targets.get(rank)
        self._sources = [other for other, target in targets.items() if target == rank]

    def exchange(
        self, folder: Path, names: Sequence[str], failure: Exception | None = None
    ) -> tuple[Exception | None, dict[Path, int]]:
        """Sends files, and writes those that come. After a failure the group can be used as before.

        Args:
            folder: where all of them lie; its folders are there.
            names: of this rank's files in it.
            failure: of this rank, before; it sends no files then.

        Returns:
            What failed on this rank, or None; and the sizes of the files that came, in bytes.

        Raises:
            RuntimeError: a connection is closed.
        """
        files: list[tuple[str, int]] = []
        content: list[torch.Tensor] = []
        scratch = torch.empty(0, dtype=torch.uint8)
        # All that may fail for a reason of this rank's own comes before the first byte, whatever it
        # raises (torch raises RuntimeError where a file or memory is missing).
        try:
            if self._sources:
                scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
            if failure is None:
                files = [(name, (folder / name).stat().st_size) for name in names]
                content = _chunks(folder, files)
        except Exception as error:
            failure, files, content = error, [], []
        sending: list[dist.Work] = []
        for chunk in [] if self._target is None else [*_header(files), *content]:
            work = dist.isend(chunk, self._target, self._group)
            assert work is not None
            sending.append(work)
        received: dict[Path, int] = {}
        for source in self._sources:
            failure = self._receive(folder, source, scratch, received) or failure
        for work in sending:
            work.wait()
        return failure, received

    def _receive(
        self, folder: Path, source: int, scratch: torch.Tensor, received: dict[Path, int]
    ) -> Exception | None:
        """Receives a rank's files and adds their sizes to `received`; those that cannot be written
        go to `scratch`.
        """
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, self._group)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, source, self._group)
        failure: Exception | None = None
        for name, num_bytes in json.loads(text.numpy().tobytes()):
            file, partial = folder / name, folder / (name + PARTIAL)
            content: torch.Tensor | None = None
            try:
                with suppress(FileNotFoundError):  # memory of a file before it is written over
                    file.replace(partial)
                content = _room(partial, num_bytes)
            except Exception as error:
                failure = error
            for start in range(0, num_bytes, CHUNK_BYTES):
                length = min(CHUNK_BYTES, num_bytes - start)
                place = scratch[:length] if content is None else content[start : start + length]
                dist.recv(place, source, self._group)
            if failure is None:
                try:
                    partial.replace(file)
                    received[file] = num_bytes
                except OSError as error:
                    failure = error
        return failure


def close_connections(group: dist.ProcessGroup) -> None:
    """Closes a gloo group's connections to all ranks: whoever waits there gets a RuntimeError. The
    group cannot be used any more.

    A gloo group's `abort` does nothing (torch 2.13). A receive that is given up closes all of its
    group's connections, unless the one that it waits at is closed already.

    Args:
        group: of some ranks.
    """
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):
                work = group.recv([torch.zeros(1)], rank, UNUSED_TAG)
                work.wait(datetime.timedelta(milliseconds=1))


def _header(files: Sequence[tuple[str, int]]) -> list[torch.Tensor]:
    text = torch.frombuffer(bytearray(json.dumps(files).encode()), dtype=torch.uint8)
    return [torch.tensor([len(text)]), text]


def _chunks(folder: Path, files: Sequence[tuple[str, int]]) -> list[torch.Tensor]:
    """Returns the files' content, in place."""
    found: list[torch.Tensor] = []
    for name, size in files:
        if size:
            found += torch.from_file(str(folder / name), False, size, dtype=torch.uint8).split(
                CHUNK_BYTES
            )
    return found


def _room(file: Path, size: int) -> torch.Tensor:
    """Makes a file have a size and returns its content, in place. The file system says here whether
    it has room: later, writing would end the process.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        if size:
            os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(file), True, size, dtype=torch.uint8)
