"""Puts this folder on the import path, so that tests of all folders share their cases. Their
processes are forked from one that has imported what they import. Tokenized prompts are kept in a
folder of the session.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import fork_starts

_CACHE = tempfile.mkdtemp(prefix="hybridrl-tests-")
os.environ["HYBRIDRL_CACHE"] = _CACHE

fork_starts.install(Path(__file__).parents[1])


def pytest_collection_finish() -> None:
    """Takes what all tests have imported out of the garbage collector's rounds: Megatron asks for a
    whole one at each checkpoint, which took a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Gives all back, so that libraries find nothing left over at the end of the process."""
    gc.unfreeze()
    shutil.rmtree(_CACHE, ignore_errors=True)
