"""What `hybridrl eval` evaluates, and its result as text for people. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config.load import load_config, load_config_dict
from hybridrl.config.schema import Config
from hybridrl.metrics.estimates import Estimate

TOLD = "rollout.temperature="
OWN = "held-out prompts"
COLUMNS = ("", "prompts", "samples", "accuracy")


def evaluated_config(source: Path, overrides: Sequence[str]) -> Config:
    """Returns the configuration of an evaluation.

    Args:
        source: a run's YAML, or an HF directory, which is evaluated without a run.
        overrides: `key=value` texts; a `rollout.temperature` among them is that of the evaluation.

    Raises:
        UserError: as of `load_config`.
    """
    if os.path.isdir(source):
        # A run needs a name and a folder. Nothing is there, and an evaluation writes nothing.
        content = {
            "run": {"name": "evaluation", "dir": str(source)},
            "model": {"path": str(source)},
            "algorithm": {"name": "sft"},
        }
        config = load_config_dict(content, overrides)
    else:
        config = load_config(source, overrides)
    if any(override.startswith(TOLD) for override in overrides):
        section = config.eval.model_copy(update={"temperature": config.rollout.temperature})
        config = config.model_copy(update={"eval": section})
    return config


def evaluation_text(result: Mapping[str, Any]) -> str:
    """Returns an evaluation, as `Evaluation.as_json` has it, as lines for people: of the held-out
    prompts, and where there are sets or several samples a table of all.
    """
    lines = list(_own_lines(result)) if result["num_prompts"] else []
    if result["sets"] or result["samples_per_prompt"] > 1:
        lines += _table(result)
    return "\n".join([*lines, f"checkpoint {result['checkpoint']}"])


def _own_lines(result: Mapping[str, Any]) -> Iterator[str]:
    if result["accuracy"] is not None:
        accuracy = Estimate(result["accuracy"], result["accuracy_stderr"])
        yield f"accuracy {accuracy} on {result['num_prompts']} prompts"
    else:
        yield f"no accuracy: {result['note']}"
    if result["accuracy"] != result["reward"]:
        parts = ", ".join(f"{name} {score:.4f}" for name, score in result["scores"].items())
        yield f"reward {result['reward']:.4f} ({parts})"
    asked = result["num_prompts"] * result["samples_per_prompt"]
    if result["num_scored"] < asked:
        yield f"of {asked} responses {result['num_scored']} have a score"


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table with a row for each set."""
    own = {OWN: result} if result["num_prompts"] else {}
    sets: dict[str, Mapping[str, Any]] = {**own, **result["sets"]}
    ks = sorted({int(k) for one in sets.values() for k in one["pass_at"]})
    has_majority = any(one["majority"] is not None for one in sets.values())
    head = [*COLUMNS, *(f"pass@{k}" for k in ks), *["majority"] * has_majority, "failed"]
    rows = [head]
    for name, one in sets.items():
        accuracy = one["accuracy"], one["accuracy_stderr"]
        row = [name, str(one["num_prompts"]), str(one["samples_per_prompt"]), _shown(accuracy)]
        row += [_shown(one["pass_at"].get(str(k))) for k in ks]
        row += [_shown(one["majority"])] * has_majority
        rows.append([*row, str(one["num_errors"] or "")])
    if all(row[-1] == "" for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first, *others]).rstrip()


def _shown(value: Any) -> str:
    """Returns an estimate as text, be it a pair or as JSON has it; - where there is none."""
    pair = tuple(value.values()) if isinstance(value, Mapping) else value
    return "-" if pair is None or pair[0] is None else str(Estimate(*pair))
