"""Context managers for process state that engines may change only temporarily: random generators,
environment variables, and attributes of the engine's modules.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def keep_generators(device: torch.device, everywhere: bool = False) -> Iterator[None]:
    """Restores torch's global random generators at exit; with `everywhere`, numpy's and Python's,
    too.

    Engines seed all generators when they start, and draw from torch's generators in every step. The
    trainer's dropout and data order must not depend on this.
    """
    python, numpy = (random.getstate(), np.random.get_state()) if everywhere else (None, None)
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        if python is not None and numpy is not None:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def kept_variables(names: Iterable[str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def ranks_in_environment() -> Iterator[None]:
    """Sets the variables from which vLLM's worker reads its rank, unless torchrun set them.

    They are removed afterwards. Otherwise a command that this process starts would believe that it
    is a rank, and vLLM on CPU would assume that every rank on a node has an engine.
    """
    with kept_variables(("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.setdefault(name, str(dist.get_rank()))
        yield


@contextlib.contextmanager
def without_variables(names: Sequence[str]) -> Iterator[None]:
    with kept_variables(names):
        for name in names:
            os.environ.pop(name, None)
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any, if_there: bool = False) -> Iterator[None]:
    """Replaces an attribute during a `with` block; with `if_there`, only if it exists."""
    if if_there and name not in owner.__dict__:
        yield
        return
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses packages' warnings, which do not apply to their use here; keeps error messages."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
