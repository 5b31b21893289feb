"""`hybridrl train CONFIG --replay FILE`: what it prints. No torch; step_replay.py computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hybridrl.errors import UserError

PROMPT_LETTERS = 60


def refuse_missing(file: Path) -> None:
    """Refuses a file that is not there, before any rank starts.

    Raises:
        UserError: naming it.
    """
    if not os.path.isfile(file):
        raise UserError(
            "--replay", file, "a file of a run's replay folder", "Check the path of the file."
        )


def replay_text(report: dict[str, Any]) -> str:
    """Returns the report as lines for people."""
    weights = report["checkpoint"] or "the initial weights"
    counts = {"steps": report["num_steps_between"], "optimizer steps": report["update"]}
    ages = [f"{count} {what}" for what, count in counts.items() if count]
    older = f"{' and '.join(ages)} older than the skipped one's"
    how = older if ages else "those of that step"
    lines = [
        f"step {report['step']}, optimizer step {report['update']}, skipped in the run because "
        f"{report['saved_reason']}",
        f"weights: {weights}, {how}",
    ]
    if report["changed"]:
        lines.append(f"other than in the run: {', '.join(report['changed'])}")
    for name in report.get("terms_left_out", ()):
        lines.append(f"left out: the term {name}, which the configuration has no more")
    if not report["has_random_states"]:
        lines.append("random states: others than in the run, which had another world or device")
    for name, told in report["models"].items():
        norm = f"gradient norm {told['grad_norm']:.6g}"
        if "loss_of" in told:
            norm = f"a term of the loss of {told['loss_of']}, whose norm is that of all together"
        lines.append(f"{name}: loss {told['loss']:.6g}, {norm}")
        for micro in told["micro_batches"]:
            mark = "  <- not finite" if micro["is_bad"] else ""
            lines.append(
                f"  rank {micro['rank']} micro-batch {micro['micro_batch']}: loss "
                f"{micro['loss']:.6g}, {len(micro['rows'])} rows{mark}"
            )
        if told["parameter"] and "loss_of" not in told:
            lines.append(f"  first gradient that is not finite: {told['parameter']}")
        for row in told["rows"]:
            lines.append(
                f"  row {row['row']} (sample {row['sample']}, {row['num_prompt_tokens']} + "
                f"{row['num_response_tokens']} tokens, reward {row['reward']:.6g}): loss "
                f"{row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}; prompt "
                f"{row['prompt'][:PROMPT_LETTERS]!r}"
            )
    if report["is_finite"]:
        lines.append("finite: the batch alone does not do it with these weights and knobs")
    else:
        lines.append(f"not finite again: {report['cause']}")
        if not any(told["rows"] for told in report["models"].values()):
            lines.append("no row does it alone")
    return "\n".join(lines)
