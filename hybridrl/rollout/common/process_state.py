"""What an engine inside the trainer's process may change only for a while: random generators, the
environment, attributes of its own modules.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def keep_generators(device: torch.device, everywhere: bool = False) -> Iterator[None]:
    """Leaves torch's global generators as they were; with `everywhere` numpy's and Python's too.

    Engines seed all of them at their start, and draw from torch's in every step, whatever the
    requests say. The trainer's dropout and data order must not depend on that.
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
def ranks_in_environment() -> Iterator[None]:
    """Sets what vLLM's worker reads at its start, where torchrun did not start this process.

    Taken back afterwards: a command that this process starts must not believe to be a rank, and
    vLLM on CPU counts the ranks of a node as if each had an engine.
    """
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    before = {name: os.environ.get(name) for name in names}
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, str(dist.get_rank()))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def without_variables(names: Iterable[str]) -> Iterator[None]:
    """Takes variables out of the environment for as long as the context lasts."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any, if_there: bool = False) -> Iterator[None]:
    """Sets an attribute of a module or class for as long as the engine starts; with `if_there`
    nothing where there is none, as in some versions.
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
    """Lets packages tell errors only: what an engine lacks for other models is of no use here."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
