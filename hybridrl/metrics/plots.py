"""The figures of the report's page, as SVG: curves over steps, and a step's time by phase.

One run, or several over each other. A step whose value is not finite leaves a gap; a step that has
no such value (accuracy is measured now and then) is passed over. Imports no torch.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybridrl.metrics.values import ACCURACY, PHASES, SKIPPED, Record

Runs = Mapping[str, Sequence[Record]]
"""The records of each run, by the run's label."""

STYLES = ("-", "--", ":", "-.")  # of runs, where colours tell metrics apart
FEW_POINTS = 40  # up to so many, each is marked
MOST_INSIDE = 5  # lines that a legend inside the axes may name
REST = "rest"


@dataclass(frozen=True)
class Plot:
    """A figure of the page.

    Args:
        title: of the figure.
        metrics: the metrics it shows, by what the legend calls them.
        unit: what the vertical axis counts.
        is_log: whether that axis is logarithmic, where all values are positive.
        starts_at_zero: whether that axis begins at 0.
        needs_others_than_zero: whether there is nothing to show where all values are 0.
    """

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    is_log: bool = False
    starts_at_zero: bool = False
    needs_others_than_zero: bool = False

    def of(self, runs: Runs) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """Returns the points of the metrics that there are, by metric and run."""
        found = {
            label: {run: points(records, name) for run, records in runs.items()}
            for label, name in self.metrics.items()
        }
        return {
            label: lines
            for label, lines in found.items()
            if any(
                math.isfinite(value) and (value or not self.needs_others_than_zero)
                for line in lines.values()
                for _, value in line
            )
        }


def _by_phase(prefix: str, phases: Iterable[str]) -> dict[str, str]:
    return {phase: f"{prefix}/{phase}" for phase in phases}


WORK = ("generate", "logprobs", "update")
PLOTS = (
    Plot("Reward", {"mean": "reward/mean", "std": "reward/std"}),
    Plot("Accuracy on held-out prompts", {"accuracy": ACCURACY}),
    Plot("Policy loss", {"loss": "policy/loss"}),
    # Without a reference it is 0.
    Plot("KL", {"KL": "policy/kl"}, "nats", needs_others_than_zero=True),
    Plot(
        "KL of policy and teacher",
        {"reverse": "teacher/reverse_kl", "forward": "teacher/forward_kl"},
        "nats",
    ),
    Plot("Entropy", {"entropy": "policy/entropy"}, "nats"),
    Plot("Gradient norm", {"norm": "policy/grad_norm"}),
    Plot("Tokens of the busiest expert, as a multiple of the mean", {"load": "moe/max_load"}),
    Plot("Experts without a token", {"experts": "moe/unused_experts"}),
    Plot("Entropy of routing", {"entropy": "moe/routing_entropy"}, "nats"),
    Plot(
        "Experts of the engine in the update",
        {"replayed": "router/replayed_share", "the trainer's too": "router/agreed_share"},
        "share",
    ),
    Plot("Loss on held-out rows", {"loss": "eval/loss"}, "nats"),
    Plot("Perplexity on held-out rows", {"perplexity": "eval/perplexity"}, is_log=True),
    Plot("Response length", {"mean": "response_tokens/mean"}, "tokens"),
    Plot("Age of the weights that sampled", {"mean": "lag/mean", "largest": "lag/max"}, "steps"),
    Plot("Samples of several versions", {"share": "lag/mixed_share"}, "share"),
    Plot(
        "Waits of ranks that train, and of those that generate",
        {"for samples": "idle/training", "for weights": "idle/rollout"},
        "share",
    ),
    Plot("Samples thrown away", {"samples": "lag/dropped"}, needs_others_than_zero=True),
    Plot(
        "Log-probability difference, engine and trainer",
        {"mean": "mismatch/logprob_diff_mean", "largest": "mismatch/logprob_diff_max"},
        "nats",
        is_log=True,
    ),
    Plot("KL of the trainer from the engine", {"KL": "mismatch/kl"}, "nats"),
    Plot("Correlation of engine and trainer", {"Pearson's": "mismatch/correlation"}),
    Plot(
        "Throughput",
        {"rate": "throughput/tokens_per_s_per_gpu"},
        "tokens / s / GPU",
        starts_at_zero=True,
    ),
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
    ),
    Plot("Skipped optimizer steps", {"skipped": SKIPPED}, needs_others_than_zero=True),
)
MOST_LAYERS = 8
BY_LAYER = (
    ("Load of the busiest expert, by layer", "moe/max_load", "multiple of the mean"),
    ("Entropy of routing, by layer", "moe/routing_entropy", "nats"),
)
OF_MODELS = {"policy/loss", "critic/loss", "eval/loss"}
TIMES = "Time of a step"


