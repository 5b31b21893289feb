"""One table says which versions of Python and packages are needed, and all that repeat it agree."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybridrl.config.packages import MEGATRON_CORE, NEWEST_TESTED, PYTHON, REQUIRED
from hybridrl.services.cluster_check import environment

ROOT = Path(__file__).parents[2]
# Behind a wall of its own, or of an extra.
OPTIONAL = {"datasets", "PIL", "langdetect", "math_verify", "transformer_engine"} | {
    "sglang",
    "triton",
    "vllm",
    "torch_memory_saver",
    "wandb",
    "mlflow",
    "ray",
    "aiohttp",
    "openai",
    "mcp",
    "openenv",
    "verifiers",
}
DISTRIBUTIONS = {"megatron": "megatron-core", "pydantic_core": "pydantic", "yaml": "pyyaml"}


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: found.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_setup_asks_for_the_table(metadata: dict[str, Any]) -> None:
    found = {(wanted := Requirement(line)).name: wanted for line in metadata["install_requires"]}
    assert {name: wanted.specifier for name, wanted in found.items()} == {
        name: SpecifierSet(bounds) for name, bounds in REQUIRED.items()
    }
    assert metadata["python_requires"] == PYTHON
    assert (metadata["license"], metadata["license_files"]) == ("Apache-2.0", ["LICENSE"])
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


def test_versions_of_megatron_are_those_that_were_tested() -> None:
    bounds = SpecifierSet(REQUIRED["megatron-core"])
    assert all(bounds.contains(version) for version in MEGATRON_CORE)
    minors = {version.rpartition(".")[0] for version in MEGATRON_CORE}
    between = [f"0.{minor}" for minor in range(10, 30)]
    assert {minor for minor in between if bounds.contains(f"{minor}.1")} == minors


def test_newest_tested_versions_are_within_the_ranges_that_check_prints() -> None:
    assert NEWEST_TESTED.keys() == REQUIRED.keys()
    for name, version in NEWEST_TESTED.items():
        assert SpecifierSet(REQUIRED[name]).contains(version), name
    items = {item.name: item for item in environment._packages()}
    for name, version in NEWEST_TESTED.items():
        assert (items[name].tested, items[name].newest) == (REQUIRED[name], version)
    assert items["transformer-engine"].newest == "2.11.0"
    engines = {item.name: item for item in environment._engines()}
    assert "without" in engines["sglang"].tested and engines["sglang"].newest == "0.5.23"


def test_whatever_is_imported_is_asked_for() -> None:
    imported: set[str] = set()
    for file in (ROOT / "hybridrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module)
    packages = {name.split(".")[0] for name in imported} - sys.stdlib_module_names - OPTIONAL
    packages -= {"hybridrl"}
    assert {DISTRIBUTIONS.get(name, name) for name in packages} <= REQUIRED.keys()


def test_what_is_installed_is_within_the_bounds() -> None:
    wrong = {item.name: item.found for item in environment._packages() if item.status == "problem"}
    assert wrong == {}


def test_other_files_repeat_the_table() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"'torch{REQUIRED['torch'].replace(',', '$(,)')}'" in makefile
    assert f"(3, {PYTHON.removeprefix('>=3.')})" in makefile
    files = (ROOT / "requirements").glob("*.txt")
    for line in "\n".join(file.read_text() for file in files).splitlines():
        if line and not line.startswith("#") and (wanted := Requirement(line)).name in REQUIRED:
            for bound in wanted.specifier:
                version = bound.version
                is_inside = SpecifierSet(REQUIRED[wanted.name]).contains(version, prereleases=True)
                is_end = f"<{version}" in REQUIRED[wanted.name].split(",")
                assert is_inside or is_end, line


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("transformers", "4.40.0", "problem"),
        ("transformers", "5.25.0", "problem"),
        ("transformers", "5.17.0", "ok"),
        ("typer", "0.12.0", "problem"),
        ("torch", "2.10.0", "problem"),
    ],
)
def test_check_judges_every_package(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str, status: str
) -> None:
    installed = {item.name: item.found.split(",")[0] for item in environment._packages()}
    monkeypatch.setattr(environment, "installed", {**installed, name: version}.get)
    items = {item.name: item for item in environment._packages()}
    assert items.keys() >= REQUIRED.keys()
    assert items[name].status == status
    if status == "problem":
        assert items[name].fix == f"pip install '{name}{REQUIRED[name]}'"
        assert REQUIRED[name] in items[name].found


def test_make_tells_an_old_python_before_anything_is_fetched(tmp_path: Path) -> None:
    # A make that runs these tests hands its flags down, and this one would print its folder first.
    handed_down = ("MAKE", "MFLAGS")
    environ = {key: os.environ[key] for key in os.environ if not key.startswith(handed_down)}
    recipe = subprocess.run(
        ["make", "-n", "-f", str(ROOT / "Makefile"), ".venv/torch", "PYTHON=old"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    command = re.match(r'old -c "(.*?)"\n', recipe, re.DOTALL)
    assert command is not None, recipe  # before `old -m venv` and pip
    code = command[1].replace("\\\n", "").replace("sys.version_info", "(3, 10)", 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "hybridrl needs Python >=3.11" in done.stderr
    assert "PYTHON=python3.11" in done.stderr
