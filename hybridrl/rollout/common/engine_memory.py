"""The memory that an engine gives back while the policy trains: its weights and its KV cache.

Both lie in pieces of physical memory whose addresses stay reserved, so parameters, caches and CUDA
graphs are valid again once memory is mapped there. Owns when pieces are made, mapped and given
back, in place of the engines' own sleep, which cannot leave out pieces that are lent to training
(lending.py).

Invariants: a lent piece stays mapped at the engine's address. What lies beside weights and caches
in their pieces (tables of addresses) keeps its content whenever the engine is awake.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybridrl.errors import UserError
from hybridrl.hybrid_engine.memory.lending import Mapping, Piece, choose
from hybridrl.parallel.device_mapping import DeviceMapping

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # tags, by the engines' own names
Span: TypeAlias = tuple[int, int]  # the first address, and the one after the last


class EnginePiece(Protocol):
    """A piece as the engine's allocator keeps it: where the engine has it, bytes (a multiple of the
    driver's granularity), what it is for, and the driver's handle. Its memory is released when the
    engine ends.
    """

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def tag(self) -> str: ...
    @property
    def handle(self) -> int: ...

    def gone(self) -> None:
        """Tells the allocator that there is no memory."""
        ...

    def set_handle(self, handle: int) -> None:
        """Lets the allocator keep the handle of other memory, which is mapped now."""
        ...


class SleepingMemory(Protocol):
    """Weights and KV cache of one rank's engine, as `EngineMemory`, whose docstrings hold."""

    @property
    def pieces(self) -> Sequence[EnginePiece]: ...
    @property
    def is_asleep(self) -> bool: ...
    def sleep(self) -> None: ...
    def wake_up(self, tag: str) -> None: ...
    def clear_lent(self) -> None: ...
    def lend(self, num_bytes: int) -> list[Piece]: ...
    @property
    def lent_bytes(self) -> int: ...
    @property
    def released_bytes(self) -> int: ...


def blocks_in_use() -> list[Span]:
    """Returns where tensors lie on this device, as torch's allocator knows."""
    return [
        (block["address"], block["address"] + block["requested_size"])
        for segment in torch.cuda.memory_snapshot(include_traces=False)
        if segment["device"] == torch.cuda.current_device()
        for block in segment["blocks"]
        if block["state"] != "inactive"
    ]


def blocks_of(piece: EnginePiece, blocks: Iterable[Span]) -> list[Span]:
    """Returns those of the blocks that lie in a piece."""
    end = piece.address + piece.num_bytes
    return [one for one in blocks if piece.address <= one[0] < end]


def give_back(piece: EnginePiece, mapping: Mapping) -> None:
    """Unmaps and releases a piece's memory, which nothing may use any more."""
    mapping.unmap(piece.address, piece.num_bytes)
    mapping.release(piece.handle)
    piece.gone()


def check_caches(
    caches: Iterable[Tensor],
    num_bytes: int,
    pieces: Iterable[EnginePiece],
    key: str,
    version: str,
) -> None:
    """Refuses an engine whose KV cache is not in its pieces: it would stay while the policy trains.

    Args:
        caches, num_bytes: Caches that were found, and the bytes that they should have together.
        pieces: Pieces of the engine's allocator.
        key, version: Configuration key that chose the engine, and its version, for the message.
    """
    spans = [(piece.address, piece.address + piece.num_bytes) for piece in pieces]
    found = 0
    for one in caches:
        first, last = one.data_ptr(), one.data_ptr() + one.nbytes
        if any(start <= first and last <= end for start, end in spans):
            found += one.nbytes
    if found < num_bytes:
        raise UserError(
            key,
            f"{found} of {num_bytes} bytes of KV cache are where {version} should have them",
            "all, since what lies elsewhere stays while the policy trains",
            "Install a version that the tests cover, or set rollout.engine=hf.",
        )


def own_memory(
    device: torch.device,
    pieces: Sequence[EnginePiece],
    renewed: Sequence[Tensor],
    padded: Sequence[Tensor],
) -> EngineMemory:
    """Returns the memory of an engine on this rank's device; see `EngineMemory`."""
    return EngineMemory(DeviceMapping(device), pieces, blocks_in_use(), renewed, padded)


