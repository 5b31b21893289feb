"""Memory of copies on the host: whole storages, one after the other, little more than they need."""

from __future__ import annotations

import io

import pytest
import torch

from hybridrl.checkpoint import host_memory as segment_sizes
from hybridrl.checkpoint.host_copies import HostCopies, Segments
from hybridrl.checkpoint.host_memory import locked_bytes

SHAPES = [(3, 700), (), (0, 4), (1000,), (5000,), (7,)]
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.float32, torch.float32, torch.uint8]


def test_tensors_of_segments_are_whole_storages_that_do_not_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_sizes, "FIRST_BYTES", 1 << 14)
    sizes = list[int]()

    def make(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    segments = Segments(make)
    found = [
        segments.empty(torch.Size(shape), dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]
    # 4,200, 4, 0, 4,000 and 7 bytes are in the first; 20,000 in one of their own.
    assert sizes == [1 << 14, 1 << 15]
    for number, tensor in enumerate(found):
        assert tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(found))
    file = io.BytesIO()
    torch.save(found[0], file)
    assert file.tell() < found[0].nbytes + 2000
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in found if t.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def test_segments_begin_small_and_double_as_the_plan_counts_them() -> None:
    sizes = list[int]()

    def make(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)  # not written: takes no memory

    segments, mib = Segments(make), 1 << 20
    for number in range(1, 192):  # of 16 MiB each: 3 GiB but for one
        segments.empty(torch.Size([16 * mib]), torch.uint8)
        assert sum(sizes) == locked_bytes(number * 16 * mib) <= max(64, 2 * number * 16) * mib
    assert sizes == [size * mib for size in (64, 64, 128, 256, 512, 1024, 1024)]


def test_copies_keep_their_memory_and_change_with_shape_and_type() -> None:
    copies = HostCopies()
    first = copies.take("a", torch.arange(6.0))
    again = copies.take("a", torch.ones(6))
    assert again is first and bool((first == 1).all())
    other = copies.take("a", torch.ones(2, 3, dtype=torch.bfloat16))
    assert other.shape == (2, 3) and other.dtype == torch.bfloat16
    assert copies.num_bytes == 12
