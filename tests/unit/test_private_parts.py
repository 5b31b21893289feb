"""docs/reference/private_parts.md lists private names of other packages, which these have."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from documented import documentation_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return documentation_script("private_parts")


@pytest.fixture(scope="module")
def page(check: ModuleType) -> str:
    text: str = check.PAGE.read_text()
    return text


def test_the_page_lists_all_private_names_that_are_used(check: ModuleType, page: str) -> None:
    assert check.unlisted(page) == []


def test_installed_packages_have_the_listed_names(check: ModuleType, page: str) -> None:
    source = check.Source([Path(folder) for folder in sys.path if Path(folder).is_dir()])
    assert source.version("megatron") is not None
    assert check.missing(page, source) == []


def test_listed_files_exist(check: ModuleType, page: str) -> None:
    found = check.rows(page)
    assert {part.package for row in found for part in row.parts} == set(check.PACKAGES)
    for row in found:
        assert row.users and row.tests, row.parts
        assert [path for path in (*row.users, *row.tests) if not (ROOT / path).is_file()] == []


def test_every_listed_name_is_needed(check: ModuleType, page: str) -> None:
    """Each name is in the text of the files that its row lists."""
    for row in check.rows(page):
        text = "".join((ROOT / path).read_text() for path in row.users)
        unused = [p.name for p in row.parts if p.name.rpartition(".")[2] not in text]
        assert unused == [], row.users


ROW = "| `{}` | `a.py` | why | none | `t.py` |"
PUBLIC = "## Public names\n\n`vllm.LLM`\n\n## vLLM\n\n"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from vllm import LLM", []),
        ("from vllm.v1 import engine", ["vllm.v1.engine"]),
        ("import vllm.v1.engine", ["vllm.v1.engine"]),
        ("from vllm import LLM\nLLM.load = None", ["vllm.LLM.load"]),
        ("from vllm import LLM\nLLM._load()", ["vllm.LLM._load"]),
        ("from vllm import LLM\nreplaced(LLM, 'load', None)", ["vllm.LLM.load"]),
        ("from vllm import LLM\nvars(LLM)['load'] = 1", ["vllm.LLM.load"]),
        ("def f(engine):\n    engine._step()", ["_step"]),
        ("def f(engine):\n    getattr(engine, '_step')", ["_step"]),
        ("class A:\n    def f(self):\n        self._step = 1", []),
        ("def f(one):\n    return one._asdict()", []),
    ],
)
def test_uses_of_private_names_are_found(
    check: ModuleType, code: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hybridrl" / "rollout").mkdir(parents=True)
    (tmp_path / "hybridrl" / "rollout" / "one.py").write_text(code)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert [line.split()[1] for line in check.unlisted(PUBLIC)] == names
    listed = "".join(ROW.format(n if "." in n else f"vllm.x.{n}") + "\n" for n in names)
    assert check.unlisted(PUBLIC + listed) == []


PACKAGE = """
from vllm.base import Base
class Engine(Base):
    size: int
    def __init__(self):
        self.one, self._two = 1, 2
        self.register_buffer("three", None)
def run(): ...
try:
    import fast
except ImportError:
    FAST = None
"""


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("engine", True),
        ("engine.run", True),
        ("engine.FAST", True),
        ("engine.Engine.size", True),
        ("engine.Engine._two", True),
        ("engine.Engine.three", True),
        ("engine.Engine.of_base", True),
        ("engine.Engine.four", False),
        ("engine.Engine.size.more", False),
        ("engine.stop", False),
        ("other", False),
    ],
)
def test_names_are_found_in_packages_that_are_not_imported(
    check: ModuleType, name: str, exists: bool, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "engine.py").write_text(PACKAGE)
    (tmp_path / "vllm" / "base.py").write_text("class Base:\n    def of_base(self): ...\n")
    (tmp_path / "vllm-0.9.1.dist-info").mkdir()
    source = check.Source([tmp_path])
    assert source.has(f"vllm.{name}") == exists
    row = ROW.format(f"vllm.{name}")
    assert check.missing(row, source) == ([] if exists else [f"vllm 0.9.1: no vllm.{name}"])
    newer = row.replace("` |", "` (>=1.0) |", 1)
    assert bool(check.missing(newer, source)) == exists
