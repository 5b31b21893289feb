"""Calls the CUDA driver through ctypes to reserve addresses, and to allocate and map memory.

A piece of memory has a handle. It can be mapped at several addresses, which then share its content.
The memory is freed once its handle is released and no address is mapped to it. Only `wait` waits
for the device. Before callers unmap addresses, they must make sure that no kernel still uses these
addresses.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

GRANULARITY = 2 << 20  # bytes; sizes of allocations and mapped ranges must be multiples of this
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
    """Calls the CUDA driver for one device; raises OutOfMemoryError, or RuntimeError
    with a code.
    """

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)  # creates the CUDA context, and makes it this thread's
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
        found = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        size_ = ctypes.c_size_t(size)
        self._call("cuMemAddressReserve", ctypes.byref(found), size_, zero, zero, zero)
        return found.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def create(self, size: int) -> int:
        found = ctypes.c_uint64()
        size_, properties = ctypes.c_size_t(size), ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(found), size_, properties, ctypes.c_uint64(0))
        return found.value

    def release(self, handle: int) -> None:
        """Releases a handle. The memory is freed once no address is mapped to it."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        address_, size_ = ctypes.c_uint64(address), ctypes.c_size_t(size)
        offset, zero = ctypes.c_size_t(0), ctypes.c_uint64(0)
        self._call("cuMemMap", address_, size_, offset, ctypes.c_uint64(handle), zero)

    def allow(self, address: int, size: int) -> None:
        address_, size_ = ctypes.c_uint64(address), ctypes.c_size_t(size)
        access = ctypes.byref(self._access)
        self._call("cuMemSetAccess", address_, size_, access, ctypes.c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Unmaps an address range, which may span several pieces of memory."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def tensor(self, address: int, size: int) -> Tensor:
        return torch.as_tensor(_Addresses(address, size), device=self.device)


class _Addresses:
    """Array interface that lets torch use the addresses without owning them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
