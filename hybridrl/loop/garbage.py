"""Keeps objects that a run needs to its end out of Python's garbage collection.

A full collection looks at every object: half a million and more with vLLM, which stops a rank for
half a second while others wait. Almost all of them exist after the first step and stay, so they are
frozen then (`gc.freeze`). vLLM does the same when an engine has started (engine/core.py, 0.26), but
a run may have no vLLM, and the first step makes objects too.

A frozen object in a reference cycle is never freed, so all are unfrozen when a Trainer is closed.
The next Trainer collects the cycles of the one before: they may hold memory of the device.
"""

from __future__ import annotations

import atexit
import gc
import threading

from hybridrl.loop.observers import Observer
from hybridrl.platform import Platform

_was_used = threading.Event()  # whether a Trainer of this process has set objects aside


def set_aside(platform: Platform) -> None:
    """Keeps all objects that there are out of collections from now on."""
    if not platform.is_cpu:
        gc.collect()  # garbage may hold memory of the device; what it holds of a host's is little
    gc.freeze()
    if not _was_used.is_set():
        # What is still frozen when Python ends is never freed: nanobind, which Triton is made
        # with, reports its objects as leaked.
        atexit.register(take_back)
    _was_used.set()


def take_back() -> None:
    """Lets collections look at everything again."""
    gc.unfreeze()


def collect_earlier() -> None:
    """Frees the Trainers of this process that nobody refers to any more, closed or not."""
    if _was_used.is_set():  # else there was none; a collection delays a start
        take_back()
        gc.collect()


class FrozenHeap(Observer):
    """Sets the objects of the run aside after its first step."""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._is_frozen = platform, False

    def weights_changed(self, number: int) -> None:
        if not self._is_frozen:
            set_aside(self._platform)
            self._is_frozen = True
