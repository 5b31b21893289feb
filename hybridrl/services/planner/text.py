"""Formats sizes as text. No torch."""

from __future__ import annotations


def traffic(size: float) -> str:
    """Formats a number of transferred bytes in decimal units, as in transfer rates."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def memory_size(size: float) -> str:
    """Formats an amount of memory in binary units."""
    gib, mib = size / 2**30, size / 2**20
    return f"{gib:.1f} GiB" if gib >= 1 else f"{mib:.1f} MiB"
