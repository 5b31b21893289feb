"""Joins what the runs under runs/ have learned on so many GPUs into OUT/result_Ngpu.json.

    python examples/arithmetic_gpu/result.py OUT 4

Exits with 1 unless every run of reinforcement learning that there is began below 0.4 and ended
above 0.9; without any it says nothing of learning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PARTS = ("sft", "grpo", "ppo")
FROM_BELOW, TO_ABOVE = 0.4, 0.9


def learned(folder: Path) -> dict[str, Any]:
    """Returns what a run's files say of it: its accuracies by step, and its time."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curve = {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r}
    step_s = sorted(record["time_s/step"] for record in records)[len(records) // 2]
    found = {"steps": records[-1]["step"], "median_step_s": step_s, "accuracy_by_step": curve}
    return {**summary, **found}


def main() -> int:
    """Writes the file; returns 0 if the model has learned."""
    out, world = Path(sys.argv[1]), sys.argv[2]
    folders = {part: Path(f"runs/arithmetic-{part}-{world}gpu") for part in PARTS}
    runs = {p: learned(f) for p, f in folders.items() if (f / "summary.json").exists()}
    has_learned = all(
        run["accuracy_before"] < FROM_BELOW and run["accuracy_after"] > TO_ABOVE
        for part, run in runs.items()
        if part != "sft"
    )
    result = {"world": int(world), "has_learned": has_learned, "runs": runs}
    (out / f"result_{world}gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    for part, run in runs.items():
        accuracy = f"{run['accuracy_before']:.3f} -> {run['accuracy_after']:.3f}"
        print(f"{part:5} {accuracy} in {run['steps']} steps, {run['seconds']:.0f} s")
    return 0 if has_learned else 1


if __name__ == "__main__":
    sys.exit(main())
