"""Names of metrics in metrics.jsonl, rules to combine them, and the metrics that each step records.

Does not import torch or communicate; callers pass arguments that are already equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Record = dict[str, float | int | None]
"""One line of metrics.jsonl: `step`, and the metrics by name. None represents NaN or infinity."""

# Phases of a step in order, with the names that the console shows.
PHASES = {
    "generate": "gen",
    "reward": "reward",
    "logprobs": "logp",
    "advantages": "adv",
    "update": "update",
    "reshard": "reshard",
}
# Metrics that every step with rollouts records. Algorithms and evaluations add more metrics.
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
    "mismatch/share_above_0.1",
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
VALIDATION = "validation/"  # Prefix of metrics on held-out rows with responses.
STDERR = "_stderr"  # Suffix of the names of standard errors.
# Number of tokens in prompts, responses and observations, including samples that are not trained
# on.
GENERATED_TOKENS = "generate/tokens"
# Number of optimizer steps skipped because a loss or gradient was not finite.
SKIPPED = "train/skipped_steps"


def is_maximum(name: str) -> bool:
    """Whether a metric is combined by its maximum. All other metrics are averaged."""
    return name.endswith("_max")


def average(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines metrics of steps that have them; `train/skipped_steps` is summed."""
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
    """Returns the maximum of each value over ranks. The names must be the same on all ranks."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def rank_spread(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns `time_min_s/PHASE` of the fastest rank and `slowest_rank/PHASE`; {} for one rank."""
    found: dict[str, float] = {}
    for phase in seconds[0] if len(seconds) > 1 else ():
        times = [rank[phase] for rank in seconds]
        found[f"time_min_s/{phase}"] = min(times)
        found[f"slowest_rank/{phase}"] = float(times.index(max(times)))
    return found


def recent_mean(records: Sequence[Mapping[str, float | None]], name: str) -> float:
    """Returns the mean of `name` over the last 10 records that contain it; NaN if none does."""
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
    """Returns the metrics of a step: `values`, and more from times, tokens, memory and FLOPs.

    Args:
        seconds: Seconds in each phase and, as "step", in the whole step; 0 without an entry.
        num_tokens: Prompt and response tokens that the step read or generated, on all ranks.
        peak_bytes: Peak memory of the fullest rank, as "run" and, if known, for each phase.
        peak_flops_per_s: Dense bf16 peak rate of a rank's GPU, whatever type the run computes in.
            If None, the result lacks `mfu/*`, the fraction of it that model FLOPs reach.
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
