"""The driver's calls that reserve addresses, make memory and map one to the other, by ctypes.

Memory has a handle and may be mapped at several addresses: what is written at one is read at the
others. It is given back once its handle is released and it is mapped nowhere. Nothing here waits
for the device: whoever unmaps addresses makes sure that no work still uses them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

GRANULARITY = (
    2 << 20
)  # bytes: sizes of memory, and of addresses that it is mapped at, are multiples
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, _ACCESS_


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DeviceMapping:
    """The calls, for one device.

    Each method is one call. It raises RuntimeError with the driver's number if it is refused, and
    torch.OutOfMemoryError where the device has no memory.
    """

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)  # makes the context and lets this thread have it
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.device = device
        location = _Location(DEVICE, device.index or 0)
        self._properties = _Properties(type=PINNED, location=location)
        self._access = _Access(location, READ_WRITE)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory in {name}")
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def reserve(self, size: int) -> int:
        """Reserves addresses."""
        found = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        size_ = ctypes.c_size_t(size)
        self._call("cuMemAddressReserve", ctypes.byref(found), size_, zero, zero, zero)
        return found.value

    def free(self, address: int, size: int) -> None:
        """Gives addresses back that nothing is mapped to."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def create(self, size: int) -> int:
        """Makes memory; returns its handle."""
        found = ctypes.c_uint64()
        made = ctypes.byref(found), ctypes.c_size_t(size), ctypes.byref(self._properties)
        self._call("cuMemCreate", *made, ctypes.c_uint64(0))
        return found.value

    def release(self, handle: int) -> None:
        """Gives memory back, once it is mapped nowhere."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Maps a whole piece of memory."""
        zero = ctypes.c_uint64(0)
        place = ctypes.c_uint64(address), ctypes.c_size_t(size)
        self._call("cuMemMap", *place, ctypes.c_size_t(0), ctypes.c_uint64(handle), zero)

    def allow(self, address: int, size: int) -> None:
        """Makes mapped addresses readable and writable."""
        place = ctypes.c_uint64(address), ctypes.c_size_t(size)
        self._call("cuMemSetAccess", *place, ctypes.byref(self._access), ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Unmaps addresses, one piece of memory or many."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def wait(self) -> None:
        """Waits until the device is idle; not a call of the driver's about memory."""
        torch.cuda.synchronize(self.device)

    def tensor(self, address: int, size: int) -> Tensor:
        """Returns mapped addresses as bytes."""
        return torch.as_tensor(_Addresses(address, size), device=self.device)


class _Addresses:
    """What torch reads as an array without owning it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
