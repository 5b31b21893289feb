"""The model card of an exported model: what it was made of, how, and what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from hybridrl import __version__
from hybridrl.config.load import to_yaml
from hybridrl.config.schema import Config
from hybridrl.metrics.estimates import Estimate
from hybridrl.metrics.values import STDERR, VALIDATION
from hybridrl.training.model import ParallelModel


def model_card(
    config: Config,
    model: ParallelModel,
    checkpoint: str,
    evaluations: Mapping[str, Mapping[str, float]],
) -> str:
    """Returns the text of an exported model's README.md, as the hub reads it.

    Values that came from the environment stand as they were written, so that no key is in it.

    Args:
        config: of the run.
        model: that is exported.
        checkpoint: its name, step_N.
        evaluations: what was measured, by step.
    """
    is_scorer = model.head == "value"
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if is_scorer else "text-generation",
        "tags": ["hybridrl", config.algorithm.name],
    }
    base = config.model.path
    # A folder of this host is no name that anybody could follow.
    if base is not None and not os.path.exists(os.path.expanduser(base)):
        front["base_model"] = base.split("@")[0]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {config.run.name}, {checkpoint.replace('_', ' ')}", ""]
    kind = "A reward model or critic (1 label)" if is_scorer else "A language model"
    made = f"trained by hybridrl {__version__} with `{config.algorithm.name}`"
    origin = "from initial weights" if base is None else f"from `{_shown(base)}`"
    lines += [f"{kind}, {made}, {origin}.", ""]
    # Responses are the policy's: they say nothing of a critic beside it.
    if evaluations and (not is_scorer or config.algorithm.name == "reward_model"):
        lines += ["## Measured", "", *_table(evaluations), ""]
    lines += ["## Configuration", "", "```yaml", to_yaml(config).rstrip(), "```", ""]
    return "\n".join(lines)


def _shown(base: str) -> str:
    return os.path.basename(os.path.normpath(base)) if os.path.exists(base) else base


def _table(evaluations: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yields a table of what was measured first and last, with standard errors."""
    steps = sorted(evaluations, key=int)
    first, last = evaluations[steps[0]], evaluations[steps[-1]]
    yield f"| | step {steps[0]} | step {steps[-1]} |"
    yield "| --- | --- | --- |"
    for name in (key for key in last if not key.endswith(STDERR)):
        cells = [_estimate(found, name) for found in (first, last)]
        yield f"| {name.replace(VALIDATION, 'held-out ')} | {' | '.join(cells)} |"


def _estimate(found: Mapping[str, float], name: str) -> str:
    return str(Estimate(found[name], found.get(name + STDERR))) if name in found else ""
