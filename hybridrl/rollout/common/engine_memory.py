"""The memory that an engine releases while the policy trains: its weights and its KV cache.

Both consist of pieces of physical memory whose addresses stay reserved, so that parameters, caches
and CUDA graphs become valid again once memory is mapped at these addresses. The module replaces the
engines' own sleep mode, which cannot exclude pieces that are lent to training (lending.py).

Invariants: a lent piece stays mapped at the engine's address. Other data in the same pieces (tables
of addresses) is intact whenever the engine is awake.
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

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # tags that both engines use
Span: TypeAlias = tuple[int, int]  # first address, and end address (exclusive)


class EnginePiece(Protocol):
    """A piece of memory in the engine's allocator, which releases it when the engine shuts down."""

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def tag(self) -> str: ...
    @property
    def handle(self) -> int: ...

    def gone(self) -> None:
        """Tells the allocator that no memory is mapped at this piece."""

    def set_handle(self, handle: int) -> None:
        """Tells the allocator the driver handle of the memory that is now mapped."""


class SleepingMemory(Protocol):
    """Memory of one rank's weights and KV cache; `EngineMemory` documents the methods."""

    @property
    def pieces(self) -> Sequence[EnginePiece]: ...
    @property
    def is_asleep(self) -> bool: ...
    def sleep(self) -> None: ...
    def wake_up(self, tag: str) -> None: ...
    def clear_lent(self) -> None: ...
    def lend(self, num_bytes: int, keeps_weights: bool = False) -> list[Piece]: ...
    @property
    def lends_weights(self) -> bool: ...
    @property
    def released_bytes(self) -> int: ...


def blocks_in_use() -> list[Span]:
    """Returns the address ranges of live tensors on this device, from torch's allocator."""
    return [
        (block["address"], block["address"] + block["requested_size"])
        for segment in torch.cuda.memory_snapshot(include_traces=False)
        if segment["device"] == torch.cuda.current_device()
        for block in segment["blocks"]
        if block["state"] != "inactive"
    ]


def blocks_of(piece: EnginePiece, blocks: Iterable[Span]) -> list[Span]:
    end = piece.address + piece.num_bytes
    return [one for one in blocks if piece.address <= one[0] < end]


def give_back(piece: EnginePiece, mapping: Mapping) -> None:
    """Unmaps and releases a piece's memory, which must not be in use."""
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
    """Raises UserError if part of an engine's KV cache, expected to have `num_bytes`, is outside
    its pieces and so cannot be released. `key` and `version` name the engine in the message.
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
            f"{found} of {num_bytes} bytes of KV cache in the memory pool of {version}",
            "all bytes in the pool: other memory cannot be released while the policy trains",
            "Install a version that `hybridrl check` calls tested, or set rollout.engine=hf.",
        )


def own_memory(
    device: torch.device,
    pieces: Sequence[EnginePiece],
    renewed: Sequence[Tensor],
    padded: Sequence[Tensor],
) -> EngineMemory:
    return EngineMemory(DeviceMapping(device), pieces, blocks_in_use(), renewed, padded)


class EngineMemory:
    """Implements `SleepingMemory` with pieces of physical memory; initially awake.

    Args:
        blocks: Result of `blocks_in_use`.
        renewed: Caches, and parameters that every update writes completely.
        padded: Parameters that an update writes only in part; the rest is unused.
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
        self._used_bytes: dict[int, int] = {}  # bytes of tensors, by a piece's address
        others: list[Span] = []
        mapping.wait()  # a sync point: kernels may still use memory that is released here
        for piece in pieces:
            used = blocks_of(piece, blocks)
            if not used:
                give_back(piece, mapping)  # the engine will not allocate this memory again
                continue
            found = list(_uncovered(used, unneeded))
            if sum(stop - start for start, stop in found) > piece.num_bytes // 2:
                continue  # saving the piece's other data would take as much memory
            self._pieces.append(piece)
            self._used_bytes[piece.address] = sum(stop - start for start, stop in used)
            others += found
            if not any(_uncovered(used, written)):
                self._lendable.add(piece.address)
        self._others = [(start, stop - start) for start, stop in others]
        self._asleep: set[int] = set()
        self._lent: set[int] = set()
        self._has_others = True  # whether the other data is intact
        with torch.inference_mode():
            self._saved = [mapping.tensor(*one).clone() for one in self._others]

    @property
    def pieces(self) -> Sequence[EnginePiece]:
        """The pieces that `sleep` releases."""
        return self._pieces

    @property
    def is_asleep(self) -> bool:
        """Whether any piece has no memory, or its other data was not restored yet."""
        return not self._has_others

    @property
    def lends_weights(self) -> bool:
        """Whether a lent piece contains weights, which training then overwrites."""
        return any(one.tag == WEIGHTS for one in self._pieces if one.address in self._lent)

    @property
    def released_bytes(self) -> int:
        """Bytes of tensors that have no memory now, which torch's allocator still counts."""
        return sum(self._used_bytes[address] for address in self._asleep)

    def sleep(self) -> None:
        """Releases all pieces that are not lent. Saves all data except weights and caches."""
        self._mapping.wait()  # a sync point: no kernel may use memory that is unmapped
        if self._has_others and self._others:
            _copy(self._in_place(), self._saved)
            self._mapping.wait()
        self._has_others = False
        for piece in self._pieces:
            if piece.address not in self._lent | self._asleep:
                give_back(piece, self._mapping)
                self._asleep.add(piece.address)

    def wake_up(self, tag: str) -> None:
        """Maps new memory for released pieces with this tag; raises torch.OutOfMemoryError."""
        for piece in self._pieces:
            if piece.tag == tag:
                self._bring_back(piece)
        if not self._asleep and not self._has_others:
            _copy(self._saved, self._in_place())
            self._has_others = True

    def clear_lent(self) -> None:
        """Clears lent pieces of the KV cache, which contain gradients, before generation.

        Attention multiplies the values of masked positions by 0, but the remains of gradients may
        be NaN when they are read as 16-bit values, and 0 * NaN is NaN. Newly mapped memory needs no
        clearing, because the driver clears it.
        """
        for piece in self._pieces:
            if piece.tag == KV_CACHE and piece.address in self._lent:
                self._mapping.tensor(piece.address, piece.num_bytes).zero_()

    def lend(self, num_bytes: int, keeps_weights: bool = False) -> list[Piece]:
        """Lends released pieces; see `lending.MemoryLender`. Pieces with weights are lent first,
        because they need no clearing. Raises RuntimeError if the engine is awake, because its data
        would be overwritten.
        """
        free = [one for one in self._pieces if one.address not in self._lent]
        if any(one.address not in self._asleep for one in free):
            raise RuntimeError("an engine can lend memory only while it sleeps")
        chosen: list[EnginePiece] = []
        for tag in (KV_CACHE,) if keeps_weights else (WEIGHTS, KV_CACHE):
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
    """Returns the ascending address ranges of tensors, with adjacent ranges joined."""
    joined: list[Span] = []
    for start, stop in sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _uncovered(used: Iterable[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """Yields the parts of used blocks that no span covers. Spans must ascend and not overlap."""
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
