"""Reward functions for tests, by dotted path: good ones, and what a scorer must not do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Columns = Mapping[str, object]


def length(prompt: str, response: str, columns: Columns, scale: float = 1.0) -> float:
    """Returns the length of the response."""
    print("what a function prints is no answer")
    return len(response) * scale


def number(prompt: str, response: str, columns: Columns) -> float:
    """Returns its process."""
    return float(os.getpid())


def obeys(prompt: str, response: str, columns: Columns) -> Any:
    """Does what the response says."""
    word = response.strip()
    if word == "hang":
        time.sleep(3600)
    if word == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        Path(str(columns["file"])).write_text(str(child.pid))
        time.sleep(3600)
    if word == "exit":
        os._exit(3)
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "raise":
        raise ZeroDivisionError("no score")
    rubbish = {"nan": float("nan"), "inf": float("inf"), "huge": 1e39, "text": "1", "none": None}
    return rubbish.get(word, 1.0)


async def waits(prompt: str, response: str, columns: Columns) -> float:
    """Waits for others as the response says, or blocks them."""
    word = response.strip()
    if word == "block":
        time.sleep(3600)
    await asyncio.sleep(3600 if word == "hang" else 0.3)
    return float(os.getpid())


def slow(prompt: str, response: str, columns: Columns) -> float:
    """Takes a tenth of a second."""
    time.sleep(0.1)
    return 1.0


def ranks(
    prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Columns]
) -> list[float]:
    """Returns the rank of each response by length."""
    order = sorted(responses, key=len)
    return [float(order.index(response)) for response in responses]


ranks.batched = True  # type: ignore[attr-defined]


def fails_on_odd_lengths(prompt: str, response: str, columns: Columns) -> float:
    """Returns 1 where it does not fail."""
    if len(response) % 2:
        raise ValueError("odd")
    return 1.0
