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
VALIDATION = "validation/"  # begins what a run keeps of held-out rows with responses, by step
STDERR = "_stderr"  # ending of the name of a metric's standard error
GENERATED_TOKENS = (
    "generate/tokens"  # prompts, responses, observations; also of samples not trained on
)
SKIPPED = "train/skipped_steps"  # optimizer steps, not taken for a loss or gradient not finite


def is_maximum(name: str) -> bool:
    """Whether parts of the metric combine by their largest; all others are means."""
    return name.endswith("_max")


def average(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of equal parts of a step (its updates) or of several steps: counts add
    up.

    A metric that some parts lack is combined over the parts that have it.
    """
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {
        name: max(values) if is_maximum(name) else sum(values) / _share(name, values)
        for name, values in found.items()
    }


def _share(name: str, values: Sequence[float]) -> int:
    return 1 if name == SKIPPED else len(values)


def largest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest of each value over ranks, all of which have it."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def rank_spread(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the seconds of the fastest of several ranks in each phase, `time_min_s/PHASE`, and
    the number of the slowest, `slowest_rank/PHASE`; nothing of a single rank.

    Args:
        seconds: of each rank by phase, all the same phases.
    """
    found: dict[str, float] = {}
    for phase in seconds[0] if len(seconds) > 1 else ():
        times = [rank[phase] for rank in seconds]
        found[f"time_min_s/{phase}"] = min(times)
        found[f"slowest_rank/{phase}"] = float(times.index(max(times)))
    return found


def recent_mean(records: Sequence[Mapping[str, float | None]], name: str, count: int = 10) -> float:
    """Returns the mean of `name` over the last `count` records that have it; NaN if none has."""
    values = [value for record in records if (value := record.get(name)) is not None][-count:]
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
    """Returns the metrics of a step: `values` and what follows from its times and sizes.

    Args:
        values: by name, as in STEP_KEYS.
        seconds: of each phase and, as "step", of the whole step; a phase that did not run counts 0.
        num_tokens: prompt and response tokens that the whole step took in or generated, all ranks
            together.
        world_size: number of ranks, each a GPU (or a process on CPU).
        peak_bytes: largest memory in use on any rank, as "run" in all of the run and, where that is
            known, in each phase.
        flops: model FLOPs of each phase that has any, all ranks together (flops.py).
        peak_flops_per_s: of a rank's GPU in dense bf16, whatever the run computes in; None: not
            known, and then there is no `mfu/*`, the share of it that model FLOPs make up.
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
