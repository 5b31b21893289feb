"""A reward that fails in the third step of a run whose checkpoints take a while to be written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from hybridrl.checkpoint.sharded_files import _FileWriter

_write = _FileWriter.write


def _slow(writer: _FileWriter) -> None:
    time.sleep(2)
    _write(writer)


if "RANK" in os.environ:
    _FileWriter.write = _slow  # type: ignore[method-assign]


def fails_at_step_3(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns the length of the response, until step 3."""
    own = Path(os.environ["HYBRIDRL_LOG_DIR"], f"rank_{os.environ['RANK']}.phase").read_text()
    if own.strip().endswith("step 3"):
        raise RuntimeError("a fault of the third step")
    return float(len(response))
