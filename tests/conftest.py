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
from typing import Any

import fork_starts
import gloo_thread
import kept_heap
import pytest

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


def starts_ranks(file: str) -> bool:
    """Whether some test of a file, named from the project's root, starts several ranks that do more
    than wait.
    """
    path = Path(__file__).parents[1] / file
    text = path.read_text(encoding="utf-8")
    return (path.parent.name == "dist" or "mark.dist" in text) and "mark.waits" not in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests of a file run in one process, and those of all files that start ranks in the
    same: one test after the other, so that no more ranks share the cores than one test needs. What
    the command line names first begins first.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if starts_ranks(file) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)