class EngineMemory:
    """Implements `SleepingMemory` over pieces of physical memory; awake at first.

    Args:
        blocks: Result of `blocks_in_use`.
        renewed: Caches, and parameters that every update writes as a whole.
        padded: Parameters of which an update writes a part; the rest is of no use.
    """

    def __init__(
        self,
        mapping: Mapping,
        pieces: Sequence[EnginePiece],
        blocks: Sequence[Span],
        renewed: Sequence[Tensor],
        padded: Sequence[Tensor] = (),
    ) -> None:
        self._mapping = mapping
        written = _spans(renewed)
        unneeded = _spans([*renewed, *padded])
        self._lendable: set[int] = set()
        self._pieces: list[EnginePiece] = []
        self._used_bytes: dict[int, int] = {}  # of tensors, by a piece's address
        others: list[Span] = []
        mapping.wait()  # a sync point: what is given back here may have been used until now
        for piece in pieces:
            used = blocks_of(piece, blocks)
            if not used:
                give_back(piece, mapping)  # for good: the engine allocates no more
                continue
            found = list(_uncovered(used, unneeded))
            if sum(stop - start for start, stop in found) > piece.num_bytes // 2:
                continue  # it stays: a copy would take as much
            self._pieces.append(piece)
            self._used_bytes[piece.address] = sum(stop - start for start, stop in used)
            others += found
            if not any(_uncovered(used, written)):
                self._lendable.add(piece.address)
        self._others = [(start, stop - start) for start, stop in others]
        self._asleep: set[int] = set()
        self._lent: set[int] = set()
        self._has_others = True  # they have memory
        with torch.inference_mode():
            self._saved = [mapping.tensor(*one).clone() for one in self._others]

    @property
    def pieces(self) -> Sequence[EnginePiece]:
        """What is given back."""
        return self._pieces

    @property
    def is_asleep(self) -> bool:
        """Whether something has no memory, or none of its content yet."""
        return not self._has_others

    @property
    def lent_bytes(self) -> int:
        """Size of what is lent."""
        return sum(one.num_bytes for one in self._pieces if one.address in self._lent)

    @property
    def released_bytes(self) -> int:
        """Size of the tensors that have no memory now; torch's allocator counts them still."""
        return sum(self._used_bytes[address] for address in self._asleep)

    def sleep(self) -> None:
        """Gives back what is not lent and not given back yet; of the content only that of others
        than weights and caches is kept.
        """
        self._mapping.wait()  # a sync point: nothing may use what is unmapped
        if self._has_others and self._others:
            _copy(self._in_place(), self._saved)
            self._mapping.wait()
        self._has_others = False
        for piece in self._pieces:
            if piece.address not in self._lent | self._asleep:
                give_back(piece, self._mapping)
                self._asleep.add(piece.address)

    def wake_up(self, tag: str) -> None:
        """Brings memory back for what has this tag and sleeps; raises torch.OutOfMemoryError."""
        for piece in self._pieces:
            if piece.tag == tag:
                self._bring_back(piece)
        if not self._asleep and not self._has_others:
            _copy(self._saved, self._in_place())
            self._has_others = True

    def clear_lent(self) -> None:
        """Clears what lent pieces of the KV cache hold of gradients, before generation.

        New memory is cleared by the driver. Attention multiplies what it masks by 0, and a gradient
        read as 16-bit numbers may be NaN.
        """
        for piece in self._pieces:
            if piece.tag == KV_CACHE and piece.address in self._lent:
                self._mapping.tensor(piece.address, piece.num_bytes).zero_()

    def lend(self, num_bytes: int) -> list[Piece]:
        """Lends sleeping pieces, as `lending.MemoryLender`: weights first, whose clearing is free.
        Raises RuntimeError if the engine is awake, whose content would be overwritten.
        """
        free = [one for one in self._pieces if one.address not in self._lent]
        if any(one.address not in self._asleep for one in free):
            raise RuntimeError("an engine lends memory only while it sleeps")
        chosen: list[EnginePiece] = []
        for tag in (WEIGHTS, KV_CACHE):
            some = [one for one in free if one.tag == tag and one.address in self._lendable]
            missing = num_bytes - sum(one.num_bytes for one in chosen)
            chosen += [some[index] for index in choose([one.num_bytes for one in some], missing)]
        for piece in chosen:
            self._bring_back(piece)
            self._lent.add(piece.address)
        return [Piece(piece.handle, piece.num_bytes) for piece in chosen]

    def _in_place(self) -> list[Tensor]:
        return [self._mapping.tensor(*one) for one in self._others]

    def _bring_back(self, piece: EnginePiece) -> None:
        if piece.address not in self._asleep:
            return
        handle = self._mapping.create(piece.num_bytes)
        self._mapping.map(piece.address, piece.num_bytes, handle)
        self._mapping.allow(piece.address, piece.num_bytes)
        piece.set_handle(handle)
        self._asleep.remove(piece.address)


def _spans(tensors: Iterable[Tensor]) -> list[Span]:
    """Returns the addresses that tensors lie at, ascending, those in a row as one."""
    joined: list[Span] = []
    for start, stop in sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _uncovered(used: Iterable[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """Yields the parts of what is in use that lie in none of the spans, which are ascending and do
    not overlap.
    """
    for begin, end in used:
        place = begin
        for start, stop in spans[max(0, bisect_right(spans, (begin,)) - 1) :]:
            if start >= end:
                break
            if start > place:
                yield place, start
            place = max(place, stop)
        if place < end:
            yield place, end


def _copy(sources: list[Tensor], dests: list[Tensor]) -> None:
    if dests:
        with torch.inference_mode():
            torch._foreach_copy_(dests, sources)
