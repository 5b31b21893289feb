"""Passes a report from ranks to the command that started them. Does not import torch."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.parallel.failure import is_launched, rank_file
from hybridrl.services.launch.local_ranks import launch

REPORT = "report.json"


def report_of_ranks(arguments: Sequence[str], world_size: int) -> dict[str, Any] | int:
    """Runs `hybridrl ARGUMENTS` as local ranks. Returns their report, or the code of a failure."""
    log_dir = Path(tempfile.mkdtemp(prefix="hybridrl-report-"))
    code = launch(arguments, world_size, log_dir)
    report: dict[str, Any] = {}
    if code == 0:
        report = json.loads((log_dir / REPORT).read_text(encoding="utf-8"))
    if code != 1:  # with code 1, an error message refers to the logs
        shutil.rmtree(log_dir)
    return code or report


def leave_for_parent(report: dict[str, Any]) -> bool:
    """Writes the report for the parent process; returns False if none expects it."""
    file = rank_file(".log")
    if file is None or not is_launched():
        return False
    file.with_name(REPORT).write_text(json.dumps(report), encoding="utf-8")
    return True
