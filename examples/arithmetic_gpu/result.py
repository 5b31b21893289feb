"""Collects the results of the runs under runs/ in OUT/result_Ngpu.json and OUT/result_Ngpu.png.

    python examples/arithmetic_gpu/result.py OUT 4
    python examples/arithmetic_gpu/result.py OUT 1 --moe

With --moe, the runs of the mixture of experts and the dense model's GRPO run, in
OUT/result_moe_Ngpu.*. The difference between engine and trainer is a median over a run's steps.
Exits with 1 unless the accuracy of every RL run rose from below 0.6 (0.7 with --moe, because its
warm-up is longer) to above 0.9. Runs start above the warm-up's target, because accuracy may rise by
0.2 between two evaluations.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PARTS = ("sft", "grpo", "ppo")
MOE_PARTS = ("moe-sft", "moe-grpo", "moe-replay", "grpo")
MISMATCH = (
    "mismatch/kl",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
    "router/agreed_share",
    "router/replayed_share",
    "moe/max_load",
    "moe/unused_experts",
)
ACCURACY, REWARD = "eval/accuracy", "reward/mean"
FROM_BELOW, MOE_FROM_BELOW, TO_ABOVE = 0.6, 0.7, 0.9


def learned(folder: Path) -> dict[str, Any]:
    """Returns the results in a run's files, including accuracy and reward by step."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curves = {
        "accuracy_by_step": {r["step"]: r[ACCURACY] for r in records if ACCURACY in r},
        "reward_by_step": {r["step"]: r[REWARD] for r in records if REWARD in r},
    }
    step_s = statistics.median(record["time_s/step"] for record in records)
    found = {key: [r[key] for r in records if key in r] for key in MISMATCH}
    medians = {key: statistics.median(values) for key, values in found.items() if values}
    told = {"median_step_s": step_s, "medians": medians}
    return {**summary, "steps": records[-1]["step"], **told, **curves}


def draw(runs: dict[str, dict[str, Any]], goals: tuple[float, float], path: Path) -> None:
    """Draws accuracy on held-out prompts and mean reward of the runs over their steps."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "accuracy_by_step": "Accuracy on held-out sums, greedy",
        "reward_by_step": "Mean reward of sampled responses",
    }
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for goal in goals:
            axes.axhline(goal, color="#999999", linestyle=":")
        for part, run in runs.items():
            if curve := run[name]:
                color = f"C{list(runs).index(part)}"
                axes.plot(list(curve), list(curve.values()), color=color, label=part.upper())
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        if len(axes.lines) > 2:  # lines in addition to the two goals
            axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> int:
    """Writes the results; returns 0 if all runs have learned."""
    out, world, is_moe = Path(sys.argv[1]), sys.argv[2], "--moe" in sys.argv
    parts, name = (MOE_PARTS, f"result_moe_{world}gpu") if is_moe else (PARTS, f"result_{world}gpu")
    folders = {part: Path(f"runs/arithmetic-{part}-{world}gpu") for part in parts}
    runs = {p: learned(f) for p, f in folders.items() if (f / "summary.json").exists()}
    from_below = MOE_FROM_BELOW if is_moe else FROM_BELOW
    rewarded = [run for part, run in runs.items() if not part.endswith("sft")]
    has_learned = bool(rewarded) and all(
        run["accuracy_before"] < from_below and run["accuracy_after"] > TO_ABOVE for run in rewarded
    )
    result = {"world": int(world), "has_learned": has_learned, "runs": runs}
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(runs, (from_below, TO_ABOVE), out / f"{name}.png")
    for part, run in runs.items():
        accuracy = f"{run['accuracy_before']:.3f} -> {run['accuracy_after']:.3f}"
        kl = run["medians"].get("mismatch/kl")
        apart = "" if kl is None else f", KL of engine and trainer {kl:.2e}"
        print(f"{part:10} {accuracy} in {run['steps']} steps, {run['seconds']:.0f} s{apart}")
    return 0 if has_learned else 1


if __name__ == "__main__":
    sys.exit(main())
