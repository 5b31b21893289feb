"""`hybridrl push` against a stub of the hub's library: what it is asked, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner

from hybridrl.cli.main import app
from hybridrl.errors import UserError
from hybridrl.models.hf.shards import HfWriter


class Hub:
    """Keeps what it is asked."""

    asked: list[tuple[str, dict[str, Any]]] = []
    fails = False

    def create_repo(self, name: str, **given: Any) -> Any:
        self.asked.append(("create_repo", {"name": name, **given}))
        if self.fails:
            raise OSError("no route to the hub")
        return SimpleNamespace(repo_id=name)

    def create_branch(self, name: str, **given: Any) -> None:
        self.asked.append(("create_branch", {"name": name, **given}))

    def upload_folder(self, **given: Any) -> Any:
        self.asked.append(("upload_folder", given))
        return SimpleNamespace(commit_url="https://hub/commit")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(Hub, "fails", False)
    return Hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with HfWriter(tmp_path / "out", {"a": (2,)}, torch.float32, {}, card="# Mine\n") as writer:
        writer.write("a", torch.ones(2))
    return tmp_path / "out"


def test_push_makes_the_repository_and_uploads_the_directory(hub: type[Hub], folder: Path) -> None:
    done = CliRunner().invoke(app, ["push", str(folder), "me/mine", "--private"])
    assert done.exit_code == 0 and done.output.strip() == "https://hub/commit"
    names = [name for name, _ in hub.asked]
    assert names == ["create_repo", "upload_folder"]
    made, uploaded = hub.asked[0][1], hub.asked[1][1]
    assert made["name"] == "me/mine" and made["private"] is True and made["exist_ok"] is True
    assert uploaded["repo_id"] == "me/mine" and uploaded["folder_path"] == folder
    files = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "rng.pt", "x.log"]
    kept = list(filter_repo_objects(files, allow_patterns=uploaded["allow_patterns"]))
    assert kept == files[:4]


def test_push_goes_to_a_branch_if_asked(hub: type[Hub], folder: Path) -> None:
    CliRunner().invoke(app, ["push", str(folder), "me/mine", "--revision", "step-10"])
    assert [name for name, _ in hub.asked] == ["create_repo", "create_branch", "upload_folder"]
    assert hub.asked[1][1]["branch"] == hub.asked[2][1]["revision"] == "step-10"


def test_push_refuses_what_is_no_whole_directory_before_it_asks(
    hub: type[Hub], folder: Path
) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    for wrong in (folder, folder.parent):
        done = CliRunner().invoke(app, ["push", str(wrong), "me/mine"])
        assert isinstance(done.exception, UserError) and str(wrong) in str(done.exception)
    assert hub.asked == []


def test_push_says_what_the_hub_said(hub: type[Hub], folder: Path) -> None:
    hub.fails = True
    done = CliRunner().invoke(app, ["push", str(folder), "me/mine"])
    assert isinstance(done.exception, UserError) and "no route to the hub" in str(done.exception)
