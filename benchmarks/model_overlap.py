"""Predicts what it gains to train on finished groups while the last responses are decoded, from
lengths of responses and from what both do to each other on one GPU. No GPU.

Lengths are those of bench_step.py's tailed workload. A step of the engine takes --base-ms and
--sample-ms for each sample; lookups and update together --train-s. By default these are of
Qwen2.5-7B with tensor parallel size 2 on two H200: a step of 12.18 s, 5.98 of them generation, 1.43
the reference's log-probabilities and 4.36 the update, the rest 0.41 (results/step_h200.json); the
same tokens at the rate of the full batch take 2.45 s.

    python benchmarks/model_overlap.py --out benchmarks/results/overlap_model.json

Training takes whole groups, whose rewards are compared, as soon as they fill a micro-batch. While
both run, decoding is `slowed` times slower, and training keeps a share of its rate; by the number
of samples that a replica decodes, measured with 7B layers on one H200. Left out: micro-batches
that are less full, and what Python's lock costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from case_record import command_of, commit
from step_case import response_lengths

PROMPTS, SAMPLES, LONGEST, PROMPT_TOKENS, REPLICAS = 32, 8, 1024, 256, 2
MICRO_BATCH_TOKENS = 16384
GOAL = 0.08
AT_MOST = (1.0, 0.25, 0.1)
# Samples that a GPU decodes.
BATCHES = (4, 16, 64, 128)


@dataclass(frozen=True)
class Sharing:
    """What decoding and training do to each other, by samples that are decoded (`BATCHES`).

    Args:
        slowed: how many times as long a step of decoding takes.
        kept: share of its rate that training keeps.
    """

    slowed: Sequence[float]
    kept: Sequence[float]

    def at(self, num: int) -> tuple[float, float]:
        """Returns both for so many samples."""
        place, places = np.log(max(num, 1)), np.log(BATCHES)
        return float(np.interp(place, places, self.slowed)), float(
            np.interp(place, places, self.kept)
        )


MEASURED = {
    "decoding at high priority": Sharing((3.2, 3.1, 2.6, 2.2), (0.86, 0.83, 0.73, 0.64)),
    "equal priorities": Sharing((6.9, 6.7, 5.6, 4.6), (0.92, 0.91, 0.88, 0.83)),
}


@dataclass(frozen=True)
class Step:
    """What a step takes, seconds or milliseconds.

    Args:
        base_ms, sample_ms: of a step of the engine.
        train_s: lookups and update.
        rest_s: what neither is.
    """

    base_ms: float
    sample_ms: float
    train_s: float
    rest_s: float

    def predict(self, sharing: Sharing, at_most: float) -> dict[str, float]:
        """Returns the seconds of a step, and what of it is done beside decoding.

        Args:
            at_most: share of the responses that may still be decoded when training begins.
        """
        workload = {"workload": "tailed", "prompts": PROMPTS, "samples": SAMPLES}
        lengths = np.array(response_lengths({**workload, "response_tokens": LONGEST}))
        lengths = lengths.reshape(PROMPTS, SAMPLES)
        work = (lengths + PROMPT_TOKENS).sum(1)
        # A micro-batch's share of the training, and the groups of each replica.
        full, replicas = MICRO_BATCH_TOKENS / work.sum(), np.arange(PROMPTS) % REPLICAS
        ready, ends = 0.0, lengths.max(1)
        now_s = alone_s = beside_s = trained_s = 0.0
        for taken in range(LONGEST):
            is_left = lengths > taken
            num = max(int(is_left[replicas == one].sum()) for one in range(REPLICAS))
            step_s = (self.base_ms + self.sample_ms * num) / 1e3
            alone_s += step_s
            whole = work[ends <= taken].sum() / work.sum()
            if is_left.mean() <= at_most and whole - ready >= full:
                ready = whole
            slowed, kept = sharing.at(num)
            shared_s = min(step_s * slowed, max(0.0, ready * self.train_s - trained_s) / kept)
            trained_s += shared_s * kept
            beside_s += shared_s
            now_s += shared_s + step_s - shared_s / slowed
        serial_s = alone_s + self.train_s + self.rest_s
        found_s = now_s + self.train_s - trained_s + self.rest_s
        return {
            "step_s": found_s,
            "gain": 1 - found_s / serial_s,
            "beside_s": beside_s,
            "trained_beside": trained_s / self.train_s,
            "decoded_s": now_s,
            "serial_s": serial_s,
        }

    def needed_sum(self, kept: float) -> float:
        """Returns the sum of the shares of their speeds that both must keep for the goal, if
        training keeps this one.
        """
        low, high = 1.0, 1.0 + kept
        for _ in range(40):
            middle = (low + high) / 2
            # Decoding keeps the rest of the sum.
            sharing = Sharing((1 / (middle - kept),) * 4, (kept,) * 4)
            low, high = (
                (low, middle) if self.predict(sharing, 1.0)["gain"] >= GOAL else (middle, high)
            )
        return high


def report_of(step: Step) -> dict[str, Any]:
    """Returns all predictions."""
    ways: dict[str, Mapping[str, Any]] = {
        f"{name}, at most {at_most:g} decoded": step.predict(sharing, at_most)
        for name, sharing in MEASURED.items()
        for at_most in AT_MOST
    }
    free = Sharing((1.0,) * 4, (1.0,) * 4)
    ways["neither slows the other"] = step.predict(free, 1.0)
    needed = {f"training keeps {kept:g}": step.needed_sum(kept) for kept in (0.64, 0.75, 0.86)}
    return {"ways": ways, f"sum_of_shares_for_{GOAL:.0%}": needed}


def main() -> int:
    """Writes the predictions."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n", 1)[0].split()))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-ms", type=float, default=5.33)
    parser.add_argument("--sample-ms", type=float, default=0.0113)
    parser.add_argument("--train-s", type=float, default=5.79)
    parser.add_argument("--rest-s", type=float, default=0.41)
    given = parser.parse_args()
    step = Step(given.base_ms, given.sample_ms, given.train_s, given.rest_s)
    found = report_of(step)
    for name, way in found["ways"].items():
        print(
            f"{name:46} {way['step_s']:6.2f} s of {way['serial_s']:.2f}: {100 * way['gain']:.1f}%"
        )
    print(found[f"sum_of_shares_for_{GOAL:.0%}"])
    report = {
        "benchmark": "model of training beside decoding",
        "command": command_of(sys.argv),
        "commit": commit(),
        "workload": {"prompts": PROMPTS, "samples": SAMPLES, "longest": LONGEST},
        **found,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
