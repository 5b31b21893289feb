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
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Protocol

MAX_OUTPUT_BYTES = 1 << 20
# Folders of the host that commands see, and what they see of /etc.
PROGRAMS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
SETTINGS = (
    *("alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies"),
    *("fonts", "group", "host.conf", "hosts", "inputrc", "java-*", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "locale.alias", "localtime", "mime.types", "nsswitch.conf", "passwd"),
    *("perl", "pki", "profile", "protocols", "python3*", "resolv.conf", "services", "ssl/certs"),
    *("ssl/openssl.cnf", "timezone"),
)
TAKEN = {*PROGRAMS, "dev", "etc", "proc"}
USUAL_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Ended:
    """How a command ended; without a code if its time was over. Long output lacks its beginning."""

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

    async def clear(self, folders: Sequence[str]) -> None:
        """Empties folders whatever the rights of their content are, and creates those that are
        missing. Also empties the home folder and /tmp, except for the task's own folders there.
        Afterwards, commands can enter the working folder. Raises OSError if a folder is not empty.
        """

    async def close(self) -> None:
        """Removes the sandbox."""


class Bubbles:
    """Runs commands with bubblewrap. A command sees the host's programs (PROGRAMS, and SETTINGS of
    /etc) read-only, its own folders, and none of the host's other files, processes and network. It
    has no capabilities, even if it runs as root.

    Args:
        env: Environment variables, in addition to PATH, HOME and LANG.

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
            if parts[:1] != ("/",) or len(parts) < 2 or ".." in parts or parts[1] in TAKEN:
                allowed = f"an absolute path without .., outside of {', '.join(sorted(TAKEN))}"
                raise ValueError(f"folder of the sandbox: got {path!r}; allowed: {allowed}")
        self._root = Path(tempfile.mkdtemp(prefix="hybridrl-sandbox-"))
        self._workdir, self._env, self._network = workdir, dict(env or {}), network
        self._kept = (workdir, *folders)
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
        return await asyncio.to_thread(_content, self._place(path), self._root)

    async def clear(self, folders: Sequence[str]) -> None:
        await asyncio.to_thread(self._clear, [self._place(path) for path in folders])

    def _clear(self, folders: Sequence[Path]) -> None:
        # Moved away instead of deleted: this also works for read-only and very deep folders.
        removed = Path(tempfile.mkdtemp(prefix=".removed-", dir=self._root))
        for folder in folders:
            _as_folder(folder, self._root, removed)
            _move_content(folder, [], removed)
        kept = [self._place(path) for path in self._kept]
        for path in ("/tmp", USUAL_ENV["HOME"]):
            _move_content(self._place(path), kept, removed)
        for folder in kept:
            _as_folder(folder, self._root, removed)

    async def close(self) -> None:
        # Programs, because Python's rmtree fails for folders without rights and deep folders.
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            process = await asyncio.create_subprocess_exec(
                *command, str(self._root), stderr=asyncio.subprocess.DEVNULL
            )
            await process.wait()

    def _place(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if parts[:1] != ("/",) or ".." in parts or parts[1:2] == () or parts[1] not in self._tops:
            raise ValueError(f"path: got {path!r}; allowed: a path in one of {sorted(self._tops)}")
        return self._root.joinpath(*parts[1:])

    def _wrapped(self, command: Sequence[str]) -> list[str]:
        found = ["bwrap", "--die-with-parent", "--unshare-all", "--new-session", "--clearenv"]
        found += ["--cap-drop", "ALL", *_without_user_namespaces()]
        if self._network:
            found.append("--share-net")
        for entry in (Path("/", name) for name in PROGRAMS):
            if entry.is_symlink():
                found += ["--symlink", os.readlink(entry), str(entry)]
            elif entry.is_dir():
                found += ["--ro-bind", str(entry), str(entry)]
        for pattern in SETTINGS:
            for entry in sorted(Path("/etc").glob(pattern)):
                found += ["--ro-bind-try", str(entry), str(entry)]
        found += ["--proc", "/proc", "--dev", "/dev"]
        for top in sorted(self._tops):
            found += ["--bind", str(self._root / top), f"/{top}"]
        for name, value in {**USUAL_ENV, **self._env}.items():
            found += ["--setenv", name, value]
        return [*found, "--remount-ro", "/", "--chdir", self._workdir, "--", *command]


@cache
def _without_user_namespaces() -> tuple[str, ...]:
    """Returns the options that forbid new user namespaces, if this bubblewrap knows them."""
    options = ("--unshare-user", "--disable-userns")
    command = ["bwrap", *options, "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, check=False, capture_output=True)
    return () if tried.returncode else options


def _content(place: Path, root: Path) -> bytes | None:
    # A command may have put a link there that leads out of the sandbox, or to itself.
    with suppress(OSError, RuntimeError):
        inside = place.resolve().is_relative_to(root.resolve())
        if inside and not place.is_symlink() and place.is_file():
            with place.open("rb") as file:
                return file.read(MAX_OUTPUT_BYTES)
    return None


def _moved(place: Path, removed: Path) -> None:
    if not place.is_symlink() and place.is_dir():
        place.chmod(0o700)  # only a writable folder can be moved
    place.rename(Path(tempfile.mkdtemp(dir=removed), "it"))


def _as_folder(place: Path, root: Path, removed: Path) -> None:
    for part in [*reversed(place.relative_to(root).parents), place.relative_to(root)]:
        folder = root / part
        if folder.is_symlink() or not folder.is_dir():
            if os.path.lexists(folder):
                _moved(folder, removed)
            folder.mkdir()
        folder.chmod(folder.stat().st_mode | 0o700)


def _move_content(folder: Path, kept: Sequence[Path], removed: Path) -> None:
    if folder in kept:
        return
    folder.chmod(0o700)
    for entry in list(folder.iterdir()):
        is_above = any(one.is_relative_to(entry) for one in kept)
        if is_above and entry.is_dir() and not entry.is_symlink():
            _move_content(entry, kept, removed)
        else:
            _moved(entry, removed)


def _copy(source: Path, target: Path, root: Path) -> None:
    """Copies into `root`, over what is there, without following links that commands put there."""
    removed = Path(tempfile.mkdtemp(prefix=".removed-", dir=root))
    _as_folder(target.parent, root, removed)
    pairs = [(source, target)]
    if source.is_dir():
        inside = sorted(source.rglob("*"))  # folders come before their content
        pairs += [(path, target / path.relative_to(source)) for path in inside]
    for path, place in pairs:
        is_folder = path.is_dir() and not path.is_symlink()
        is_there = place.is_dir() and not place.is_symlink()
        if os.path.lexists(place) and not (is_folder and is_there):
            _moved(place, removed)
        if is_folder:
            place.mkdir(exist_ok=True)
            place.chmod(0o755)
        else:
            shutil.copy2(path, place, follow_symlinks=False)


async def _end_of(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    found = b""
    while part := await stream.read(1 << 16):
        found = (found + part)[-MAX_OUTPUT_BYTES:]
    return found
