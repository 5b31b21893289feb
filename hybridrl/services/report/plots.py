"""Figures of the report's page: their metrics, titles and order.

A table, plus rows for the metrics that runs recorded (layers, terms, reward parts, environments).
The page draws the figures (page/page.js). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridrl.metrics.values import ACCURACY, PHASES, SKIPPED

Kind = Literal["lines", "stack"]


@dataclass(frozen=True)
class Plot:
    """A figure of the page.

    Args:
        title: Title of the figure.
        metrics: Metrics to show, by their names in the legend.
        unit: Unit of the vertical axis.
        is_log: Whether that axis is logarithmic at first; the reader can change it.
        starts_at_zero: Whether that axis begins at 0.
        needs_others_than_zero: Whether the figure is left out if all values are 0.
        kind: "lines", or "stack" for stacked areas, with one figure for each run.
        errors: Metric that is the standard error of a metric.
        levels: Name of further constant lines, by legend and run; filled in by `planned`.
        whole: Total of a stack; the part that the metrics leave is shown as "rest".
    """

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    is_log: bool = False
    starts_at_zero: bool = False
    needs_others_than_zero: bool = False
    kind: Kind = "lines"
    errors: Mapping[str, str] = field(default_factory=dict)
    levels: str = ""
    whole: str = ""

    def as_json(self, names: Collection[str]) -> dict[str, Any] | None:
        """Returns the figure with the metrics that runs have, as the page reads it, or None without
        any.
        """
        found = {label: name for label, name in self.metrics.items() if name in names}
        if not found:
            return None
        return {
            "title": self.title,
            "unit": self.unit,
            "kind": self.kind,
            "log": self.is_log,
            "zero": self.starts_at_zero,
            "nonzero": self.needs_others_than_zero,
            "levels": self.levels,
            "whole": self.whole,
            "series": [
                {"label": label, "metric": name, "error": self._error(name, names)}
                for label, name in found.items()
            ],
        }

    def _error(self, name: str, names: Collection[str]) -> str | None:
        error = self.errors.get(name)
        return error if error in names else None


def _by_phase(prefix: str, phases: Iterable[str]) -> dict[str, str]:
    return {phase: f"{prefix}/{phase}" for phase in phases}


WORK = ("generate", "logprobs", "update")
MEMORY = "memory"
LEARNING = (
    Plot("Reward", {"mean": "reward/mean", "std": "reward/std"}),
    Plot(
        "Accuracy on held-out prompts",
        {"accuracy": ACCURACY, "majority": "eval/majority"},
        errors={ACCURACY: f"{ACCURACY}_stderr", "eval/majority": "eval/majority_stderr"},
    ),
    Plot("Policy loss", {"loss": "policy/loss"}),
    # The KL is 0 without a reference.
    Plot("KL", {"KL": "policy/kl"}, "nats", needs_others_than_zero=True),
    Plot(
        "KL of policy and teacher",
        {"reverse": "teacher/reverse_kl", "forward": "teacher/forward_kl"},
        "nats",
    ),
    Plot("Entropy", {"entropy": "policy/entropy"}, "nats"),
    Plot("Gradient norm", {"policy": "policy/grad_norm", "critic": "critic/grad_norm"}),
    Plot("Learning rate", {"policy": "policy/learning_rate", "critic": "critic/learning_rate"}),
    Plot(
        "Tokens whose ratio was clipped",
        {"policy": "policy/clip_fraction", "critic": "critic/clip_fraction"},
        "share",
        starts_at_zero=True,
    ),
    Plot("Loss on held-out rows", {"loss": "eval/loss"}, "nats"),
    Plot("Perplexity on held-out rows", {"perplexity": "eval/perplexity"}, is_log=True),
    Plot("Skipped optimizer steps", {"skipped": SKIPPED}, needs_others_than_zero=True),
)
SAMPLING = (
    Plot("Response length", {"mean": "response_tokens/mean"}, "tokens"),
    Plot(
        "Responses cut off at the most tokens",
        {"share": "response_tokens/truncated"},
        "share",
        starts_at_zero=True,
    ),
    Plot(
        "Prompts whose advantages are all 0",
        {"share": "reward/uniform_groups"},
        "share",
        starts_at_zero=True,
    ),
    Plot("Age of the weights that sampled", {"mean": "lag/mean", "largest": "lag/max"}, "steps"),
    Plot("Samples of several versions", {"share": "lag/mixed_share"}, "share"),
    Plot(
        "Waits of ranks that train, and of those that generate",
        {"for samples": "idle/training", "for weights": "idle/rollout"},
        "share",
    ),
    Plot(
        "Samples under way for later steps",
        {"unfinished": "lag/unfinished", "finished": "lag/waiting"},
        "samples",
    ),
    Plot("Samples thrown away", {"samples": "lag/dropped"}, needs_others_than_zero=True),
)
AGREEMENT = (
    Plot(
        "Log-probability difference, engine and trainer",
        {"mean": "mismatch/logprob_diff_mean", "largest": "mismatch/logprob_diff_max"},
        "nats",
        is_log=True,
    ),
    Plot("KL of the trainer from the engine", {"KL": "mismatch/kl"}, "nats"),
    Plot("Correlation of engine and trainer", {"Pearson's": "mismatch/correlation"}),
)
ROUTING = (
    Plot("Tokens of the busiest expert, as a multiple of the mean", {"load": "moe/max_load"}),
    Plot("Experts without a token", {"experts": "moe/unused_experts"}),
    Plot("Entropy of routing", {"entropy": "moe/routing_entropy"}, "nats"),
    Plot(
        "Experts of the engine in the update",
        {"replayed": "router/replayed_share", "the trainer's too": "router/agreed_share"},
        "share",
    ),
)
TIMES = "Time of a step"
SPEED = (
    Plot(TIMES, _by_phase("time_s", PHASES), "seconds", kind="stack", whole="time_s/step"),
    Plot(
        "Slowest and fastest rank",
        {
            f"{phase}, {which}": f"{name}/{phase}"
            for phase in ("generate", "update")
            for which, name in (("slowest", "time_s"), ("fastest", "time_min_s"))
        },
        "seconds",
        starts_at_zero=True,
    ),
    Plot("Which rank is slowest", _by_phase("slowest_rank", ("generate", "update")), "rank"),
    Plot(
        "Throughput",
        {"rate": "throughput/tokens_per_s_per_gpu"},
        "tokens / s / GPU",
        starts_at_zero=True,
    ),
    Plot("Time that engines wait", {"share": "generate/idle_share"}, "share", starts_at_zero=True),
    Plot(
        "Model FLOPs, share of the GPUs' peak (MFU)",
        _by_phase("mfu", (*WORK, "step")),
        starts_at_zero=True,
    ),
    Plot(
        "Peak memory of the fullest rank",
        {**_by_phase("memory/peak_gib", (*WORK, "reshard")), "run so far": "memory/peak_gib"},
        "GiB",
        starts_at_zero=True,
        levels=MEMORY,
    ),
    Plot("Rate of the reshard", {"rate": "reshard/gb_per_s"}, "GB / s", starts_at_zero=True),
)
PLOTS = (*LEARNING, *SAMPLING, *AGREEMENT, *ROUTING, *SPEED)
MOST_LAYERS = 8
BY_LAYER = (
    ("Load of the busiest expert, by layer", "moe/max_load", "multiple of the mean"),
    ("Entropy of routing, by layer", "moe/routing_entropy", "nats"),
)
OF_MODELS = {"policy/loss", "critic/loss", "eval/loss"}
SPREAD = "slowest_rank/"
"""Prefix of metrics about the slowest rank; runs with one rank record none."""


def figures(names: Collection[str]) -> list[dict[str, Any]]:
    """Returns the groups of figures for these metrics, each with a title."""
    groups: dict[str, Sequence[Plot]] = {
        "Learning": (*LEARNING, _losses_of_terms(names)),
        "Evaluations": _evaluations(names),
        "Rewards and samples": (*_rewards(names), *SAMPLING, _lag(names)),
        "Environment": _environment(names),
        "Engine and trainer": AGREEMENT,
        "Routing": (*ROUTING, *(_by_layer(names, *row) for row in BY_LAYER)),
        "Speed and memory": _speed(names),
        "All other metrics": (),
    }
    shown = {name for plots in groups.values() for plot in plots for name in _names(plot)}
    groups["All other metrics"] = _others(names, shown)
    return [
        {"title": title, "plots": found}
        for title, plots in groups.items()
        if (found := [one for plot in plots if (one := plot.as_json(names))])
    ]


def _names(plot: Plot) -> set[str]:
    return {*plot.metrics.values(), *plot.errors.values(), plot.whole}


def _speed(names: Collection[str]) -> Sequence[Plot]:
    if any(name.startswith(SPREAD) for name in names):
        return SPEED
    return [plot for plot in SPEED if plot.title != "Slowest and fastest rank"]


def _by_layer(names: Collection[str], title: str, name: str, unit: str) -> Plot:
    """Returns the plot of a metric by layer, for at most MOST_LAYERS evenly spread layers."""
    prefix = f"{name}/layer_"
    layers = sorted(int(key.removeprefix(prefix)) for key in names if key.startswith(prefix))
    if len(layers) > MOST_LAYERS:
        last = len(layers) - 1
        layers = [layers[round(i * last / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]
    return Plot(title, {f"layer {layer}": f"{prefix}{layer}" for layer in layers}, unit)


def _losses_of_terms(names: Collection[str]) -> Plot:
    found = sorted(name for name in {*names} - OF_MODELS if name.endswith("/loss"))
    return Plot("Losses of further terms", {name.removesuffix("/loss"): name for name in found})


def _rewards(names: Collection[str]) -> list[Plot]:
    parts = [n for n in names if n.startswith("reward/") and n.count("/") > 1]
    means = sorted(n for n in parts if n.endswith("/mean"))
    middle = {name.removeprefix("reward/").removesuffix("/mean"): name for name in means}
    found = {n.removeprefix("reward/"): n for n in sorted(parts) if n not in means}
    return [
        Plot("Rewards by part", middle),
        Plot("Samples that a scorer noted", found, needs_others_than_zero=True),
    ]


def _lag(names: Collection[str]) -> Plot:
    prefix = "lag/token_share/"
    ages = sorted(int(n.removeprefix(prefix)) for n in names if n.startswith(prefix))
    found = {f"{age} step{'s' * (age != 1)}": f"{prefix}{age}" for age in ages}
    return Plot("Tokens by the age of their weights", found, "share", kind="stack")


def _environment(names: Collection[str]) -> list[Plot]:
    found = sorted(n.removeprefix("environment/") for n in names if n.startswith("environment/"))
    cut = {name.removeprefix("truncated_"): name for name in found if name.startswith("truncated_")}
    rest = {name: name for name in found if name not in cut.values() and name != "turns_mean"}

    def full(of: Mapping[str, str]) -> dict[str, str]:
        return {label: f"environment/{name}" for label, name in of.items()}

    return [
        Plot("Turns of a response", {"mean": "environment/turns_mean"}),
        Plot("Responses that were cut off, by what", full(cut), "share", starts_at_zero=True),
        Plot("What environments noted", full(rest), "responses"),
    ]


def _evaluations(names: Collection[str]) -> list[Plot]:
    """Returns a figure for each evaluation metric, over all sets, except the run's own accuracy."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        parts = name.split("/")
        if parts[0] != "eval" or name == ACCURACY or name.endswith("_stderr"):
            continue
        found.setdefault(parts[-1], {})["/".join(parts[1:-1]) or "held-out"] = name
    return [
        Plot(
            f"Evaluation: {what.replace('_', ' ')}",
            lines,
            errors={name: f"{name}_stderr" for name in lines.values()},
        )
        for what, lines in found.items()
        if what != "majority" or len(lines) > 1
    ]


def _others(names: Collection[str], shown: Collection[str]) -> list[Plot]:
    """Returns a figure for each metric that no other figure shows."""
    known = ("time_s/", "time_share/", "time_min_s/", SPREAD, "moe/", "eval/")
    rest = sorted(n for n in names if n not in shown and not n.startswith(known))
    return [Plot(name, {name.rpartition("/")[2]: name}) for name in rest]
