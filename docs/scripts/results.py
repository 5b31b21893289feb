"""Makes the site's page of all results: every result file as tables, with its command.

A table has the numbers of one case. Spreads, counts of repeats, settings and curves are left out;
each section links to its file.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_ROWS = 40  # in a table; the file has the others
META = ("benchmark", "what", "command", "commit", "machine", "device", "note", "notes", "remark")
LEFT_OUT = (
    *("seconds", "machine", "environment", "config", "train", "peak", "faults", "steps", "ledger"),
    *("memory_course", "commit", "command", "min_ms", "p10_ms", "p90_ms", "iterations"),
    *("slowest_rank", "allocations", "launches", "rank_median_ms", "verify_s", "is_auto", "layers"),
)
# Commands of files that do not contain them.
REPEAT = {
    "checkpoint": "python benchmarks/bench_checkpoint.py",
    "exchange": "python benchmarks/bench_exchange.py",
    "libraries": "python benchmarks/bench_libraries.py",
    "mutants": "python tests/mutants/run.py --out FILE",
    "planner_deepseek_v3": "python benchmarks/bench_planner.py",
    "prompts": "python benchmarks/bench_prompts.py",
    "reshard_2gpu_h200": "python benchmarks/bench_reshard_gpu.py OUT.json CASE",
    "reshard_h200": "python benchmarks/bench_reshard_gpu.py OUT.json CASE",
    "rollout_h200": "python benchmarks/bench_rollout.py --out OUT.json CASE",
    "step_h200": "python benchmarks/bench_step.py --out OUT.json CASE",
    "step_h100_lag": "python benchmarks/bench_step.py --out OUT.json CASE",
    "train_h200": "python benchmarks/bench_train.py --out OUT.json CASE",
    "train_moe_h100": "python benchmarks/bench_train.py --out OUT.json CASE",
    "train_moe_h200": "python benchmarks/bench_train.py --out OUT.json CASE",
}
HEAD = """# All results

Every measured number in this documentation comes from one of these files. A benchmark checks its result before it measures time.
Click on a case to open it. The files also contain spreads, settings and ranks. [Training](training.md) and
[the reshard](../concepts/reshard.md) explain the main results.
"""


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the numbers and texts in nested mappings, by dotted path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in LEFT_OUT:
                yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        if value and len(value) <= 8 and all(isinstance(item, int | float) for item in value):
            yield path, ", ".join(map(shown, value))
    elif value is not None:
        yield path, value


def shown(value: Any) -> str:
    """Returns a number with at most four significant digits, or a text unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.4g}"


def cases(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the name and content of each case: items of lists, and mappings."""
    rest = {}
    for key, value in content.items():
        if key in META or (key in LEFT_OUT and not isinstance(value, list)):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict) and key != "faults":
            for number, item in enumerate(value):
                name = item.get("case") or item.get("name") or f"{key} {number + 1}"
                detail = [str(item[k]) for k in ("kind", "engine", "transport") if k in item]
                yield " ".join([str(name), *detail]), item
        elif isinstance(value, dict):
            yield key, value
        else:
            rest[key] = value
    if list(flat(rest)):
        yield "numbers", rest


def table(name: str, value: Any) -> Iterator[str]:
    """Yields a case as HTML that opens on a click, which Markdown renders everywhere."""
    rows = list(flat(value))
    if not rows:
        return
    yield f"<details><summary>{html.escape(name)}</summary>"
    if isinstance(value.get("command"), str):
        yield f"<p>repeat: <code>{html.escape(_whole(value['command']))}</code></p>"
    yield "<table>"
    for key, number in rows[:MOST_ROWS]:
        text = html.escape(shown(number))[:300]
        yield f"<tr><td>{html.escape(key)}</td><td>{text}</td></tr>"
    yield "</table>"
    if len(rows) > MOST_ROWS:
        yield f"<p>{len(rows) - MOST_ROWS} further numbers are in the file.</p>"
    yield "</details>"


def section(file: Path) -> Iterator[str]:
    """Yields the lines of one file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    name = file.stem
    yield f"\n## {name}\n"
    command = content.get("command") or REPEAT.get(name)
    if isinstance(command, list):  # of words, or of whole commands
        command = (" " if command[0].endswith(".py") else "; ").join(command)
    if not isinstance(command, str):
        raise ValueError(f"{file.name} says no command, and REPEAT has none")
    made = f"made by `{_whole(command)}`"
    if any(not (ROOT / script).exists() for script in re.findall(r"[\w/]+\.py", _whole(command))):
        made += ", which is there at the commit that the file names"
    yield f"[{file.name}](../../benchmarks/results/{file.name}), {made}\n"
    for key in META:
        if key != "command" and key in content:
            found = content[key]
            text = " ".join(found) if isinstance(found, list) else found
            if isinstance(text, dict):
                text = ", ".join(f"{k} {shown(v)}" for k, v in flat(text))
            yield f"- {key}: {html.escape(' '.join(str(text).split()))}"
    yield ""
    for case, value in cases(content):
        yield from table(case, value)


def _whole(command: str) -> str:
    """Returns a command as it is typed in the project's root."""
    command = (
        command
        if command.startswith(("python", "torchrun", "hybridrl", "make"))
        else f"python {command}"
    )
    return command.replace("python bench_", "python benchmarks/bench_")


def page() -> str:
    """Returns the whole page."""
    lines = [HEAD]
    for file in sorted(RESULTS.glob("*.json")):
        lines += section(file)
    return "\n".join(lines) + "\n"
