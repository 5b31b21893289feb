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