def points(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of every record that has the metric; NaN where it is not finite."""
    values = [(int(r["step"] or 0), r[name]) for r in records if name in r]
    return [
        (step, float(value) if value is not None and math.isfinite(value) else math.nan)
        for step, value in values
    ]


def figures(runs: Runs) -> list[tuple[str, bytes]]:
    """Returns the title and the SVG of every figure that has something to show."""
    # Between two dollar signs of a run's name matplotlib would read a formula.
    runs = {run.replace("$", r"\$"): records for run, records in runs.items()}
    by_layer = [_by_layer(runs, title, name, unit) for title, name, unit in BY_LAYER]
    plots = (*PLOTS, *by_layer, _losses_of_terms(runs))
    found = [(p.title, _lines(p, lines)) for p in plots if (lines := p.of(runs))]
    stacks = {run: stack for run, records in runs.items() if (stack := _stack(records))}
    return [*found, (TIMES, _stacks(stacks))] if stacks else found


def _by_layer(runs: Runs, title: str, name: str, unit: str) -> Plot:
    """Returns the plot of a metric that layers have, of at most MOST_LAYERS of them, evenly spread
    from the first to the last.
    """
    prefix = f"{name}/layer_"
    names = {key for records in runs.values() for record in records for key in record}
    layers = sorted(int(key.removeprefix(prefix)) for key in names if key.startswith(prefix))
    if len(layers) > MOST_LAYERS:
        last = len(layers) - 1
        layers = [layers[round(i * last / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]
    return Plot(title, {f"layer {layer}": f"{prefix}{layer}" for layer in layers}, unit)


def _losses_of_terms(runs: Runs) -> Plot:
    names = {name for records in runs.values() for record in records for name in record}
    found = sorted(name for name in names - OF_MODELS if name.endswith("/loss"))
    return Plot("Losses of further terms", {name.removesuffix("/loss"): name for name in found})


def _lines(plot: Plot, lines: Mapping[str, Mapping[str, list[tuple[int, float]]]]) -> bytes:
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for metric, (label, by_run) in enumerate(lines.items()):
        for number, (run, line) in enumerate(by_run.items()):
            if not line:
                continue
            is_alone = len(lines) == 1
            names = [] if is_alone and len(by_run) > 1 else [label]
            names += [run] if len(by_run) > 1 else []
            steps, values = zip(*line, strict=True)
            is_short = len(line) <= FEW_POINTS
            axes.plot(
                steps,
                values,
                label=", ".join(names),
                color=f"C{number if is_alone else metric}",
                linestyle="-" if is_alone else STYLES[number],
                marker=".",
                markevery=None if is_short else _lone(values),
            )
    heights = [v for by_run in lines.values() for line in by_run.values() for _, v in line]
    if plot.is_log and all(value > 0 or math.isnan(value) for value in heights):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if plot.starts_at_zero:
        axes.set_ylim(bottom=0, top=None if any(value > 0 for value in heights) else 1)
    _finish(axes, plot.title, plot.unit)
    if len(axes.lines) > MOST_INSIDE:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="x-small")
    elif len(axes.lines) > 1 or len(plot.metrics) > 1:
        axes.legend(loc="best", fontsize="small")
    return _svg(figure)


def _lone(values: Sequence[float]) -> list[int]:
    """Returns where values stand between gaps, which no line shows."""
    has_line = [
        not (math.isnan(one) or math.isnan(other))
        for one, other in zip(values, values[1:], strict=False)
    ]
    beside = zip([False, *has_line], [*has_line, False], strict=True)
    return [i for i, sides in enumerate(beside) if not any(sides) and not math.isnan(values[i])]


def _stack(records: Sequence[Record]) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the steps and, by phase, the seconds of each; nothing if no phase was timed."""
    names = _by_phase("time_s", PHASES)
    rows = [r for r in records if any(r.get(name) is not None for name in names.values())]
    if not rows:
        return ()  # type: ignore[return-value]
    heights = {phase: [float(r.get(name) or 0) for r in rows] for phase, name in names.items()}
    wholes = [float(r.get("time_s/step") or 0) for r in rows]
    sums = [sum(parts) for parts in zip(*heights.values(), strict=True)]
    heights[REST] = [max(0.0, whole - s) for whole, s in zip(wholes, sums, strict=True)]
    steps = [float(r["step"] or 0) for r in rows]
    if len(rows) == 1:  # a stack has an area only between two places
        steps = [steps[0] - 0.5, steps[0] + 0.5]
        heights = {phase: seconds * 2 for phase, seconds in heights.items()}
    return steps, heights


def _stacks(stacks: Mapping[str, tuple[list[float], dict[str, list[float]]]]) -> bytes:
    figure = Figure(figsize=(6.4 * len(stacks), 3.2), layout="constrained")
    panels = figure.subplots(1, len(stacks), squeeze=False, sharey=True)[0]
    for axes, (run, (steps, heights)) in zip(panels, stacks.items(), strict=True):
        colors = [f"C{number}" for number in range(len(PHASES))] + ["#bbbbbb"]
        areas = axes.stackplot(steps, list(heights.values()), labels=list(heights), colors=colors)
        _finish(axes, f"{TIMES}: {run}" if len(stacks) > 1 else TIMES, "seconds")
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    # In the order of the layers, the highest first.
    labels = list(heights)[::-1]
    panels[-1].legend(
        areas[::-1], labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small"
    )
    return _svg(figure)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
