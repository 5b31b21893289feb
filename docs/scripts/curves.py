"""Draws docs/results/smollm2_lag.png: accuracy of SmolLM2 with lags of 0, 1 and 2, over samples and
over time. Needs the extra `pictures`.

    python docs/scripts/curves.py
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
SAMPLES_OF_A_STEP = 512
COLORS = {"lag0": "#3f51b5", "lag1": "#e07b39", "lag2": "#2e8b57"}


def main() -> None:
    """Writes the picture."""
    result = json.loads((ROOT / "benchmarks" / "results" / "learning_lag_h200.json").read_text())
    figure = Figure(figsize=(10, 4), layout="constrained")
    of_samples, of_time = figure.subplots(1, 2, sharey=True)
    for name, run in result["runs"].items():
        lag, seed = name.split("-")
        accuracies = list(run["accuracy_by_step"].values())
        samples = [SAMPLES_OF_A_STEP * int(step) for step in run["accuracy_by_step"]]
        look = {"color": COLORS[lag], "marker": "o", "markersize": 3}
        label = f"lag {lag.removeprefix('lag')}" if seed == "seed2" else None
        of_samples.plot(samples, accuracies, label=label, **look)
        of_time.plot(list(run["seconds_by_step"].values()), accuracies, **look)
    of_samples.set(xlabel="samples", ylabel="greedy accuracy, held-out word sums", ylim=(0, 0.8))
    of_time.set(xlabel="seconds of training (eleven runs on two H200)")
    of_samples.legend(loc="lower right")
    for axes in (of_samples, of_time):
        axes.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "results" / "smollm2_lag.png", dpi=120)


if __name__ == "__main__":
    main()
