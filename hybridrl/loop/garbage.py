"""Excludes a run's long-lived objects from Python's garbage collection.

A full collection visits every object, half a million and more with vLLM, and stops a rank for half
a second while others wait. Almost all of them exist after the first step and stay, so they are
frozen then (`gc.freeze`). vLLM does the same after an engine's start (engine/core.py, 0.26), but a
run may have no vLLM, and the first step creates objects too.

A frozen object in a reference cycle is never freed, so closing a Trainer unfreezes all objects. The
next Trainer collects the cycles of the one before, which may hold memory of the device.
"""

from __future__ import annotations

import atexit
import gc
import threading

from hybridrl.loop.observers import Observer
from hybridrl.platform import Platform

_was_used = threading.Event()  # whether a Trainer of this process has frozen objects


def set_aside(platform: Platform) -> None:
    """Excludes all current objects from garbage collection."""
    if not platform.is_cpu:
        gc.collect()  # garbage may hold memory of the device
    gc.freeze()
    if not _was_used.is_set():
        # Objects that are frozen when Python exits are never freed, and nanobind, which Triton
        # uses, would report its objects as leaked.
        atexit.register(take_back)
    _was_used.set()


def take_back() -> None:
    """Includes all objects in garbage collection again."""
    gc.unfreeze()


def collect_earlier() -> None:
    """Frees Trainers of this process that are no longer referenced, closed or not."""
    if _was_used.is_set():  # else there is nothing to free, and a collection delays the start
        take_back()
        gc.collect()


class FrozenHeap(Observer):
    """Freezes the run's objects after its first step."""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._is_frozen = platform, False

    def weights_changed(self, number: int) -> None:
        if not self._is_frozen:
            set_aside(self._platform)
            self._is_frozen = True
