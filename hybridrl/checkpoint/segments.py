"""How large the segments are in which page-locked memory is taken. Pure arithmetic, no torch."""

from __future__ import annotations

FIRST_BYTES = 64 << 20
MAX_BYTES = 1 << 30


def next_segment_bytes(taken: int) -> int:
    """Returns the size of the next segment, a power of two: as much as all before it together, so
    that small models lock little and large ones few segments.

    Args:
        taken: bytes of all segments before.
    """
    doubled = 1 << max(taken, 1).bit_length() - 1
    return min(max(doubled, FIRST_BYTES), MAX_BYTES)


def locked_bytes(num_bytes: int) -> int:
    """Returns what the segments take that hold tensors of so many bytes, one after the other."""
    taken = 0
    while taken < num_bytes:
        taken += next_segment_bytes(taken)
    return taken
