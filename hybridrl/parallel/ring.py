"""Sends files around a ring of hosts: every rank sends its files to a rank on the next host.

Who waits for whom: a rank waits for the ranks that send files to it, and until its own files have
arrived. The ring has its own process group, so that a thread can exchange files while the main
thread uses other groups. A rank that cannot read its files sends an empty list, and a rank that
cannot write still receives, so that no rank waits in vain. If the exchange fails,
`close_connections` wakes the waiting ranks.
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
UNUSED_TAG = 1 << 20  # no send or receive uses this tag


def next_of(hosts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns, for each rank, the rank on the next host to which it sends files; {} on one host.

    `hosts` has the ranks of each host, in ring order.
    """
    if len(hosts) < 2:
        return {}
    pairs = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return {rank: there[i % len(there)] for here, there in pairs for i, rank in enumerate(here)}


class HostRing:
    """This rank's position in the ring of hosts, with the gloo group of all ranks."""

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> None:
        targets, rank = next_of(hosts), dist.get_rank()
        self._group, self._target = group, targets.get(rank)
        self._sources = [other for other, target in targets.items() if target == rank]

    def exchange(
        self, folder: Path, names: Sequence[str], failure: Exception | None = None
    ) -> tuple[Exception | None, dict[Path, int]]:
        """Sends files, and writes the files that arrive. The group remains usable after a failure.

        Args:
            failure: Earlier failure of this rank. If given, the rank sends no files.

        Returns:
            The failure of this rank, or None; and the size in bytes of each file that arrived.

        Raises RuntimeError if a connection was closed.
        """
        files: list[tuple[str, int]] = []
        content: list[torch.Tensor] = []
        scratch = torch.empty(0, dtype=torch.uint8)
        # Everything that can fail on only one rank happens before the first byte is sent. Torch
        # raises RuntimeError if a file is missing or memory runs out.
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
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, self._group)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, source, self._group)
        failure: Exception | None = None
        for name, num_bytes in json.loads(text.numpy().tobytes()):
            file, partial = folder / name, folder / (name + PARTIAL)
            content: torch.Tensor | None = None
            try:
                with suppress(FileNotFoundError):  # reuse the space of the old file
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
    """Closes a gloo group's connections. Ranks that wait in it then raise RuntimeError.

    The `abort` method of a gloo group does nothing (torch 2.13), but a receive that times out
    closes the group's connections.
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
    found: list[torch.Tensor] = []
    for name, size in files:
        if size:
            found += torch.from_file(str(folder / name), False, size, dtype=torch.uint8).split(
                CHUNK_BYTES
            )
    return found


def _room(file: Path, size: int) -> torch.Tensor:
    """Maps a file after reserving its space, because a full disk would kill the writing process."""
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
