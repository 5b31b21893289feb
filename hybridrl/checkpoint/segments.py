"""Computes the sizes of segments of page-locked memory. Pure functions; no torch."""

from __future__ import annotations

FIRST_BYTES = 64 << 20
MAX_BYTES = 1 << 30


def next_segment_bytes(taken: int) -> int:
    """Returns the size of the next segment, a power of two, about that of all earlier ones. Small
    models therefore lock little memory, and large models need few segments.
    """
    doubled = 1 << max(taken, 1).bit_length() - 1
    return min(max(doubled, FIRST_BYTES), MAX_BYTES)


def locked_bytes(num_bytes: int) -> int:
    """Returns the total size of the segments for tensors placed one after another."""
    taken = 0
    while taken < num_bytes:
        taken += next_segment_bytes(taken)
    return taken
