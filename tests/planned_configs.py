"""config.json files of models that are planned and checked, but never built."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
QWEN25_7B = json.loads((ROOT / "benchmarks" / "models" / "qwen2.5-7b.json").read_text())


def write_config(folder: Path, **changes: object) -> Path:
    """Writes the config.json of Qwen2.5 7B with changes into a new folder; returns the folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN25_7B | changes))
    return folder
