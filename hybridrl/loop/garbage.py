"""Excludes a run's long-lived objects from Python's garbage collection.

A full collection visits every object. With vLLM there are more than half a million, so a collection
stops a rank for half a second while other ranks wait. Almost all long-lived objects exist after the
first step, so all objects are frozen at that time (`gc.freeze`); vLLM 0.26 freezes them earlier.
Frozen objects in a reference cycle are never freed, so closing a Trainer unfreezes all objects. The
next Trainer then collects the cycles that the closed one left, because they may hold device memory.
"""

from __future__ import annotations

import atexit
import gc
import threading

from hybridrl.loop.observers import Observer
from hybridrl.platform import Platform

_was_used = threading.Event()  # whether a Trainer in this process has frozen objects


def set_aside(platform: Platform) -> None:
    if not platform.is_cpu:
        gc.collect()  # garbage may hold device memory
    gc.freeze()
    if not _was_used.is_set():
        # Objects that are still frozen when Python exits are never freed. nanobind, which Triton
        # uses, would report its frozen objects as leaked.
        atexit.register(take_back)
    _was_used.set()


def take_back() -> None:
    gc.unfreeze()


def collect_earlier() -> None:
    """Frees earlier Trainers that are no longer referenced, whether or not they were closed."""
    if _was_used.is_set():  # otherwise a collection would only delay the start
        take_back()
        gc.collect()


class FrozenHeap(Observer):
    """Observer that freezes all current objects after the run's first step."""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._is_frozen = platform, False

    def weights_changed(self, number: int) -> None:
        if not self._is_frozen:
            set_aside(self._platform)
            self._is_frozen = True
