"""A driver of device memory without a device: what CUDA would refuse is an error."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hybridrl.parallel.device_mapping import GRANULARITY


@dataclass
class FakeDriver:
    """Memory and addresses of a device. Sizes are those of handles; every misuse is an error."""

    reserved: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # of handles that are not released
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address: (handle, size)
    allowed: set[int] = field(default_factory=set)
    is_idle: bool = False  # nobody has been allowed to use memory since it was waited for
    calls: list[str] = field(default_factory=list)
    # What handles hold of addresses that were asked for; new memory holds zeros.
    contents: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    _next: int = 1 << 40
    _num_handles: int = 0

    def reserve(self, size: int) -> int:
        assert size > 0 and size % GRANULARITY == 0
        self.reserved[self._next] = size
        self._next += size + GRANULARITY
        return self._next - size - GRANULARITY

    def free(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= place < address + size for place in self.mapped)

    def create(self, size: int) -> int:
        assert size > 0 and size % GRANULARITY == 0
        self.calls.append("create")
        self._num_handles += 1
        self.sizes[self._num_handles] = size
        return self._num_handles

    def release(self, handle: int) -> None:
        self.calls.append("release")
        del self.sizes[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        assert self.sizes[handle] == size, "a piece is mapped as a whole"
        start = next(s for s, length in self.reserved.items() if s <= address < s + length)
        assert address + size <= start + self.reserved[start]
        taken = [(place, length) for place, (_, length) in self.mapped.items()]
        assert all(place + n <= address or address + size <= place for place, n in taken)
        self.mapped[address] = handle, size

    def allow(self, address: int, size: int) -> None:
        places = [place for place in self.mapped if address <= place < address + size]
        assert sum(self.mapped[place][1] for place in places) == size, "not mapped throughout"
        self.allowed.update(places)
        self.is_idle = False

    def unmap(self, address: int, size: int) -> None:
        assert self.is_idle, "work may still use it"
        places = [place for place in self.mapped if address <= place < address + size]
        assert sum(self.mapped[place][1] for place in places) == size
        for place in places:
            del self.mapped[place]
            self.allowed.discard(place)

    def wait(self) -> None:
        self.calls.append("wait")
        self.is_idle = True

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """Returns what lies there, and notes that it is read or written."""
        place = max(start for start in self.mapped if start <= address)
        handle, length = self.mapped[place]
        assert place in self.allowed and address + size <= place + length
        self.calls.append(f"tensor {handle}")
        with torch.inference_mode(False):
            return self.contents.setdefault(
                (handle, address - place, size), torch.zeros(size, dtype=torch.uint8)
            )

    def adopt(self, address: int, size: int) -> int:
        """Takes memory in that somebody else has made and mapped; returns its handle."""
        self.reserved[address] = size
        handle = self.create(size)
        self.map(address, size, handle)
        self.allow(address, size)
        self.calls.clear()
        return handle
