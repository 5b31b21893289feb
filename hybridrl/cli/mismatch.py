"""`hybridrl check --mismatch`: starts the ranks that compare engine and trainer, and prints what
they found. No torch.

Who waits for whom: the parent waits for its ranks; rank 0 leaves the report beside their logs, for
the parent to print and to judge. Under torchrun there is no parent, and rank 0 prints.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.cli.launch import launch
from hybridrl.config.engines import ENGINES
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.parallel.failure import is_launched, rank_file

CHECKS = ("weights", "tokens", "sampling", "numerics", "routing")
REPORT = "mismatch.json"


def refuse_without_rollouts(config: Config, command: str) -> None:
    """Refuses runs in which no engine computes anything.

    Args:
        config: of the run.
        command: that needs one, for the message.

    Raises:
        UserError: naming the key.
    """
    engine = config.rollout.engine
    if not ENGINES[engine].computes:
        allowed = " or ".join(name for name, traits in ENGINES.items() if traits.computes)
        raise UserError(
            "rollout.engine", engine, f"{allowed}, for {command}", "It computes nothing."
        )
    needs = config.algorithm.needs
    if needs is not None and not needs.rollouts:
        raise UserError(
            "algorithm.name",
            config.algorithm.name,
            f"an algorithm with rollouts, for {command}",
            "Give the configuration of an RL run.",
        )


def report_of_ranks(arguments: Sequence[str], world_size: int) -> dict[str, Any] | int:
    """Runs `hybridrl ARGUMENTS` as local ranks; returns their report, or the exit code of what
    went wrong.
    """
    log_dir = Path(tempfile.mkdtemp(prefix="hybridrl-mismatch-"))
    code = launch(arguments, world_size, log_dir)
    report: dict[str, Any] = {}
    if code == 0:
        report = json.loads((log_dir / REPORT).read_text(encoding="utf-8"))
    if code != 1:  # a message names the logs
        shutil.rmtree(log_dir)
    return code or report


def leave_for_parent(report: dict[str, Any]) -> bool:
    """Writes the report where the parent looks for it; returns False if there is no parent."""
    file = rank_file(".log")
    if file is None or not is_launched():
        return False
    file.with_name(REPORT).write_text(json.dumps(report), encoding="utf-8")
    return True


def mismatch_text(report: dict[str, Any]) -> str:
    """Returns the report as lines for people."""
    weights = report["checkpoint"] or "the initial weights"
    lines = [f"{report['engine']} engine and trainer in {report['dtype']}, {weights}"]
    for name in (name for name in CHECKS if name in report):
        finding = report[name]
        lines.append(f"{name:9} {'agree' if finding['agrees'] else 'DIFFER':7} {finding['found']}")
        if finding["remedy"]:
            lines.append(f"{'':17} {finding['remedy']}")
    numerics = report["numerics"]["details"]
    if numerics:
        columns = [column for column in numerics["stages"][0] if column != "stage"]
        allowed = numerics["residual_bound"]
        lines.append(f"relative RMS of the residual stream, allowed {allowed:.2g}:")
        lines.append(f"{'after':22}" + "".join(f"{column:>15}" for column in columns))
        for row in numerics["stages"]:
            mark = "  <- stands out" if row["stage"] == numerics["first"] else ""
            values = "".join(f"{row[column]:15.2e}" for column in columns)
            lines.append(f"{row['stage']:22}{values}{mark}")
    lines.append("all agree" if report["agree"] else "engine and trainer differ")
    return "\n".join(lines)
