"""What is built from the source distribution installs into an empty environment and works there.

The environment holds the wheel alone. What it depends on comes from the environment of the tests,
by PYTHONPATH, so that nothing is fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hybridrl import __version__

pytestmark = [pytest.mark.full, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def run(command: Sequence[object], folder: Path, **variables: str) -> str:
    """Runs a command to its end, without what the tests put on the import path."""
    kept = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**kept, "HYBRIDRL_COLD_STARTS": "1", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution of the tracked files, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    listed = run(["git", "ls-files", "-z"], ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, folder], source)
    (archive,) = folder.glob("*.tar.gz")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, archive]
    run([sys.executable, *PIP, *build], folder)
    (wheel,) = folder.glob("*.whl")
    return {"sdist": archive, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an empty environment into which the wheel alone was installed."""
    folder = tmp_path_factory.mktemp("empty") / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", folder], ROOT)
    python = folder / "bin" / "python"
    pip = [*PIP, "--python", python, "install", "--no-deps", distributions["wheel"]]
    run([sys.executable, *pip], folder)
    return python.parent


def test_distributions_hold_what_their_users_need(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
        described = wheel.read(metadata).decode()
    tracked = run(["git", "ls-files"], ROOT).splitlines()
    for prefix in ("hybridrl/", "kernels/", "examples/"):
        inside = {name for name in tracked if name.startswith(prefix)}
        shipped = inside if prefix == "hybridrl/" else {f"hybridrl/{name}" for name in inside}
        assert shipped - names == set()
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
    assert "License-Expression: Apache-2.0" in described or "License: Apache-2.0" in described
    with tarfile.open(distributions["sdist"]) as sdist:
        inner = {name.partition("/")[2] for name in sdist.getnames()}
    assert [name for name in shipped if name.startswith("hybridrl/examples/recipes/")]
    wanted = [n for n in tracked if n.startswith(("csrc/", "kernels/", "examples/", "hybridrl/"))]
    assert set(wanted) - inner == set()


def test_wheel_trains_in_an_environment_of_its_own(installed: Path, tmp_path: Path) -> None:
    libraries = {"PYTHONPATH": sysconfig.get_path("purelib")}
    where = "import hybridrl.kernels.reference as r, sys; print(r.__file__, sys.prefix)"
    file, prefix = run([installed / "python", "-c", where], tmp_path, **libraries).split()
    assert file.startswith(prefix), "the wheel's own code runs, not the checkout's"
    hybridrl = installed / "hybridrl"
    said = run([hybridrl, "--version"], tmp_path, **libraries)
    assert said == f"hybridrl {__version__}\n"
    run([hybridrl, "examples"], tmp_path, **libraries)
    config = "examples/quickstart/sft.yaml"
    run([hybridrl, "plan", config], tmp_path, **libraries)
    knobs = ["steps.num_steps=2", "steps.eval_every=0", "train.tp=1", "train.pp=1"]
    run([hybridrl, "train", config, *knobs, "data.eval_limit=8"], tmp_path, **libraries)
    assert (tmp_path / "runs" / "quickstart-sft" / "summary.json").exists()
    rows = ["--prompts", "examples/quickstart/sft.jsonl"]
    run([hybridrl, "init", "sft", "examples/quickstart/model", *rows], tmp_path, **libraries)
    run([hybridrl, "plan", "sft.yaml"], tmp_path, **libraries)


@pytest.mark.parametrize(("recipe", "world"), [("qwen2.5-7b_8gpu", 8), ("deepseek-v3_256gpu", 256)])
def test_recipes_of_the_wheel_are_planned(
    installed: Path, tmp_path: Path, recipe: str, world: int
) -> None:
    """Their paths lead from the folder that `hybridrl examples` writes into."""
    libraries = {"PYTHONPATH": sysconfig.get_path("purelib")}
    run([installed / "hybridrl", "examples"], tmp_path, **libraries)
    file = f"examples/recipes/{recipe}.yaml"
    nodes = f"{world // 8}x8xH100"
    command = [installed / "hybridrl", "plan", file, "--cluster", nodes, "--json"]
    planned = json.loads(run(command, tmp_path, **libraries))
    assert planned["fits"] and planned["violations"] == []
    assert sum(len(part["ranks"]) for part in planned["ranks"]) == world


@pytest.mark.parametrize("extra", ["data", "math", "docs", "test"])
def test_extra_resolves(distributions: dict[str, Path], extra: str) -> None:
    """`vllm` and `sglang`, which bring CUDA, are resolved where there is a GPU only."""
    wanted = Requirement(f"hybridrl[{extra}] @ {distributions['wheel'].as_uri()}")
    run([sys.executable, *PIP, "install", "--dry-run", str(wanted)], ROOT)
