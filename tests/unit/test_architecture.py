"""The shape of the code: imports point down, third parties stay behind walls.

Read from the syntax tree, so imports inside functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from hybridrl.rollout.registry import ENGINES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hybridrl"

# A part may import parts of a lower number and itself, and what EXTRA grants.
LEVELS = {
    "cli": 10,
    "services": 9,
    "debug": 9,
    "loop": 8,
    "generation": 7,
    "roles": 7,
    "agents": 6,
    "training": 5,
    "rollout": 5,
    "rewards": 5,
    "environments": 5,
    "hybrid_engine": 4,
    "checkpoint": 4,
    "algorithms": 4,
    "data": 4,
    "metrics": 4,
    "models": 3,
    "parallel": 2,
    "ops": 2,
    "contracts": 1,
    "config": 1,
    "platform": 1,
    "console": 0,
    "errors": 0,
    "versions": 0,
    "kernels": 0,
    "_C": 0,
    "": 0,  # hybridrl/__init__.py: the version
}
EXTRA = {
    # Users' code is run the same way: in processes that can be killed.
    ("environments", "hybridrl.rewards.outcome"),
    ("environments", "hybridrl.rewards.pool"),
    ("environments", "hybridrl.rewards.worker"),
    # The sampler takes turns from agents as it takes them from environments.
    ("generation", "hybridrl.agents.backend"),
    ("generation", "hybridrl.agents.host"),
    # Here the Python interface is put together from the core and its services.
    ("", "hybridrl.loop.trainer"),
    ("", "hybridrl.parallel.watch"),
    ("", "hybridrl.services.liveness"),
    # The table of engines is data, by which configurations are judged.
    ("config", "hybridrl.rollout.registry"),
    ("metrics", "hybridrl.services.report.html_page"),
}
REGISTRY = "rollout/registry.py"
WALLS = {
    "megatron": [
        "parallel/*",
        "models/megatron/*",
        "training/optimizer.py",
        "checkpoint/model_state.py",
        "checkpoint/optimizer_*.py",
        "checkpoint/random_states.py",
        "checkpoint/sharded_files.py",
        "checkpoint/torch_dist_format.py",
        "platform.py",
    ],
    "transformer_engine": [
        "platform.py",
        "models/megatron/frozen_linear.py",
        "models/megatron/prefix_attention.py",
        "models/megatron/te_attention.py",
    ],
    "vllm": ["rollout/vllm/*"],
    "sglang": ["rollout/sglang/*"],
    "triton": ["../kernels/*"],
    "aiohttp": ["agents/endpoint.py", "agents/http_requests.py", "agents/task_server.py"],
    "ray": ["services/launch/ray_cluster.py"],
    "wandb": ["metrics/trackers.py"],
    "mlflow": ["metrics/trackers.py"],
    "hybridrl.kernels": ["ops.py", "../kernels/*"],
    "hybridrl._C": ["ops.py"],
}
TORCH_FREE = [
    "__init__.py",
    "console.py",
    "errors.py",
    "versions.py",
    "config/*.py",
    "environments/*.py",
    "agents/*.py",
    "cli/*.py",
    "services/launch/*.py",
    "services/cluster_check/*.py",
    "services/planner/*.py",
    "parallel/host_cores.py",
    "parallel/host_gpus.py",
    "parallel/layout.py",
    "parallel/stop_signals.py",
    "training/muon_matrices.py",
    *(f"models/{name}.py" for name in ("weights", "cuts", "family", "families/*")),
    *(f"models/vision/{name}.py" for name in ("images", "shape")),
    "hybrid_engine/planning/*.py",
    "rollout/vllm/model_folder.py",
    "rollout/common/installed_package.py",
    "rollout/registry.py",
    "rollout/sglang/version.py",
    "rollout/vllm/version.py",
    "training/batches/packing.py",
    "generation/spread.py",
    "metrics/flops.py",
    "loop/preflight.py",
]
WITH_TORCH = {"hybrid_engine/planning/direct.py"}


@dataclass(frozen=True)
class Import:
    """One import statement: where it is and the full name of what it takes."""

    file: str
    line: int
    name: str


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def relative(path: Path) -> str:
    inside = path.is_relative_to(PACKAGE)
    return str(path.relative_to(PACKAGE)) if inside else f"../{path.relative_to(ROOT)}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, for_types: bool = False) -> list[Import]:
    return list(_imports(path, for_types))


def _imports(path: Path, for_types: bool) -> Iterator[Import]:
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):  # imports are statements
            continue
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        waiting += node.orelse if is_for_types and not for_types else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(relative(path), node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            for alias in node.names:
                yield Import(relative(path), node.lineno, f"{node.module}.{alias.name}")


def part_of_file(file: str) -> str:
    if file.startswith("../kernels"):
        return "kernels"
    name = file.split("/")[0].removesuffix(".py")
    return part(name)


def part(name: str) -> str:
    return name.replace("__init__", "")


def part_of_import(name: str) -> str:
    words = name.split(".")
    inner = words[1] if len(words) > 1 else ""
    return part(inner) if part(inner) in LEVELS else ""


def test_every_module_has_a_level() -> None:
    unknown = {relative(path) for path in sources() if part_of_file(relative(path)) not in LEVELS}
    assert not unknown, "say in LEVELS where these stand"


def test_imports_point_down() -> None:
    wrong = []
    for path in sources():
        for found in imports(path):
            if found.name.split(".")[0] != "hybridrl":
                continue
            source, target = part_of_file(found.file), part_of_import(found.name)
            is_granted = any(
                source == who and (found.name + ".").startswith(what + ".") for who, what in EXTRA
            )
            if source != target and LEVELS[target] >= LEVELS[source] and not is_granted:
                wrong.append(f"{found.file}:{found.line} {source} imports {found.name}")
    assert wrong == []


def modules() -> dict[str, Path]:
    """The package's modules by their full names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules that import themselves over others, or at once."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [*graph[start]]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += graph[name]
        return found

    return sorted(name for name in graph if name in reached(name))


