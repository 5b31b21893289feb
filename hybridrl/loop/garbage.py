"""What a run holds for good, kept out of Python's collections of garbage.

A full collection looks at every object of the process. Libraries, models and compiled code are half
a million of them, more with vLLM: it stops a rank for half a second, and the others wait for it.
What a collection finds is made by steps; so what there is after the first one is looked at no more.
vLLM sets aside what there is when an engine has started (engine/core.py, 0.26); runs without it,
and what the first step makes, are left.

Of objects that are set aside, those in circles stay when nothing refers to them any more. So they
are taken back before a Trainer ends, and before another one is made.
"""

from __future__ import annotations

import gc

from hybridrl.platform import Platform


def set_aside(platform: Platform) -> None:
    """Keeps all objects that there are out of collections from now on."""
    if not platform.is_cpu:
        gc.collect()  # garbage may hold memory of the device; what it holds of a host's is little
    gc.freeze()


def take_back() -> None:
    """Lets collections look at everything again."""
    gc.unfreeze()
