"""Writes docs/guides/coming_from.md: the knobs for names that users of other systems know.

The tables come from hybridrl/config/other_systems.py, which also gives the hints for unknown keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.other_systems import OTHER_SYSTEMS

PAGE = Path(__file__).parents[1] / "guides" / "coming_from.md"
HEAD = """<!-- Written by docs/scripts/coming_from.py; change hybridrl/config/other_systems.py instead. -->
# Coming from verl, TRL or OpenRLHF

The tables list the names that you know and the knobs that do the same here. A configuration or a command line with one of these names
is refused with the same hint, so you can also paste yours and read the messages. What each knob does: [every knob](../reference/knobs.md).

Four things are different:

- Batch sizes count prompts. `steps.prompts_per_step` prompts get `steps.samples_per_prompt` responses each, on all GPUs together.
- Micro-batches are counted in tokens (`train.micro_batch_tokens`). Samples are always packed; there is no padding to switch off.
- Training and generation share all GPUs of one torchrun world. There is no placement to configure unless you want one.
- One YAML file contains all settings, and any key can also be set on the command line: `hybridrl train grpo.yaml train.tp=2`.
"""


def page() -> str:
    """Returns the page's text."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for system, names in OTHER_SYSTEMS.items():
        yield f"## {system}\n"
        yield f"| {system} | hybridrl | |"
        yield "| --- | --- | --- |"
        for name, ours in names.items():
            knobs = ", ".join(f"`{key}`" for key in ours.keys) or "none"
            yield f"| `{name}` | {knobs} | {ours.note.replace('|', '/')} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
