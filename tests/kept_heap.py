"""Takes what tests have imported out of the garbage collector's rounds, for good.

A whole round over torch, Megatron and vLLM takes a quarter of a second, and in a forked process it
copies what its objects lie on. Megatron asks for one at each checkpoint; vLLM for six at the start
and end of an engine, which also gives back what others have frozen: its engines then took two
seconds in place of half of one. What is made from now on is collected as ever.
"""

from __future__ import annotations

import gc

_freeze, _unfreeze = gc.freeze, gc.unfreeze


def keep() -> None:
    """Freezes what there is; nobody else freezes anything or gives it back until `give_back`."""
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


def give_back() -> None:
    """Makes all of it garbage collection's again."""
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    gc.unfreeze()
