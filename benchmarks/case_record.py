"""What a benchmark says of what it measures: the commit, and a case what it knows of itself so far.

Rank 0 writes the result anew after each part, so that what was measured stays if a later part ends
the processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRESS = "[bench]"
# Of cases that are started at once: what one says once started, and the file that lets it go on.
READY, TURN = "ready", "turn"


def commit() -> str | None:
    """Returns the commit that is measured, marked where the tree has changes; None without git."""
    try:
        found = subprocess.check_output(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip() or None


@dataclass
class CaseRecord:
    """A case and what is known of it so far.

    Args:
        job: what the case was told; `folder` gets the result, and so does the file `partial` where
            one is named, which outlives a parent that is killed.
    """

    job: Mapping[str, Any]
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def age_s(self) -> float:
        """Seconds since the case was launched."""
        return time.time() - float(self.job["launched_at"])

    def save(self, done: str, found: str = "") -> None:
        """Writes the result so far, and says what is done and what was found."""
        if int(os.environ["RANK"]) != 0:
            return
        seconds = self.age_s
        self.result.setdefault("seconds", {})[done] = round(seconds, 1)
        # In one piece: others write into the same pipe.
        sys.stdout.write(f"{PROGRESS} {self.job['case']} {seconds:6.1f} s: {done} {found}\n")
        sys.stdout.flush()
        files = [Path(self.job["folder"], "result.json"), self.job.get("partial")]
        for file in map(Path, filter(None, files)):
            part = file.with_suffix(".part")
            part.write_text(json.dumps(self.result))
            part.replace(file)
