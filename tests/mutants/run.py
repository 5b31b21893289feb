"""Plants faults in a copy of the package, one at a time, and says which of them the tests find.

    python tests/mutants/run.py [NAME ...] [--suite test|full] [--jobs N] [--out FILE] [--whole]

A fault is an entry of a YAML file beside this one: a text of a source file, and what stands in its
place. The checkout itself is never changed. Each job has a copy of the tracked files in a temporary
folder and an interpreter whose `hybridrl` is that copy. The interpreter has the packages of the one
that runs this script, but not what that one has installed in editable form: an environment variable
would not do, since `hybridrl.kernels` is a folder beside the package, and some tests start
processes without it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

FAULTS = Path(__file__).resolve().parent
ROOT = FAULTS.parents[1]
KEYS = {"name", "breaks", "file", "old", "new", "found_by"}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where it is installed, is faster
# Of pytest: https://docs.pytest.org/en/stable/reference/exit-codes.html
ALL_PASSED, SOME_FAILED, INTERRUPTED, NOTHING_SELECTED = 0, 1, 2, 5
# Finds the copy's package before an installed one.
FINDER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

PLACES = {{"hybridrl": {package!r}, "hybridrl.kernels": {kernels!r}}}


class Copied:
    @staticmethod
    def find_spec(name, path=None, target=None):
        place = PLACES.get(name)
        if place is None:
            return None
        return spec_from_file_location(
            name, place + "/__init__.py", submodule_search_locations=[place]
        )


sys.meta_path.insert(0, Copied)
"""
IS_COPY = """
import hybridrl, hybridrl.algorithms, hybridrl.kernels.reference, sys
places = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "hybridrl"]
others = [place for place in places if not place.startswith(sys.argv[-1])]
sys.exit(f"imported from elsewhere: {others}" if others else 0)
"""
RANKS_ARE_COPY = """
import sys
from pathlib import Path
from hybridrl.services.launch.local_ranks import launch
code, logs, root = sys.argv[1:]
sys.exit(launch([root], 2, Path(logs), program=("-c", code)))
"""


@dataclass(frozen=True)
class Mutant:
    """A planted fault: `new` in the place of `old`, which occurs once in `file`.

    `breaks` says what a user would suffer; `found_by` has tests, likeliest and fastest first;
    `area` is the list's file without ending.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    found_by: tuple[str, ...]
    area: str


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a fault: `by` is the test, or how the run ended.

    `whole` says whether the complete suite was needed.
    """

    name: str
    area: str
    file: str
    breaks: str
    found: bool
    by: str
    whole: bool
    seconds: float


def read_mutants(folder: Path = FAULTS) -> list[Mutant]:
    """Returns the faults in a folder's YAML files; ValueError for missing or unknown keys."""
    found = []
    for file in sorted(folder.glob("*.yaml")):
        for entry in yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER):
            if set(entry) != KEYS:
                wrong = sorted(set(entry) ^ KEYS)
                raise ValueError(f"{file.name}: {entry.get('name')}: wrong keys {wrong}")
            tests = tuple(entry["found_by"])
            texts = {key: str(entry[key]) for key in KEYS - {"found_by"}}
            found.append(Mutant(**texts, found_by=tests, area=file.stem))
    return found


