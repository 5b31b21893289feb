"""What the learning tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import QUICKSTART, run


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HF directory that part 1 of the quickstart leaves."""
    folder = tmp_path_factory.mktemp("warm_start")
    run("train", QUICKSTART / "sft.yaml", f"run.dir={folder}", timeout_s=600)
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
