"""Sizes of the segments of page-locked memory. Pure arithmetic, no torch."""

from __future__ import annotations

FIRST_BYTES = 64 << 20
MAX_BYTES = 1 << 30


def next_segment_bytes(taken: int) -> int:
    """Returns the size of the next segment, a power of two.

    It is as large as all segments before it together (`taken` bytes), so that small models lock
    little memory and large ones need few segments.
    """
    doubled = 1 << max(taken, 1).bit_length() - 1
    return min(max(doubled, FIRST_BYTES), MAX_BYTES)


def locked_bytes(num_bytes: int) -> int:
    """Returns the size of the segments that hold `num_bytes` of tensors, one after the other."""
    taken = 0
    while taken < num_bytes:
        taken += next_segment_bytes(taken)
    return taken
