"""The parts of csrc/ without kernels, compiled without CUDA and with a library for the driver."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

CSRC = Path(__file__).parents[2] / "csrc"
FAKES = Path(__file__).parents[1] / "fake_cuda"
SOURCES = "storage_place.cpp", "engine_pool.cpp"
TORCH = Path(torch.__file__).parent
MIB = 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled sources, loaded. They are one unit, so that torch's headers are read once."""
    folder = tmp_path_factory.mktemp("csrc")
    unit, built = folder / "all.cpp", folder / "csrc.so"
    unit.write_text("".join(f'#include "{CSRC / name}"\n' for name in SOURCES))
    includes = [f"-I{FAKES}", f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    links = [f"-L{TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC"]
    subprocess.run([*command, *includes, str(unit), *links, "-o", str(built)], check=True)
    torch.ops.load_library(str(built))
    return built


def test_storage_lies_where_it_is_told_with_all_its_views(library: Path) -> None:
    place = torch.ops.hybridrl.place_storage

    memory = torch.full((64,), 7.0)
    whole = torch.ones(16)
    view = whole[4:8]
    place(whole, memory.data_ptr() + 64, 64)
    assert whole.tolist() == [7] * 16  # nothing is copied or cleared
    view.fill_(3)
    assert memory[20:24].tolist() == [3] * 4 and memory.sum() == 60 * 7 + 12
    place(whole, 0, 0)
    assert whole.untyped_storage().nbytes() == 0 and whole.data_ptr() == 0
    whole.untyped_storage().resize_(64)  # torch's own again, which it frees
    assert view.data_ptr() - whole.data_ptr() == 16
    with pytest.raises(RuntimeError, match="address 0 needs 0 bytes"):
        place(whole, 0, 64)


class Driver:
    """A driver that counts, and the allocator that asks it."""

    def __init__(self, library: Path, driver: Path) -> None:
        self.driver: Any = ctypes.CDLL(str(driver))
        self._allocator = ctypes.CDLL(str(library))
        self._make = self._allocator.hybridrl_make_engine_memory
        self._make.restype = ctypes.c_uint64

    def make(self, size: int) -> int:
        return int(self._make(ctypes.c_ssize_t(size), ctypes.c_int(1), None))

    def end(self, address: int, size: int) -> None:
        self._allocator.hybridrl_end_engine_memory(
            ctypes.c_void_p(address), ctypes.c_ssize_t(size), ctypes.c_int(1), None
        )

    def count(self, what: str) -> int:
        return ctypes.c_int.in_dll(self.driver, f"fake_{what}").value

    def has(self) -> tuple[int, int, int]:
        """Ranges of addresses that are reserved, those that are mapped, handles that live."""
        return self.count("reserved"), self.count("mapped"), self.count("handles")

    def limit(self, num_handles: int) -> None:
        ctypes.c_int.in_dll(self.driver, "fake_limit").value = num_handles


@pytest.fixture
def driver(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    built = tmp_path_factory.getbasetemp() / "libcuda.so.1"
    if not built.exists():
        command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{FAKES}"]
        subprocess.run([*command, str(FAKES / "driver.c"), "-o", str(built)], check=True)
    ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)  # what asks for one of this name gets it
    found = Driver(library, built)
    found.limit(1000)
    assert found.has() == (0, 0, 0)
    yield found
    assert found.has() == (0, 0, 0)  # nothing is left mapped, reserved or alive
    assert found.count("refused") == 0


def pieces() -> list[tuple[int, int, int]]:
    table = torch.ops.hybridrl.engine_pieces()
    return list(zip(table[::3], table[1::3], table[2::3], strict=True))


def test_pieces_of_engine_memory_are_made_told_and_ended(driver: Driver) -> None:
    one, two = driver.make(3 * MIB), driver.make(2 * MIB)
    assert driver.has() == (2, 2, 2)
    sizes = {address: num_bytes for address, num_bytes, _ in pieces()}
    assert sizes == {one: 4 * MIB, two: 2 * MIB}  # whole units of the driver's memory
    assert list(sizes) == sorted(sizes) and len({handle for *_, handle in pieces()}) == 2
    driver.end(one, 3 * MIB)
    assert [address for address, *_ in pieces()] == [two] and driver.has() == (1, 1, 1)
    driver.end(two, 2 * MIB)
    assert pieces() == []
    driver.end(two, 2 * MIB)  # of what is not its own it ends nothing


def test_a_piece_ends_with_the_memory_that_was_told_last(driver: Driver) -> None:
    """Others unmap it and map other memory there, or none."""
    tell = torch.ops.hybridrl.set_engine_piece
    for is_back in (False, True):
        address = driver.make(2 * MIB)
        ((_, _, first),) = pieces()
        assert driver.driver.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(2 * MIB)) == 0
        assert driver.driver.cuMemRelease(ctypes.c_uint64(first)) == 0
        tell(address, 0)
        assert driver.has() == (1, 0, 0)
        if is_back:
            second = ctypes.c_uint64()
            zero = ctypes.c_uint64(0)
            size = ctypes.c_size_t(2 * MIB)
            driver.driver.cuMemCreate(ctypes.byref(second), size, None, zero)
            driver.driver.cuMemMap(ctypes.c_uint64(address), size, zero, second, zero)
            tell(address, second.value)
            assert pieces() == [(address, 2 * MIB, second.value)] and second.value != first
        driver.end(address, 2 * MIB)
        assert driver.has() == (0, 0, 0)
    with pytest.raises(RuntimeError, match="no piece of engine memory begins at 4096"):
        tell(4096, 1)


def test_a_device_without_memory_gives_none_and_keeps_nothing(driver: Driver) -> None:
    driver.limit(1)
    one = driver.make(2 * MIB)
    assert driver.make(2 * MIB) == 0 and driver.has() == (1, 1, 1)
    driver.end(one, 2 * MIB)
