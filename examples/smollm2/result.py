"""Collects the measurements of run.sh in OUT/result.json and prints them.

    python examples/smollm2/result.py OUT SECONDS

Exits with 1 unless accuracy on held-out word sums rose from below 0.2 to above 0.6, and hybridrl
and transformers measure nearly the same accuracy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FROM_BELOW, TO_ABOVE = 0.2, 0.6
# Largest difference between both accuracies of one model. vLLM and transformers sum in different
# orders, which in bf16 occasionally changes the likeliest token. 0.03 is 8 of 256 responses; in
# float32 no response differed.
LARGEST_GAP = 0.03


def main() -> int:
    """Writes OUT/result.json; returns 0 if the model has learned and both measurements agree."""
    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    before, after, other = (
        json.loads((out / f"{name}.json").read_text())
        for name in ("before", "after", "transformers")
    )
    summary = json.loads((out / "smollm2-grpo" / "summary.json").read_text())
    gap = abs(after["accuracy"] - other["accuracy"])
    result: dict[str, Any] = {
        "accuracy_before": [before["accuracy"], before["accuracy_stderr"]],
        "accuracy_after": [after["accuracy"], after["accuracy_stderr"]],
        "accuracy_after_in_transformers": other["accuracy"],
        "instructions_before": before["sets"]["instructions"]["accuracy"],
        "instructions_after": after["sets"]["instructions"]["accuracy"],
        "num_prompts": after["num_prompts"],
        "seconds": seconds,
        "training": summary,
        "has_learned": before["accuracy"] < FROM_BELOW and after["accuracy"] > TO_ABOVE,
        "transformers_agrees": gap <= LARGEST_GAP,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"greedy accuracy on {after['num_prompts']} held-out word sums")
    print(
        f"  before, hybridrl       {before['accuracy']:.4f} ± {before['accuracy_stderr'] or 0:.4f}"
    )
    print(f"  after, hybridrl        {after['accuracy']:.4f} ± {after['accuracy_stderr'] or 0:.4f}")
    print(f"  after, transformers    {other['accuracy']:.4f}")
    print(f"all of it took {seconds:.0f} s, training {summary['seconds']:.0f} s")
    return 0 if result["has_learned"] and result["transformers_agrees"] else 1


if __name__ == "__main__":
    sys.exit(main())
