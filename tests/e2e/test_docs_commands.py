"""The commands of the guides run, one after the other, each with few steps."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from documented import ROOT, fenced
from refusals import succeed

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.dist]

FEW = ("steps.num_steps=1", "steps.eval_every=0", "checkpoint.every=0", "data.eval_limit=8")
SHORT = "steps.prompts_per_step=16"
OFFLINE = "examples/quickstart/model"  # in the place of a model of the hub
# What is run: those of runs that train on CPU, and what needs no run.
TRAINS = ("examples/quickstart/", "examples/calculator/")

# Further rows of a user.
ROWS = {
    "demonstrations.jsonl": {"prompt": "1+1=", "response": "2"},
    "pairs.jsonl": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
}


def on_cpu(line: str) -> list[str] | None:
    """Returns a command with few steps and a local model; None if it needs a GPU or the hub."""
    words = shlex.split(line)
    if words[0] not in ("hybridrl", ".venv/bin/hybridrl") or "[" in line or "CONFIG" in words:
        return None
    words = [OFFLINE if word.startswith("Qwen/") else word for word in words[1:]]
    if words[0] == "train":
        is_here = words[1].startswith(TRAINS) and "rollout.engine=vllm" not in words
        warmup = ["algorithm.critic_warmup_steps=0"] if words[1].endswith("ppo.yaml") else []
        return [*words, *FEW, SHORT, *warmup] if is_here else None
    if words[0] == "convert":
        return words
    return words if words[0] == "init" or words[1:2] == [f"{TRAINS[0]}grpo.yaml"] else None


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the examples and the run that the others begin with."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "quickstart" / "train.jsonl", tmp_path)  # a user's own rows
    for name, row in ROWS.items():
        (tmp_path / name).write_text(json.dumps(row))
    succeed(tmp_path, "train", f"{TRAINS[0]}sft.yaml", *FEW, SHORT)
    return tmp_path


@pytest.mark.parametrize("page", ["guides/first_runs.md", "guides/tasks.md", "guides/one_gpu.md"])
def test_commands_of_a_guide_run_in_their_order(here: Path, page: str) -> None:
    lines = fenced(ROOT / "docs" / page)
    run = [words for line in lines if (words := on_cpu(line)) is not None]
    assert run
    for words in run:
        (here / f"{words[1]}.yaml").unlink(missing_ok=True)
        if words[0] == "convert" and (here / words[2]).exists():
            shutil.rmtree(here / words[2])
        if words[0] == "train" and words[1] != f"{TRAINS[0]}sft.yaml":
            first = here / "runs" / "quickstart-sft"
            if words[1].startswith(TRAINS[0]) and not (first / "hf").exists():
                succeed(here, "convert", str(first), str(first / "hf"), "--to", "hf")
        succeed(here, *words)
