"""Places in which the commands of an agent run, apart from the agent itself. Imports only the
standard library.

`TaskSandbox` is the interface; `Bubbles` implements it on this host with bubblewrap. A class of
your own may use containers or another host.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

MAX_OUTPUT_BYTES = 1 << 20
PROGRAMS = {"bin", "etc", "lib", "lib32", "lib64", "sbin", "usr"}
# Folders of the host that a command does not see.
HIDDEN = {"home", "root", "tmp", "proc", "dev", "sys", "run", "mnt", "media", "srv", "work"}


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        code: Exit code; None if its time was over.
        output: Standard output and standard error, in order; the end if there is much.
    """

    code: int | None
    output: str


class TaskSandbox(Protocol):
    """A file system and processes for one episode."""

    async def put(self, source: Path, target: str) -> None:
        """Copies a file or folder of this host to a path of the sandbox, over what is there."""

    async def run(self, command: Sequence[str], timeout_s: float) -> Ended:
        """Runs a command in the working folder, and ends all its processes afterwards."""

    async def get(self, path: str) -> bytes | None:
        """Returns the content of a file; None if there is none."""

    async def close(self) -> None:
        """Removes the sandbox."""


class Bubbles:
    """Runs commands with bubblewrap. A command sees the host's programs read-only, its own folders,
    and none of the host's other files, processes and network.

    Args:
        workdir: Working folder, such as /app.
        folders: Further folders that commands may write to.
        env: Environment variables, in addition to PATH, HOME and LANG.
        network: Whether commands use the network of the host.

    Raises:
        FileNotFoundError: The program bwrap is not installed.
        ValueError: A folder would hide programs of the host.
    """

    def __init__(
        self,
        workdir: str,
        folders: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> None:
        if shutil.which("bwrap") is None:
            raise FileNotFoundError(
                "bwrap is not in PATH; install bubblewrap, or choose another sandbox"
            )
        for path in (workdir, *folders):
            parts = PurePosixPath(path).parts
            if parts[:1] != ("/",) or len(parts) < 2 or ".." in parts or parts[1] in PROGRAMS:
                allowed = f"an absolute path without .., outside of {', '.join(sorted(PROGRAMS))}"
                raise ValueError(f"folder of the sandbox: got {path!r}; allowed: {allowed}")
        self._root = Path(tempfile.mkdtemp(prefix="hybridrl-sandbox-"))
        self._workdir, self._env, self._network = workdir, dict(env or {}), network
        self._tops = {PurePosixPath(path).parts[1] for path in (workdir, *folders, "/tmp", "/home")}
        for path in (workdir, *folders, "/tmp", "/home"):
            self._place(path).mkdir(parents=True, exist_ok=True)

    async def put(self, source: Path, target: str) -> None:
        await asyncio.to_thread(_copy, source, self._place(target), self._root)

    async def run(self, command: Sequence[str], timeout_s: float) -> Ended:
        process = await asyncio.create_subprocess_exec(
            *self._wrapped(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        reading = asyncio.create_task(_end_of(process.stdout))
        try:
            with suppress(TimeoutError):
                code = await asyncio.wait_for(process.wait(), timeout_s)
        finally:
            # The first process of the sandbox ends; the kernel then ends all others.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return Ended(code, (await reading).decode("utf-8", errors="replace"))

    async def get(self, path: str) -> bytes | None:
        place = self._place(path)
        # A command may have put a link there that leads out of the sandbox.
        inside = place.resolve().is_relative_to(self._root.resolve())
        if not inside or place.is_symlink() or not place.is_file():
            return None
        with place.open("rb") as file:
            return file.read(MAX_OUTPUT_BYTES)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    def _place(self, path: str) -> Path:
        """Returns the host's path of a path in one of the sandbox's own folders."""
        parts = PurePosixPath(path).parts
        if parts[:1] != ("/",) or ".." in parts or parts[1:2] == () or parts[1] not in self._tops:
            raise ValueError(f"path: got {path!r}; allowed: a path in one of {sorted(self._tops)}")
        return self._root.joinpath(*parts[1:])

    def _wrapped(self, command: Sequence[str]) -> list[str]:
        found = ["bwrap", "--die-with-parent", "--unshare-all", "--new-session", "--clearenv"]
        if self._network:
            found.append("--share-net")
        for entry in sorted(Path("/").iterdir()):
            if entry.name in HIDDEN | self._tops:
                continue
            if entry.is_symlink():
                found += ["--symlink", os.readlink(entry), str(entry)]
            elif entry.is_dir():
                found += ["--ro-bind", str(entry), str(entry)]
        found += ["--proc", "/proc", "--dev", "/dev"]
        for top in sorted(self._tops):
            found += ["--bind", str(self._root / top), f"/{top}"]
        usual = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home", "LANG": "C.UTF-8"}
        for name, value in {**usual, **self._env}.items():
            found += ["--setenv", name, value]
        return [*found, "--chdir", self._workdir, "--", *command]


def _copy(source: Path, target: Path, root: Path) -> None:
    """Copies a file or folder into `root` without following links that commands have put there."""
    for parent in [*reversed(target.relative_to(root).parents), target.relative_to(root)]:
        if (root / parent).is_symlink():
            (root / parent).unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    pairs = [(source, target)]
    if source.is_dir():
        inside = sorted(source.rglob("*"))  # folders come before their content
        pairs += [(path, target / path.relative_to(source)) for path in inside]
    for path, place in pairs:
        if place.is_symlink():
            place.unlink()
        if path.is_dir() and not path.is_symlink():
            place.mkdir(exist_ok=True)
        else:
            shutil.copy2(path, place, follow_symlinks=False)


async def _end_of(stream: asyncio.StreamReader | None) -> bytes:
    """Returns the last MAX_OUTPUT_BYTES of a stream."""
    assert stream is not None
    found = b""
    while part := await stream.read(1 << 16):
        found = (found + part)[-MAX_OUTPUT_BYTES:]
    return found
