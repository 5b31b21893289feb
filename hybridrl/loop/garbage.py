"""Keeps objects that a run needs to its end out of Python's garbage collection.

A full collection looks at every object of the process. Libraries, models and compiled code are half
a million of them, more with vLLM: it stops a rank for half a second, and the others wait for it.
Almost all of these exist after the first step, and are needed to the end of the run; garbage is
among the objects that later steps make. So after the first step all objects that exist are frozen
(`gc.freeze`), and collections look at newer ones only. vLLM does the same when an engine has
started (engine/core.py, 0.26), but a run may have no vLLM, and the first step makes objects too.

A frozen object that is part of a reference cycle is never freed. So all are unfrozen when a Trainer
is closed. Another Trainer also has the cycles of the one before it collected, since these may hold
a model and memory of the device.
"""

from __future__ import annotations

import atexit
import gc
import threading

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
