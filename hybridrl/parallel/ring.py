"""Hosts in a ring: every rank sends files to a rank of the next host.

Collective over a group of its own, so that a thread can do it while the main thread uses others.
Who waits for whom: a rank waits for those that send to it, and until what it sends has arrived. A
rank that cannot write still receives, so that nobody waits for it in vain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

CHUNK_BYTES = 16 << 20
PARTIAL = ".partial"


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

    def exchange(self, folder: Path, names: Sequence[str]) -> OSError | None:
        """Sends files, and writes those that come; returns why one could not be written.

        Args:
            folder: where all of them lie; its folders are there.
            names: of this rank's files in it.
        """
        out = [(name, (folder / name).stat().st_size) for name in names]
        chunks = [] if self._target is None else self._header(out) + _chunks(folder, out)
        sending: list[dist.Work] = []
        for chunk in chunks:
            work = dist.isend(chunk, self._target, self._group)
            assert work is not None
            sending.append(work)
        failure: OSError | None = None
        for source in self._sources:
            failure = self._receive(folder, source) or failure
        for work in sending:
            work.wait()
        return failure

    def _header(self, files: Sequence[tuple[str, int]]) -> list[torch.Tensor]:
        text = torch.frombuffer(bytearray(json.dumps(files).encode()), dtype=torch.uint8)
        return [torch.tensor([len(text)]), text]

    def _receive(self, folder: Path, source: int) -> OSError | None:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, self._group)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, source, self._group)
        failure: OSError | None = None
        for name, num_bytes in json.loads(text.numpy().tobytes()):
            with suppress(FileNotFoundError):  # memory of a file before it is written over
                (folder / name).replace(folder / (name + PARTIAL))
            try:
                content = _room(folder / (name + PARTIAL), num_bytes)
            except OSError as error:
                failure = error
                content = torch.empty(min(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
            for start in range(0, num_bytes, CHUNK_BYTES):
                length = min(CHUNK_BYTES, num_bytes - start)
                first = start if len(content) == num_bytes else 0
                dist.recv(content[first : first + length], source, self._group)
            if failure is None:
                (folder / (name + PARTIAL)).replace(folder / name)
        return failure


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