def test_no_module_imports_itself_over_others() -> None:
    """Imports within functions and for types count too; but for the package's lazy export."""
    known = modules()
    graph = {
        name: {
            target
            for found in imports(path, for_types=True)
            for target in (found.name, found.name.rpartition(".")[0])
            if target in known and target != "hybridrl"
        }
        for name, path in known.items()
        if name != "hybridrl"
    }
    assert cycles(graph) == []


def test_runs_without_agents_do_not_import_the_server() -> None:
    """aiohttp is an optional package, so only imports inside functions may lead to it."""
    known = modules()
    waiting, reached = ["hybridrl.loop.build", "hybridrl.cli.main"], set[str]()
    while waiting:
        if (name := waiting.pop()) in reached or name not in known:
            continue
        reached.add(name)
        for node in tree_of(known[name]).body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                waiting += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [one.name for one in node.names]
    assert "hybridrl.generation.sampler" in reached
    assert "hybridrl.agents.endpoint" not in reached


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


@pytest.mark.parametrize("wall", WALLS)
def test_third_party_stays_behind_its_wall(wall: str) -> None:
    outside = [
        f"{found.file}:{found.line}"
        for path in sources()
        for found in imports(path)
        if (found.name + ".").startswith(wall + ".")
        and not any(fnmatch(found.file, allowed) for allowed in WALLS[wall])
    ]
    assert outside == []


def engine_choices(tree: ast.AST) -> Iterator[int]:
    """Yields lines that depend on an engine's name: comparisons, `in`, match, and look-ups."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asked: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Dict):
            asked = [key for key in node.keys if key is not None]
        else:
            continue
        found = (n for one in asked for n in (one, *ast.iter_child_nodes(one)))
        if any(isinstance(n, ast.Constant) and n.value in ENGINES for n in found):
            yield node.lineno  # type: ignore[attr-defined]


def test_only_the_registry_goes_by_the_name_of_an_engine() -> None:
    asked = [
        f"{relative(path)}:{line}"
        for path in sources()
        if relative(path) != REGISTRY
        for line in engine_choices(tree_of(path))
    ]
    assert asked == [], "give EngineTraits what is asked for"


@pytest.mark.parametrize(
    "fault",
    [
        "if engine == 'vllm': pass",
        "sleeps = config.rollout.engine != 'hf'",
        "if engine in ('hf', 'scripted'): pass",
        "if engine in {'scripted'}: pass",
        "match engine:\n    case 'hf' | 'vllm': pass",
        "make = {'hf': 1}[engine]",
    ],
)
def test_an_engine_asked_for_by_name_is_found(fault: str) -> None:
    assert list(engine_choices(ast.parse(fault)))


# Commands whose result is what they print, and what runs or prints for code of users.
RESULTS = {
    *(f"cli/{name}.py" for name in ("bench", "top")),
    *(f"services/cluster_check/{name}.py" for name in ("check", "probe", "gpu_links")),
}
MAY_PRINT = {
    *RESULTS,
    "console.py",
    *(f"services/sandbox/{one}.py" for one in ("contain", "program", "rpc")),
}


WRITING = ("print", "os.write", "os.fdopen", "open", "sys.stdout.write", "sys.stderr.write")


def console_writes(tree: ast.AST) -> Iterator[int]:
    """Yields lines that write to the console by another way than `hybridrl.console`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("__stdout__", "__stderr__"):
            yield node.lineno
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called not in WRITING:
            continue
        given = [ast.unparse(one) for one in node.args[:1]]
        to = [ast.unparse(one.value) for one in node.keywords if one.arg == "file"]
        is_printed = called == "print" and to in ([], ["sys.stdout"], ["sys.stderr"])
        is_past = called in WRITING[1:4] and given in (["1"], ["2"])
        if is_printed or is_past or called in WRITING[4:]:
            yield node.lineno


def test_the_console_is_written_to_where_it_cannot_fail() -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in sources()
        if relative(path) not in MAY_PRINT
        for line in console_writes(tree_of(path))
    ]
    assert found == [], "use hybridrl.console.say"


@pytest.mark.parametrize(
    "fault",
    [
        "print(1)",
        "print(1, file=sys.stderr, flush=True)",
        "os.write(2, b'')",
        "sys.__stderr__.flush()",
        "sys.stdout.write('')",
    ],
)
def test_another_way_to_the_console_is_found(fault: str) -> None:
    assert list(console_writes(ast.parse(fault)))
    assert not list(console_writes(ast.parse("print(1, file=file)\nsay('')")))


def test_every_engine_is_an_adapter_that_only_the_registry_names() -> None:
    assert [traits.builder for traits in ENGINES.values()] == [
        (
            f"hybridrl.rollout.{name}:build"
            if (PACKAGE / "rollout" / f"{name}.py").exists()
            else f"hybridrl.rollout.{name}.adapter:build"
        )
        for name in ENGINES
    ]
    named = [
        f"{found.file}:{found.line}"
        for path in sources()
        if not relative(path).startswith("rollout/")
        for found in imports(path)
        for name in ENGINES
        if (found.name + ".").startswith(f"hybridrl.rollout.{name}.")
    ]
    assert named == []


def test_torch_free_modules_import_no_torch() -> None:
    found = [path for pattern in TORCH_FREE for path in sorted(PACKAGE.glob(pattern))]
    files = [path for path in found if relative(path) not in WITH_TORCH]
    modules = [
        ".".join(("hybridrl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in files
    ]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(modules) > 15
