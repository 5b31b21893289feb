"""The documentation says what is there: knobs, metrics, errors, results, links and commands."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import typer
from documented import ROOT, documentation_script, fenced, pages, undocumented
from test_cli import QWEN25_7B
from typer.testing import CliRunner

from hybridrl import errors
from hybridrl.cli.main import app
from hybridrl.config.load import knobs, load_config
from hybridrl.rollout.registry import ENGINES, engine_package
from hybridrl.services.planner.plan_report import plan_report

DOCS = ROOT / "docs"
HYBRIDRL = (".venv/bin/hybridrl ", "hybridrl ", "torchrun ")


@pytest.mark.parametrize("name", ["knobs", "coming_from"])
def test_pages_that_are_made_are_up_to_date(name: str) -> None:
    made = documentation_script(name)
    assert made.PAGE.read_text() == made.page(), f"run python docs/scripts/{name}.py"


def test_every_result_is_cited_and_every_result_that_is_cited_exists() -> None:
    sources = [ROOT / "README.md", *(ROOT / "kernels").glob("*.py")]
    for folder, ending in (("docs", "md"), ("hybridrl", "py"), ("tests", "py")):
        sources += (ROOT / folder).rglob(f"*.{ending}")
    texts = [file.read_text() for file in [*sources, ROOT / "tests" / "mutants" / "README.md"]]
    cited = {name for text in texts for name in re.findall(r"benchmarks/results/(\w+\.json)", text)}
    kept = {file.name for file in (ROOT / "benchmarks" / "results").iterdir()}
    assert cited == kept
    page = documentation_script("results").page()
    assert [name for name in kept if f"## {name.removesuffix('.json')}\n" not in page] == []


def test_every_knob_is_on_its_page_once() -> None:
    text = (DOCS / "reference" / "knobs.md").read_text()
    found = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    shared = {re.sub(r"^algorithm\[\w+\]", "algorithm", knob): knob for knob in knobs()}
    assert len(found) == len(set(found)) and set(found) <= shared.keys() | set(knobs())
    listed = (knob in found or re.sub(r"\[\w+\]", "", knob) in found for knob in knobs())
    assert all(listed) and f"There are {len(found)} knobs" in text


def test_pictures_are_as_they_are_drawn(tmp_path: Path) -> None:
    made = documentation_script("pictures")
    made.PICTURES = tmp_path
    made.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept, "run python docs/scripts/pictures.py"


def metrics_in_sources() -> set[str]:
    """Names like `group/name` in the package, with NAME where a name is put in."""
    groups = {"reward", "policy", "critic", "preference", "teacher", "mismatch", "correction"}
    groups |= {"lag", "moe", "router", "environment", "generate", "eval", "time_s", "time_share"}
    groups |= {"flops", "mfu", "throughput", "memory", "reshard", "response_tokens"}
    found: set[str] = set()
    for path in (ROOT / "hybridrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ""
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "NAME" for p in node.values]
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            group, _, rest = text.partition("/")
            if group in groups and re.fullmatch(r"[A-Za-z_]+(/[A-Za-z_]+)?", rest):
                found.add(text)
    return found - {"reward/NAME/NAME"}  # a scorer's notes, which the page names one by one


def test_every_metric_of_the_sources_is_on_its_page() -> None:
    found = metrics_in_sources()
    assert len(found) > 50
    assert undocumented(found) == []


def test_every_family_of_errors_is_on_its_page() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    families = [name for name in vars(errors) if name.endswith("Error")]
    assert len(families) >= 6
    for name in families:
        assert f"| `{name}` |" in text, name


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path) if path else page
        # The site has no pages of folders, but for the results.
        is_page = file.is_file() or file.resolve() == ROOT / "benchmarks" / "results"
        is_there = is_page and (not anchor or anchor in anchors(file))
        dead += [] if is_there else [target]
    assert dead == []


def commands() -> list[tuple[str, str]]:
    """Every command line of hybridrl in a fenced block, with its page."""
    found = [(str(page.relative_to(ROOT)), line) for page in pages() for line in fenced(page)]
    return [(page, line) for page, line in found if line.startswith(HYBRIDRL)]


def parsed(line: str) -> typer.Context:
    """Parses a command line as the command would, and runs nothing."""
    words = shlex.split(line.partition(" | ")[0])  # of a pipe
    words = words[words.index("hybridrl" if "hybridrl" in words else words[0]) + 1 :]
    command, name = typer.main.get_command(app), ""
    while hasattr(command, "commands"):
        name = words.pop(0)
        command = command.commands[name]
    return command.make_context(name, words)


def test_commands_of_the_documentation_parse() -> None:
    assert len(commands()) > 20
    for page, line in commands():
        try:
            parsed(line)
        except Exception as error:
            pytest.fail(f"{page}: {line}\n{type(error).__name__}: {error}")


def leaves(command: Any, name: str = "hybridrl") -> Iterator[tuple[str, Any]]:
    """Yields the commands that take no further command, by their full names."""
    if not hasattr(command, "commands"):
        yield name, command
    for word, part in getattr(command, "commands", {}).items():
        yield from leaves(part, f"{name} {word}")


def test_every_command_and_its_long_options_are_on_their_page() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    usages = re.findall(r"^\| `(hybridrl [^`]+)` \|", text, re.MULTILINE)
    commands, wrong = dict(leaves(typer.main.get_command(app))), list[str]()
    assert len(commands) > 10
    for name, command in commands.items():
        told = " ".join(usage for usage in usages if f"{usage} ".startswith(f"{name} "))
        said = set(re.findall(r"--[a-z0-9-]+", told))
        known = [{*one.opts, *one.secondary_opts} for one in command.params]
        options = [names for names in known if any(word.startswith("--") for word in names)]
        wrong += [] if told else [name]
        wrong += [f"{name} {sorted(names)}" for names in options if not names & said]
        wrong += [f"{name} has no {word}" for word in said.difference(*options)]
    assert wrong == []


def test_configurations_of_the_documentation_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    num_loaded = 0
    for page, line in commands():
        given = parsed(line).params
        file = given.get("config")
        if file is None or not str(file).startswith("examples/"):
            continue
        load_config(file, given["overrides"] or [])
        num_loaded += 1
        assert (ROOT / file).exists(), (page, line)
    assert num_loaded > 8


def test_starters_of_the_documentation_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {line for _, line in commands() if " init " in f" {line} "}
    assert len(lines) >= 5
    for line in sorted(lines):
        words = shlex.split(line)[1:]
        # A row for every task.
        row = dict.fromkeys(("prompt", "answer", "response", "chosen", "rejected"), "a")
        (tmp_path / words[words.index("--prompts") + 1]).write_text(json.dumps(row))
        words += ["--output", str(tmp_path / "written.yaml")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{line}\n{done.exception}"
        load_config(tmp_path / "written.yaml")
        (tmp_path / "written.yaml").unlink()


def test_targets_of_make_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {w for page in pages() for w in re.findall(r"`make ([\w./-]+)", page.read_text())}
    named -= {"test-learning"}  # of a result's own command, of its commit
    named |= {
        w for p in pages() for line in fenced(p) for w in re.findall(r"^make ([\w./-]+)", line)
    }
    assert len(named) > 4 and named - targets == set()


@pytest.mark.full
def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """mkdocs comes with the extra `docs`, which `make test-full` installs."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config as load_site

    build(load_site(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "files" / "benchmarks" / "results" / "quickstart_cpu.json").exists()


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return found


def test_every_number_of_the_readme_cites_its_file() -> None:
    table = (ROOT / "README.md").read_text().split("## What is measured")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 5
    for row in rows:
        assert re.search(r"\]\((benchmarks|docs)/results/\w+\.json\)\) \|$", row), row


@pytest.mark.parametrize("page", ["README.md", "docs/guides/engines.md"])
def test_versions_of_engines_that_were_tested_are_told(page: str) -> None:
    text = (ROOT / page).read_text().lower()
    packages = [package for name in ENGINES if (package := engine_package(name)) is not None]
    versions = [version for package in packages for version in package.tested]
    assert len(versions) >= 3
    assert [version for version in versions if version not in text] == []


def test_runs_of_the_documentation_pass_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an example's own model, or a 7B, in the place of a run's or the hub's."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
    pictures = tmp_path / "pictures"
    run_path(str(ROOT / "examples" / "pictures" / "make_data.py"))["write_model"](pictures)
    planned = set()
    for page, line in commands():
        given = parsed(line).params
        file, overrides = str(given.get("config")), given.get("overrides") or []
        if not file.startswith("examples/") or (file, *overrides) in planned:
            continue
        planned.add((file, *overrides))
        config = load_config(file, overrides)
        if config.model.path is not None:
            folder = Path(file).parent / "model"
            local = folder if folder.exists() else tmp_path
            config = load_config(file, [*overrides, f"model.path={local}"])
        elif config.model.init is not None and not Path(config.model.init).exists():
            assert config.model.init == "runs/pictures/model"
            config = load_config(file, [*overrides, f"model.init={pictures}"])
        nodes = re.search(r"--nnodes=(\d+)", line)
        each = re.search(r"--nproc-per-node=(\d+)", line)
        size = given["world"] or int(nodes[1] if nodes else 1) * int(each[1] if each else 4)
        _, violations = plan_report(config, size)
        assert violations == [], f"{page}: {line}"
    assert len(planned) >= 8
