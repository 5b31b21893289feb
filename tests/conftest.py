"""Puts this folder on the import path, so that tests of all folders share their cases. Their
processes are forked from one that has imported what they import, gloo groups share a thread, and
nothing is compiled: vLLM would have TorchInductor compile three small functions in each process.
Tokenized prompts are kept in a folder of the session.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import fork_starts

if os.environ.get(fork_starts.COLD) != "1":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is imported

import gloo_thread
import kept_heap
import pytest

RANKS_OF = "ranks of "
_CACHE = tempfile.mkdtemp(prefix="hybridrl-tests-")
os.environ["HYBRIDRL_CACHE"] = _CACHE

fork_starts.install(Path(__file__).parents[1])
if os.environ.get(fork_starts.COLD) != "1":
    gloo_thread.share()


gc.disable()  # imports leave little garbage, and each round would look at all of them


def pytest_collection_finish() -> None:
    """Takes what all tests have imported out of the garbage collector's rounds."""
    gc.collect()
    kept_heap.keep()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Gives all back, so that libraries find nothing left over at the end of the process."""
    kept_heap.give_back()
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether `make test-full` runs."""
    return "not full" not in request.config.option.markexpr


@cache
def starts_ranks(file: str) -> bool:
    """Whether a test in a file, relative to the root, starts several ranks that compute."""
    path = Path(__file__).parents[1] / file
    text = path.read_text(encoding="utf-8")
    return (path.parent.name == "dist" or "mark.dist" in text) and "mark.waits" not in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests of a file run in one process. All files of one folder that start ranks are
    in the same, one test after the other: no more ranks share the cores than two tests need. They
    begin first; what the command line names first begins before the rest.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return f"{RANKS_OF}{os.path.dirname(file)}" if starts_ranks(file) else file

        def _assign_work_unit(self, node: Any) -> None:
            for scope in self.workqueue:
                if scope.startswith(RANKS_OF):
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
