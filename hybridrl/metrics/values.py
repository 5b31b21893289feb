"""Names of a step's metrics in metrics.jsonl, rules to combine them, and the record of a step.

No torch and no communication: arguments are already equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Record = dict[str, float | int | None]
"""One line of metrics.jsonl: `step` and the metrics by name; None stands for NaN and infinity."""

# Phases of a step in order, with their names on the console.
PHASES = {
    "generate": "gen",
    "reward": "reward",
    "logprobs": "logp",
    "advantages": "adv",
    "update": "update",
    "reshard": "reshard",
}
# Metrics of every step with rollouts; algorithms and evaluations add more.
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
    "train/skipped_steps",
    *(f"time_s/{phase}" for phase in (*PHASES, "step")),
    *(f"time_share/{phase}" for phase in PHASES),
    *(f"flops/{phase}" for phase in ("generate", "logprobs", "update", "step")),
    "throughput/tokens_per_s_per_gpu",
    "reshard/received_bytes",
    "reshard/gb_per_s",
    "memory/peak_gib",
)
ACCURACY = "eval/accuracy"
VALIDATION = "validation/"  # prefix of a run's results on held-out rows with responses
STDERR = "_stderr"  # suffix of the name of a metric's standard error
# Tokens of prompts, responses and observations, including samples that are not trained on.
GENERATED_TOKENS = "generate/tokens"
# Optimizer steps skipped because the loss or gradient was not finite.
SKIPPED = "train/skipped_steps"


def is_maximum(name: str) -> bool:
    """Whether parts of the metric combine by their maximum; all others combine by their mean."""
    return name.endswith("_max")


def average(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of equal parts of a step (its updates) or of several steps.

    `train/skipped_steps` is added up. A metric that some parts lack is combined over the others.
    """
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    combined = {}
    for name, values in found.items():
        divisor = 1 if name == SKIPPED else len(values)
        combined[name] = max(values) if is_maximum(name) else sum(values) / divisor
    return combined


def largest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the maximum of each value over ranks, which have the same names."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def rank_spread(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the seconds of the fastest rank in each phase, `time_min_s/PHASE`, and the number of
    the slowest, `slowest_rank/PHASE`. Returns {} for a single rank.

    Args:
        seconds: Seconds by phase for each rank; all have the same phases.
    """
    found: dict[str, float] = {}
    for phase in seconds[0] if len(seconds) > 1 else ():
        times = [rank[phase] for rank in seconds]
        found[f"time_min_s/{phase}"] = min(times)
        found[f"slowest_rank/{phase}"] = float(times.index(max(times)))
    return found


def recent_mean(records: Sequence[Mapping[str, float | None]], name: str) -> float:
    """Returns the mean of `name` over the last 10 records that have it; NaN if none has."""
    values = [value for record in records if (value := record.get(name)) is not None][-10:]
    return sum(values) / len(values) if values else float("nan")


def step_metrics(
    values: Mapping[str, float],
    seconds: Mapping[str, float],
    num_tokens: int,
    world_size: int,
    peak_bytes: Mapping[str, int],
    flops: Mapping[str, int],
    peak_flops_per_s: float | None = None,
) -> dict[str, float]:
    """Returns the metrics of a step: `values`, and those that follow from its times and sizes.

    Args:
        values: Metrics by name, as in STEP_KEYS.
        seconds: Seconds of each phase and, as "step", of the whole step; a missing phase counts 0.
        num_tokens: Number of prompt and response tokens that the step read or generated, on all
            ranks.
        world_size: Number of ranks, each a GPU (or a process on CPU).
        peak_bytes: Largest memory in use on any rank: "run" for the whole run and, if known, for
            each phase.
        flops: Model FLOPs by phase, summed over ranks (flops.py).
        peak_flops_per_s: Dense bf16 peak of a rank's GPU, in whatever type the run computes. None
            if unknown; then there is no `mfu/*`, the share of model FLOPs in this peak.
    """
    times = {**dict.fromkeys(PHASES, 0.0), **seconds}
    counts = {"generate": 0, "logprobs": 0, "update": 0, **flops}
    counts["step"] = sum(counts.values())
    step_s = max(seconds["step"], 1e-9)
    in_phases = {phase: size for phase, size in peak_bytes.items() if phase != "run"}
    return {
        **values,
        **{f"time_s/{phase}": taken for phase, taken in times.items()},
        **{f"time_share/{phase}": times[phase] / step_s for phase in PHASES},
        **{f"flops/{phase}": float(count) for phase, count in counts.items()},
        **{
            f"mfu/{phase}": count / times[phase] / world_size / peak_flops_per_s
            for phase, count in counts.items()
            if peak_flops_per_s and count and times[phase] > 0
        },
        "throughput/tokens_per_s_per_gpu": num_tokens / step_s / world_size,
        "memory/peak_gib": peak_bytes["run"] / 2**30,
        **{f"memory/peak_gib/{phase}": size / 2**30 for phase, size in in_phases.items()},
    }
