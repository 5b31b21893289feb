"""Joins what the runs under runs/ have learned on so many GPUs into OUT/result_Ngpu.json, and draws
it as OUT/result_Ngpu.png.

    python examples/arithmetic_gpu/result.py OUT 4

Exits with 1 unless every run of reinforcement learning that there is began below 0.4 and ended
above 0.9; without any it says nothing of learning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PARTS = ("sft", "grpo", "ppo")
ACCURACY, REWARD = "eval/accuracy", "reward/mean"
FROM_BELOW, TO_ABOVE = 0.4, 0.9


def learned(folder: Path) -> dict[str, Any]:
    """Returns what a run's files say of it: its accuracies by step, and its time."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curves = {
        "accuracy_by_step": {r["step"]: r[ACCURACY] for r in records if ACCURACY in r},
        "reward_by_step": {r["step"]: r[REWARD] for r in records if REWARD in r},
    }
    step_s = sorted(record["time_s/step"] for record in records)[len(records) // 2]
    return {**summary, "steps": records[-1]["step"], "median_step_s": step_s, **curves}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws accuracy on held-out prompts and mean reward of the runs over their steps."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "accuracy_by_step": "Accuracy on held-out sums, greedy",
        "reward_by_step": "Mean reward of sampled responses",
    }
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for goal in (FROM_BELOW, TO_ABOVE):
            axes.axhline(goal, color="#999999", linestyle=":")
        for part, run in runs.items():
            if curve := run[name]:
                color = f"C{PARTS.index(part)}"
                axes.plot(list(curve), list(curve.values()), color=color, label=part.upper())
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        if len(axes.lines) > 2:  # beside the goals
            axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


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
    draw(runs, out / f"result_{world}gpu.png")
    for part, run in runs.items():
        accuracy = f"{run['accuracy_before']:.3f} -> {run['accuracy_after']:.3f}"
        print(f"{part:5} {accuracy} in {run['steps']} steps, {run['seconds']:.0f} s")
    return 0 if has_learned else 1


if __name__ == "__main__":
    sys.exit(main())
