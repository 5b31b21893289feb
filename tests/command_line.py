"""Runs hybridrl's command line as a user does, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
FRESH = (  # overrides for a small model with random weights on any number of ranks
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    "train.tp=1",
    "train.pp=1",
)
NO_EVALUATION = ("data.eval_prompts=null", "steps.eval_every=0")


def start(
    arguments: Sequence[str | Path],
    extra: Mapping[str, str] | None = None,
    output: IO[str] | int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Starts a command in the project's root; stdout and stderr come as one text."""
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **(extra or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "hybridrl.cli.main", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )


def run(*arguments: str | Path, timeout_s: float = 240, expect: int = 0) -> str:
    """Runs a command to its end, checks its exit code and returns what it printed."""
    process = start(arguments)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == expect, f"exit {process.returncode}:\n{output[-4000:]}"
    return output


def exported_weights(run_folder: Path, target: Path) -> dict[str, Tensor]:
    """Returns the policy's weights of a run's newest checkpoint, through `hybridrl convert`."""
    run("convert", run_folder, target, "--to", "hf")
    return load_file(target / "model.safetensors")


def records(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run's steps."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
