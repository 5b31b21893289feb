"""Writes docs/reference/knobs.md: every knob with its allowed values, default and commands.

Knobs, allowed values, defaults and reasons come from the schema. The table READERS here says on
which commands a knob acts; the longest prefix of a knob applies, and each knob must have one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from hybridrl.config.load import _algorithm_sections, _member
from hybridrl.config.presets import PRESETS
from hybridrl.config.schema import Config
from hybridrl.config.section import Section
from hybridrl.config.supervised import PAIR_PRESETS

PAGE = Path(__file__).parents[1] / "reference" / "knobs.md"
RANKS = "train, eval, bench, check"  # the commands that start ranks
ALL = f"plan, {RANKS}"
READERS = {
    "run": RANKS,
    "run.name": ALL,
    "run.dir": ALL,
    "run.profile": "train",
    "model": ALL,
    "lora": ALL,
    "train": ALL,
    **dict.fromkeys(
        (
            "train.moe",
            *(f"train.adam_{name}" for name in ("beta1", "beta2", "eps")),
            *(f"train.{name}" for name in ("learning_rate", "lr_schedule", "warmup_steps")),
            *(f"train.{name}" for name in ("min_learning_rate", "weight_decay", "clip_grad")),
            "train.max_skipped_steps",
            "train.muon_momentum",
            "train.critic_learning_rate",
        ),
        "train",
    ),
    "train.freeze": "plan, train, bench, check",
    "train.mtp_coef": "plan, train, bench, check",
    "rollout": ALL,
    "rollout.verify": "train",
    "numerics": ALL,
    "rollout.in_flight": "train",
    "rollout.at_lag_bound": "train",
    "algorithm": "plan, train, check",
    "mix": "plan, train",
    "data": "train, eval, check",
    "data.weights": "train",
    "data.response_key": "train",
    "data.chosen_key": "train",
    "data.rejected_key": "train",
    "data.margin_key": "train",
    "data.label_key": "train",
    "data.shuffle": "train",
    "data.eval_prompts": "train, eval",
    "data.eval_share": "train, eval",
    "data.eval_limit": "train, eval",
    "data.max_prompt_tokens": ALL,
    "reward": "train, eval",
    "environment": "train, eval",
    "agent": "train, eval",
    "eval": "train, eval",
    "steps": "train",
    "steps.prompts_per_step": "plan, train, bench, check",
    "steps.samples_per_prompt": "plan, train, bench, check",
    "log": "train",
    "checkpoint": "train",
    "placement": ALL,
    "layout": ALL,
    "cluster": ALL,
}
HEAD = """<!-- Written by docs/scripts/knobs.py; change the schema instead. -->
# Every knob

Set a knob in the file or on the command line, as in `train.tp=2`. Every command that takes a configuration checks all knobs; the last
column names the commands on which a knob acts (`bench` is `bench rollout`, `check` is `check --mismatch`).
[Configuration](configuration.md) describes the sections.
"""


def reader(knob: str) -> str:
    """Returns the commands on which a knob acts."""
    parts = knob.replace("[", ".[").split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in READERS:
            return READERS[prefix]
    raise KeyError(knob)


def fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the names of a section's knobs, as in `knobs()`, and their fields in the schema."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")
        elif (named := _member(kind)) is not None:
            for key, inner in named.model_fields.items():
                yield f"{prefix}{name}[NAME].{key}", inner
        else:
            yield prefix + name, field


def default(field: FieldInfo) -> str:
    """Returns a knob's default in YAML."""
    if field.is_required():
        return "must be set"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see its knobs"
    value = list(value) if isinstance(value, tuple) else value
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


TYPES = {"boolean": "true, false", "integer": "integer", "string": "text", "object": "mapping"}


def allowed(field: FieldInfo) -> str:
    """Returns the allowed values of a knob: its type with bounds, or a list of values."""
    model = create_model("Knob", value=(field.annotation, field))
    schema = model.model_json_schema()["properties"]["value"]
    found = dict.fromkeys(_values(part) for part in schema.get("anyOf", [schema]))
    return ", ".join(text for text in found if text)


def _values(schema: dict[str, Any]) -> str:
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "")
    if kind == "array":  # every list of numbers must be a list; others may also be one value
        items = schema["items"]
        is_list = items["type"] == "number"
        return "list of numbers" if is_list else f"{_values(items)}, list of these"
    text = TYPES.get(kind, kind) or "section"
    for bound, words in (
        *(("minimum", "from"), ("exclusiveMinimum", "above")),
        *(("maximum", "to"), ("exclusiveMaximum", "below")),
    ):
        if bound in schema:
            text += f" {words} {schema[bound]}"
    return text


def table(knobs: list[tuple[str, FieldInfo]]) -> Iterator[str]:
    """Yields the lines of a table of knobs."""
    yield "| Knob | Allowed | Default | Meaning | Acts on |"
    yield "| --- | --- | --- | --- | --- |"
    for name, field in knobs:
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{name}` | {allowed(field)} | {default(field)} | {text} | {reader(name)} |"


def page() -> str:
    """Returns the whole page."""
    lines = [HEAD, ""]
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if name == "algorithm":
            lines += _algorithms()
            continue
        member = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else _member(kind)
        assert member is not None
        lines += ["", f"## {name}", "", " ".join((member.__doc__ or "").split()), ""]
        named = [(f"{name}[NAME].{key}", inner) for key, inner in member.model_fields.items()]
        lines += table(list(fields(member, f"{name}.")) if member is kind else named)
    num = sum(line.startswith("| `") for line in lines)
    lines[1] = f"There are {num} knobs; a knob that several algorithms share is counted once."
    return "\n".join(lines) + "\n"


def _algorithms() -> Iterator[str]:
    """Yields the tables of the algorithms: shared knobs first, then those of each algorithm."""
    members = _algorithm_sections()
    bases: dict[type[BaseModel], list[str]] = {}
    for tag, member in members.items():
        for base in member.__mro__[1:]:
            if issubclass(base, Section) and base is not Section:
                bases.setdefault(base, []).append(tag)
    shared: list[FieldInfo] = []
    for base, tags in bases.items():
        names = base.__annotations__.keys() - {"name"}
        listed = fields(base, "algorithm.")
        own = [one for one in listed if one[0].split(".")[1] in names]
        if len(tags) > 1 and own:
            text = " ".join((base.__doc__ or "").split())
            yield from ("", f"## algorithm: shared by {', '.join(tags)}", "", text, "")
            yield from table(own)
            shared += [field for _, field in own]
    for tag, member in members.items():
        yield from ("", f"## algorithm: {tag}", "", _intro(member, tag), "")
        listed = fields(member, f"algorithm[{tag}].")
        yield from table([one for one in listed if not any(_alike(one[1], s) for s in shared)])


def _alike(field: FieldInfo, other: FieldInfo) -> bool:
    return (field.description, field.default) == (other.description, other.default)


def _intro(member: type[BaseModel], tag: str) -> str:
    text = " ".join((member.__doc__ or "").split())
    names = {"grpo": PRESETS, "dpo": PAIR_PRESETS}.get(tag)
    shared = (
        f" The names {', '.join(f'`{n}`' for n in names)} share these knobs, with other defaults"
        if names
        else ""
    )
    return f"{text}{shared}{' ([defaults](../algorithms.md)).' if names else ''}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