def mutated(mutant: Mutant, source: str) -> str:
    """Returns a source with the fault; ValueError if `old` does not occur exactly once."""
    if (count := source.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: `old` occurs {count} times in {mutant.file}, not once")
    return source.replace(mutant.old, mutant.new)


class Copy:
    """A copy of the tracked files in `folder`, and an interpreter that imports the package there.

    RuntimeError if one of its processes, or a rank that it starts, imports another package.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._environment = folder / "tree", folder / "python"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            source, target = ROOT / name, self.tree / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self._make_interpreter()
        self._check_imports(folder)

    @property
    def python(self) -> str:
        """Path of the interpreter."""
        return str(self._environment / "bin" / "python")

    def _make_interpreter(self) -> None:
        """Makes an environment beside this script's own, with its packages and its commands."""
        venv.create(self._environment, symlinks=True)
        (packages,) = (self._environment / "lib").glob("python*/site-packages")
        finder = FINDER.format(
            package=str(self.tree / "hybridrl"), kernels=str(self.tree / "kernels")
        )
        (packages / "_copied.py").write_text(finder, encoding="utf-8")
        # A folder that a .pth file names is searched, but its own .pth files are not read.
        places = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
        (packages / "copied.pth").write_text("\n".join([*places, "import _copied", ""]))
        own = f"#!{sys.executable}".encode()
        for command in Path(sys.executable).parent.iterdir():
            target = self._environment / "bin" / command.name
            if target.exists() or not command.is_file():
                continue
            content = command.read_bytes()
            if content.startswith(own):
                target.write_bytes(content.replace(own, f"#!{self.python}".encode(), 1))
                target.chmod(0o755)

    def _check_imports(self, folder: Path) -> None:
        root = f"{self.tree}/"
        for arguments in (
            ["-c", IS_COPY, root],
            ["-I", "-c", IS_COPY, root],
            ["-c", RANKS_ARE_COPY, IS_COPY, str(folder / "logs"), root],
        ):
            done = subprocess.run(
                [self.python, *arguments],
                cwd=self.tree,
                env=self._variables(),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"the copy's package is not what is imported: {done.stderr}")

    def _variables(self, full: bool = False) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # As `make test-full` starts the tests of several processes.
        cold = {"HYBRIDRL_COLD_STARTS": "1"} if full else {}
        return {**kept, "OMP_NUM_THREADS": "1", **cold}

    def plant(self, mutant: Mutant) -> None:
        """Puts a fault into the copy."""
        self._write(mutant.file, mutated(mutant, (ROOT / mutant.file).read_text(encoding="utf-8")))

    def mend(self, mutant: Mutant) -> None:
        """Takes it out again."""
        self._write(mutant.file, (ROOT / mutant.file).read_text(encoding="utf-8"))

    def _write(self, file: str, source: str) -> None:
        path = self.tree / file
        path.write_text(source, encoding="utf-8")
        # Bytecode of a source of the same size and second would pass for this one's.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: Sequence[str], full: bool, limit_s: float) -> tuple[int | None, str]:
        """Runs these tests, or all, until the first failure.

        Returns the exit code, None after `limit_s`, when all processes are ended, and the output.
        """
        command = [self.python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [*(("-m", "") if full else ()), *tests]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self._variables(full),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(limit_s)
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read().decode("utf-8", "replace")


def judged(code: int | None, output: str) -> tuple[bool, str]:
    """Returns whether pytest found a fault, and the test; RuntimeError if it could not run."""
    if code is None:
        return True, "the time limit"
    if code in (SOME_FAILED, INTERRUPTED):
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return True, named[1] if named else f"pytest's exit code {code}"
    if code in (ALL_PASSED, NOTHING_SELECTED):
        return False, "" if code == ALL_PASSED else "no selected test"
    if code < 0:  # a crash of the interpreter
        return True, f"signal {-code}"
    raise RuntimeError(f"pytest ended with {code}:\n{output[-2000:]}")


def run_one(copy: Copy, mutant: Mutant, arguments: argparse.Namespace) -> Outcome:
    """Plants a fault, runs the tests that should find it, if asked for all, and mends it."""
    began, full, whole = time.monotonic(), arguments.suite == "full", False
    copy.plant(mutant)
    try:
        found, by = judged(*copy.test(mutant.found_by, full, arguments.limit_s))
        if not found and arguments.whole:
            whole = True
            found, by = judged(*copy.test((), full, arguments.whole_limit_s))
    finally:
        copy.mend(mutant)
    about = mutant.name, mutant.area, mutant.file, mutant.breaks
    return Outcome(*about, found, by, whole, round(time.monotonic() - began, 1))


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Returns the faults of these names or areas, else all; SystemExit for an unknown name."""
    known = {mutant.name for mutant in mutants} | {mutant.area for mutant in mutants}
    if unknown := sorted(set(names) - known):
        raise SystemExit(f"no fault and no area is called {', '.join(unknown)}")
    return [one for one in mutants if not names or {one.name, one.area} & set(names)]


def check_baseline(copy: Copy, mutants: Sequence[Mutant], full: bool, limit_s: float) -> None:
    """Raises SystemExit if a test fails without a fault."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.found_by))
    print(f"without a fault: {len(tests)} tests and files", flush=True)
    code, output = copy.test(tests, full, limit_s * len(mutants))
    if code not in (ALL_PASSED, NOTHING_SELECTED):
        raise SystemExit(f"the tests fail without a fault:\n{output[-4000:]}")


def run_all(mutants: Sequence[Mutant], arguments: argparse.Namespace) -> list[Outcome]:
    """Judges the faults, several at a time, and prints each outcome as it is known."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    outcomes: list[Outcome] = []
    failures: list[BaseException] = []
    printing = threading.Lock()

    def work(copy: Copy) -> None:
        while not failures:
            try:
                outcome = run_one(copy, waiting.get_nowait(), arguments)
            except queue.Empty:
                return
            except BaseException as error:  # raised again below
                failures.append(error)
                return
            with printing:
                outcomes.append(outcome)
                said = f"found by {outcome.by}" if outcome.found else "SURVIVED"
                if not outcome.found and outcome.by:
                    said += f" ({outcome.by})"
                place = f"[{len(outcomes)}/{len(mutants)}]"
                print(f"{place} {outcome.name}: {said}, {outcome.seconds:.0f} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="hybridrl-mutants-") as folder:
        os.chmod(folder, 0o755)  # sandboxed programs are other users
        first = Copy(Path(folder, "0"))
        if arguments.baseline:
            check_baseline(first, mutants, arguments.suite == "full", arguments.limit_s)
        copies = [first, *(Copy(Path(folder, str(job))) for job in range(1, arguments.jobs))]
        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    order = {mutant.name: number for number, mutant in enumerate(mutants)}
    return sorted(outcomes, key=lambda outcome: order[outcome.name])


def report(outcomes: Sequence[Outcome], suite: str) -> dict[str, Any]:
    """Returns what is written as JSON."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    num_found = sum(outcome.found for outcome in outcomes)
    return {
        "commit": git("rev-parse", "HEAD"),
        "is_modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "suite": suite,
        "num_faults": len(outcomes),
        "num_found": num_found,
        "share_found": num_found / max(len(outcomes), 1),
        "faults": [asdict(outcome) for outcome in outcomes],
    }


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault or an area; default: all")
    suites: tuple[Literal["test"], Literal["full"]] = ("test", "full")
    parser.add_argument(
        "--suite",
        choices=suites,
        default="test",
        help="whose tests count: those of make test (default), or of make test-full",
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at a time")
    parser.add_argument("--out", type=Path, help="file for the outcomes, as JSON")
    parser.add_argument(
        "--whole", action="store_true", help="run the complete suite where found_by passes"
    )
    parser.add_argument(
        "--no-baseline",
        dest="baseline",
        action="store_false",
        help="do not first check that the tests pass without a fault",
    )
    parser.add_argument("--limit-s", type=float, default=1200.0, help="longest run of found_by")
    parser.add_argument("--whole-limit-s", type=float, default=7200.0, help="and of a suite")
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the command line; returns 1 where a fault survived."""
    arguments = parsed()
    mutants = chosen(read_mutants(), arguments.names)
    outcomes = run_all(mutants, arguments)
    survivors = [outcome.name for outcome in outcomes if not outcome.found]
    found = len(outcomes) - len(survivors)
    print(f"{found} of {len(outcomes)} found ({found / max(len(outcomes), 1):.0%})")
    for name in survivors:
        print(f"  survived: {name}")
    if arguments.out is not None:
        content = json.dumps(report(outcomes, arguments.suite), indent=1) + "\n"
        arguments.out.write_text(content, encoding="utf-8")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
