"""The numbers of a step: their names in metrics.jsonl, how parts combine, and the record of a step.

Torch-free and without communication: what comes in is already the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Record = dict[str, float | int | None]
"""One line of metrics.jsonl: `step` and the metrics by name; None is a non-finite number."""

# Phases of a step, in order, with what the console calls them.
PHASES = {
    "generate": "gen",
    "reward": "reward",
    "logprobs": "logp",
    "advantages": "adv",
    "update": "update",
    "reshard": "reshard",
}
# What every record of a step with rollouts has; algorithms and evaluations add more.
STEP_KEYS = (
    "reward/mean",
    "reward/std",
    "response_tokens/mean",
    "policy/loss",
    "policy/kl",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "policy/learning_rate",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
    "mismatch/kl",
    "mismatch/correlation",
    *(f"time_s/{phase}" for phase in (*PHASES, "step")),
    "throughput/tokens_per_s_per_gpu",
    "reshard/received_bytes",
    "reshard/gb_per_s",
    "memory/peak_gib",
)
ACCURACY = "eval/accuracy"


def is_maximum(name: str) -> bool:
    """Whether parts of the metric combine by their largest; all others are means."""
    return name.endswith("_max")


def average(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of equal parts of a step (its updates) or of several steps.

    A metric that some parts lack is combined over the parts that have it.
    """
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {
        name: max(values) if is_maximum(name) else sum(values) / len(values)
        for name, values in found.items()
    }


def recent_mean(records: Sequence[Mapping[str, float | None]], name: str, count: int = 10) -> float:
    """Returns the mean of `name` over the last `count` records that have it; NaN if none has."""
    values = [value for record in records if (value := record.get(name)) is not None][-count:]
    return sum(values) / len(values) if values else float("nan")


def step_metrics(
    values: Mapping[str, float],
    seconds: Mapping[str, float],
    num_tokens: int,
    world_size: int,
    peak_bytes: int,
) -> dict[str, float]:
    """Returns the metrics of a step: `values` and what follows from its times and sizes.

    Args:
        values: by name, as in STEP_KEYS.
        seconds: of each phase and, as "step", of the whole step; a phase that did not run counts 0.
        num_tokens: prompt and response tokens of the whole step, all ranks together.
        world_size: number of ranks, each a GPU (or a process on CPU).
        peak_bytes: largest memory in use on any rank.
    """
    times = {**dict.fromkeys(PHASES, 0.0), **seconds}
    step_s = seconds["step"]
    return {
        **values,
        **{f"time_s/{phase}": taken for phase, taken in times.items()},
        "throughput/tokens_per_s_per_gpu": num_tokens / step_s / world_size if step_s > 0 else 0.0,
        "memory/peak_gib": peak_bytes / 2**30,
    }
