"""Context managers for process state that an engine may change only temporarily: random generators,
the environment, attributes of the engine's modules.
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
    """Restores torch's global generators; with `everywhere` numpy's and Python's too.

    Engines seed all of them at their start and draw from torch's in every step. The trainer's
    dropout and data order must not depend on that.
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
    """Restores variables of the environment."""
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
    """Sets the rank variables that vLLM's worker reads at its start, if torchrun did not start this
    process.

    They are removed afterwards. Otherwise a command started by this process would take itself for a
    rank, and vLLM on CPU would assume that every rank of a node has an engine.
    """
    with kept_variables(("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.setdefault(name, str(dist.get_rank()))
        yield


@contextlib.contextmanager
def without_variables(names: Sequence[str]) -> Iterator[None]:
    """Removes variables from the environment temporarily."""
    with kept_variables(names):
        for name in names:
            os.environ.pop(name, None)
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any, if_there: bool = False) -> Iterator[None]:
    """Replaces an attribute of a module or class temporarily. With `if_there`, does nothing if it
    does not exist, as in some versions.
    """
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
    """Restricts packages to error messages; their warnings concern other uses."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
