"""What the documentation says, for tests that compare it with the code and with runs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
METRICS_PAGE = ROOT / "docs" / "reference" / "metrics.md"


def metric_patterns() -> list[re.Pattern[str]]:
    """Returns the metrics of the page as patterns; NAME stands for anything but a slash."""
    rows = [line.split("|")[1] for line in METRICS_PAGE.read_text().splitlines() if "|" in line]
    names = [name for row in rows for name in re.findall(r"`([a-zA-Z_/]+)`", row)]
    assert len(names) > 60
    return [re.compile(re.escape(name).replace("NAME", "[^/]+") + "$") for name in names]


def undocumented(metrics: Iterable[str]) -> list[str]:
    """Returns the metrics that the page does not have."""
    patterns = metric_patterns()
    return sorted(name for name in metrics if not any(p.match(name) for p in patterns))


def pages() -> list[Path]:
    """Returns the README, what lies beside it, and every page of docs/."""
    beside = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY"))
    return [*beside, *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(page: Path) -> list[str]:
    """Returns the lines of commands in a page's fenced blocks; continued lines as one."""
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def documentation_script(name: str) -> ModuleType:
    """Imports one of docs/scripts."""
    file = ROOT / "docs" / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
