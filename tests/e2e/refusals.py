"""Runs the command line in a folder of its own, as a user would, and judges how it refuses.

What is asked of every refusal: exit code 2, one message without a traceback, and no file anywhere
in the folder added, removed or changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
QUICKSTART = TESTS.parent / "examples" / "quickstart"
TIMEOUT_S = 120


def hybridrl(
    folder: Path, *arguments: str, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Runs `hybridrl ARGUMENTS` in `folder` to its end; modules of tests/ and tests/e2e import."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "e2e"))),
    }
    return subprocess.run(
        [sys.executable, "-m", "hybridrl.cli.main", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def succeed(folder: Path, *arguments: str) -> str:
    """Runs a command that must end with code 0; returns its stdout."""
    done = hybridrl(folder, *arguments)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files_below(folder: Path) -> dict[str, bytes | None]:
    """Returns the content of every file, and None for every folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refuse(
    folder: Path,
    arguments: Sequence[str],
    *expected: str,
    num_messages: int = 1,
    has_begun: bool = False,
    leaves_logs: bool = False,
) -> str:
    """Runs a command that must be refused; returns its `num_messages` lines, with all `expected`.

    With `has_begun`, ranks of an older run meet the mistake: they may write logs, config.yaml and
    run.json and add files, but change no others. With `leaves_logs`, those of a new run meet it.
    """
    before = files_below(folder)
    done = hybridrl(folder, *arguments)
    shown = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 2, shown
    assert "Traceback" not in done.stdout + done.stderr, shown
    messages = done.stderr.splitlines()
    assert len(messages) == num_messages, shown
    for text in expected:
        assert text in done.stderr, f"{text!r} is not in\n{shown}"
    for message in messages:
        assert len(message) < 500, shown
        is_named = any(text in message for text in ("got ", "unknown key", "is missing"))
        has_both = (is_named and "llowed:" in message) or "expected" in message
        assert has_both, f"no value or nothing that is allowed in\n{shown}"
        assert message.rstrip().endswith((".", "?", "]", "'")), f"no remedy in\n{shown}"
    after = files_below(folder)
    if leaves_logs:
        left = {name for name in after if name.startswith("runs")}
        logs = [name for name in left if Path(name).match("runs/*/logs/*")]
        parents = {str(path) for name in logs for path in Path(name).parents}
        assert logs and left <= {*logs, *parents}, f"{sorted(left)}\n{shown}"
        after = {name: new for name, new in after.items() if name not in left}
    if has_begun:
        written = {
            name for name in before if name.startswith("runs/") and _every_start_writes(Path(name))
        }
        before = {name: old for name, old in before.items() if name not in written}
        after = {name: new for name, new in after.items() if name in before}
    assert after.keys() == before.keys(), f"{sorted(after.keys() ^ before.keys())}\n{shown}"
    assert after == before, f"{[name for name in after if after[name] != before[name]]}\n{shown}"
    return done.stderr


def _every_start_writes(path: Path) -> bool:
    return path.parent.name == "logs" or path.parts[2:] in {("config.yaml",), ("run.json",)}
