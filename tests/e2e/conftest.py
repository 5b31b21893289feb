"""What the learning tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import QUICKSTART, run


@pytest.fixture(scope="session")
def warm_start(is_full: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HF directory of part 1 of the quickstart; in `make test` after some steps on one rank."""
    folder = tmp_path_factory.mktemp("warm_start")
    short = ["steps.num_steps=40", "steps.eval_every=0", "train.tp=1", "train.pp=1"]
    knobs = [] if is_full else short
    run("train", QUICKSTART / "sft.yaml", f"run.dir={folder}", *knobs, timeout_s=600)
    run("convert", folder / "quickstart-sft", folder / "hf", "--to", "hf")
    return folder / "hf"


@pytest.fixture(scope="session")
def grpo_run(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of part 2, all of it, with the weights that it ends with in `hf`."""
    folder = tmp_path_factory.mktemp("grpo")
    run(
        "train",
        QUICKSTART / "grpo.yaml",
        f"model.path={warm_start}",
        f"run.dir={folder}",
        timeout_s=3500,
    )
    run("convert", folder / "quickstart-grpo", folder / "quickstart-grpo" / "hf", "--to", "hf")
    return folder / "quickstart-grpo"
