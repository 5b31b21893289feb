"""A separate Python environment for worker processes. Does not import torch.

A process there sees hybridrl and the user's modules, but no other package of the run's environment,
so that packages with conflicting requirements can be used.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hybridrl.agents.command import scrubbed_environment

MODULE = "hybridrl.agents.function_worker"
PACKAGE = Path(__file__).parents[1]  # the package hybridrl
CHECK_S = 120.0
Done = subprocess.CompletedProcess[str]


class OwnEnvironment:
    """The environment of the interpreter `python`, for worker processes."""

    def __init__(self, python: str) -> None:
        self.python = str(Path(python).expanduser().absolute())
        # A folder with nothing but hybridrl, because its usual folder may contain other packages.
        self._folder = tempfile.TemporaryDirectory(prefix="hybridrl-agents-")
        package = Path(self._folder.name) / PACKAGE.name
        package.symlink_to(PACKAGE, target_is_directory=True)

    def variables(self) -> dict[str, str]:
        """Returns environment variables of its processes: its paths, and this process's HOME."""
        own = os.environ.get("PYTHONPATH")
        paths = [self._folder.name, *([own] if own else []), os.getcwd()]
        programs = [str(Path(self.python).parent), os.environ.get("PATH", os.defpath)]
        return {
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join(paths),
            "VIRTUAL_ENV": str(Path(self.python).parents[1]),
            "HOME": os.environ.get("HOME", "/"),
        }

    def run(self, arguments: Sequence[str], timeout_s: float | None = None, text: str = "") -> Done:
        """Runs the interpreter with `text` as its standard input, and returns its output. Raises
        OSError if it cannot be started, and subprocess.TimeoutExpired after `timeout_s`.
        """
        return subprocess.run(
            [self.python, *arguments],
            env=scrubbed_environment(self.variables()),
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def check(self, path: str) -> str | None:
        """Imports a function there. Returns what went wrong; None if nothing did."""
        try:
            done = self.run(["-m", MODULE, path, "--check"], CHECK_S)
        except subprocess.TimeoutExpired:
            return f"Importing it takes longer than {CHECK_S:g} s."
        except OSError as error:
            return f"{self.python} could not be started: {error.strerror}."
        if done.returncode == 0:
            return None
        lines = (done.stdout + done.stderr).strip().splitlines()
        return f"{self.python} could not import it: {lines[-1] if lines else 'no message'}."

    def close(self) -> None:
        self._folder.cleanup()
