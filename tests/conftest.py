"""Puts this folder on the import path, so that tests of all folders share their cases. Their
processes are forked from one that has imported what they import, and gloo groups share a thread.
Tokenized prompts are kept in a folder of the session.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import fork_starts
import gloo_thread
import kept_heap

_CACHE = tempfile.mkdtemp(prefix="hybridrl-tests-")
os.environ["HYBRIDRL_CACHE"] = _CACHE

fork_starts.install(Path(__file__).parents[1])
if os.environ.get(fork_starts.COLD) != "1":
    gloo_thread.share()


def pytest_collection_finish() -> None:
    """Takes what all tests have imported out of the garbage collector's rounds."""
    gc.collect()
    kept_heap.keep()


def pytest_sessionfinish() -> None:
    """Gives all back, so that libraries find nothing left over at the end of the process."""
    kept_heap.give_back()
    shutil.rmtree(_CACHE, ignore_errors=True)
