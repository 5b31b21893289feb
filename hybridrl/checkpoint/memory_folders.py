"""Folders of copies in host memory: their paths, usable copies, and who writes them to disk.

`/dev/shm/hybridrl-UID/RUN/step_N` on each host contains some of the files of a checkpoint, which
outlive the processes, but not the host. RUN is an identifier in the run folder (`copies_id`), so a
run folder that was deleted and created again does not find the old copies. No torch.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hybridrl.checkpoint.folders import PARTIAL, STEP_FOLDER
from hybridrl.checkpoint.host_memory import available_bytes
from hybridrl.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_DIGEST,
    Ancestor,
    Manifest,
    read_manifest,
)
from hybridrl.checkpoint.reading import MOST_THREADS, in_threads
from hybridrl.errors import CheckpointError

MEMORY = Path("/dev/shm")
RUN_ID = "copies_id"  # in a run folder
OF_RUN = "run"  # file in a folder of copies: path and identifier of the run folder
DEVICE = "device"  # file in a folder of copies: device number of the file system of `run.dir`
GENERATIONS = 2  # number of copies: one is complete while the next is written
SHARDED = ".distcp"  # file name suffix that torch uses for sharded tensors


@dataclass(frozen=True)
class HostFiles:
    """A run's files on one host: bytes by step and path, and readable manifests by step."""

    ranks: Sequence[int]
    sizes: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    manifests: Mapping[int, Manifest] = field(default_factory=dict)


def run_id(run_folder: Path) -> str:
    """Returns a run folder's identifier, made if missing; OSError if it is unreadable."""
    file = run_folder / RUN_ID
    with suppress(FileNotFoundError, UnicodeDecodeError):
        found = file.read_text(encoding="ascii").strip()
        if found.isalnum():
            return found
    found = secrets.token_hex(8)
    run_folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(RUN_ID + PARTIAL)
    partial.write_text(found + "\n", encoding="ascii")
    partial.replace(file)
    return found


def host_folder(number: str) -> Path:
    return MEMORY / f"hybridrl-{os.getuid()}" / number


def make_host_folder(run_folder: Path, number: str) -> None:
    """Creates the folder for a run's copies; removes those of runs that no longer exist. Raises
    OSError if there is no memory file system, or the folder belongs to another user.
    """
    folder = host_folder(number)
    if not MEMORY.is_dir():
        raise FileNotFoundError(None, f"no {MEMORY}")
    with suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700)
    found = folder.parent.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o077:
        raise PermissionError(
            None, f"{folder.parent} is not a folder that only this user can access"
        )
    for file in folder.parent.glob(f"*/{OF_RUN}"):
        if _is_orphan(file):
            shutil.rmtree(file.parent, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    (folder / OF_RUN).write_text(f"{number}\n{run_folder.absolute()}\n", encoding="utf-8")
    with suppress(FileNotFoundError):  # this host may not see the run folder
        (folder / DEVICE).write_text(f"{run_folder.absolute().parent.stat().st_dev}\n", "ascii")


def _is_orphan(file: Path) -> bool:
    """Whether it is certain that the run that a file OF_RUN names no longer exists. This is certain
    only if the folder is missing or was created again, while its parent is readable and on the same
    file system as before. Otherwise the file system may be temporarily unavailable, or not mounted.
    """
    try:
        number, _, run_folder = file.read_text(encoding="utf-8").strip().partition("\n")
        run_dir, name = os.path.split(run_folder)
        with suppress(FileNotFoundError):  # earlier versions did not write this file
            if int(file.with_name(DEVICE).read_text("ascii")) != os.stat(run_dir).st_dev:
                return False  # the folder may be an empty mount point
        try:
            found = Path(run_folder, RUN_ID).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            # Do not use `exists`: a network file system may cache that a file is missing, but not
            # the listing of a folder.
            return name not in os.listdir(run_dir) or RUN_ID not in os.listdir(run_folder)
        return found.isalnum() and found != number
    except (OSError, ValueError):
        return False


def remove_copies(number: str, keep: Sequence[int] = ()) -> None:
    """Removes a run's copies from this host except steps to keep; if none, also the folder."""
    folder = host_folder(number)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the folder still contains copies of other runs
            folder.parent.rmdir()
        return
    dropped = [path for step, path in _steps(folder) if step not in keep]
    # The kernel frees the memory of a file in the call that removes it, so several threads remove
    # files in parallel.
    files = [file for path in dropped for file in path.rglob("*") if file.is_file()]
    in_threads([partial(_remove_file, file) for file in files], MOST_THREADS)
    for path in dropped:
        shutil.rmtree(path, ignore_errors=True)


def _remove_file(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def renew_copy(number: str, step: int, complete: int | None, parts: Sequence[str]) -> None:
    """Reuses the folder of an old copy on this host for the next copy, of a `step`.

    The manifest is removed first, so that the old copy is no longer valid. The sharded files in
    `parts` are overwritten, because freeing and allocating memory takes as long as writing. The
    copy of step `complete` is kept.
    """
    new = host_folder(number) / f"step_{step}"
    found = {old: path for old, path in _steps(host_folder(number)) if old != complete}
    old = found.pop(max(found)) if found else new
    for path in found.values():
        shutil.rmtree(path, ignore_errors=True)
    if old.exists():
        for name in (MANIFEST, MANIFEST_DIGEST):
            (old / name).unlink(missing_ok=True)
        old.rename(new)
        keep_files(new, lambda path: path.suffix == SHARDED)
    for part in parts:
        (new / part).mkdir(parents=True, exist_ok=True)


def keep_files(folder: Path, is_kept: Callable[[Path], bool]) -> None:
    for path in list(folder.rglob("*")):
        if not path.is_dir() and not is_kept(path):
            path.unlink()


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step_*"):
        if match := STEP_FOLDER.fullmatch(path.name):
            yield int(match[1]), path


def files_of_host(number: str, ranks: Sequence[int]) -> HostFiles:
    """Lists the files that this host, which runs `ranks`, stores for the copies of a run."""
    sizes: dict[int, dict[str, int]] = {}
    manifests: dict[int, Manifest] = {}
    for step, folder in _steps(host_folder(number)):
        sizes[step] = {}
        for path in folder.rglob("*"):
            with suppress(OSError):  # files may be removed at the same time
                if path.is_file():
                    sizes[step][path.relative_to(folder).as_posix()] = path.stat().st_size
        if MANIFEST in sizes[step] and MANIFEST_DIGEST in sizes[step]:
            with suppress(CheckpointError):  # the copy was still being written
                manifests[step] = read_manifest(folder)[0]
    return HostFiles(ranks, sizes, manifests)


def usable(
    hosts: Sequence[HostFiles], newest: Ancestor | None
) -> Iterator[tuple[int, Manifest, dict[str, int]]]:
    """Yields the copies from which the run can continue, newest first: the step, the manifest and,
    for each file, the rank that writes it to disk.

    A copy must be newer than the newest checkpoint, which is in its history, unless the user went
    back to an earlier checkpoint or removed some. A checkpoint that was being written when the copy
    was taken may be missing, because ranks failed; the yielded manifest then omits it.
    """
    manifests = {step: found for host in hosts for step, found in host.manifests.items()}
    for step in sorted(manifests, reverse=True):
        manifest = manifests[step]
        if newest is not None:
            comes_after = newest in manifest.lineage and step > newest.step
        else:
            comes_after = all(one == manifest.unfinished for one in manifest.lineage)
        if not comes_after:
            continue
        there = [one for one in manifest.lineage if one == newest or one != manifest.unfinished]
        manifest = manifest.model_copy(update={"lineage": there, "unfinished": None})
        writers: dict[str, int] = {}
        loads = {rank: 0 for host in hosts for rank in host.ranks}
        for name, entry in manifest.files.items():
            having = [
                rank
                for host in hosts
                if host.sizes.get(step, {}).get(name) == entry.bytes
                for rank in host.ranks
            ]
            if not having:
                break
            writers[name] = min(having, key=lambda rank: (loads[rank], rank))
            loads[writers[name]] += entry.bytes
        else:
            yield step, manifest, writers


def free_bytes(reserved: int = 0) -> int:
    """Returns the bytes of host memory that copies may use: at most half of what is free, because
    checkpoints and file reads also need some, and the free space of the memory file system.
    `reserved` is the number of bytes that checkpoints have allocated; if negative, that they have
    yet to allocate.
    """
    found, available = os.statvfs(MEMORY), available_bytes()
    return min(found.f_bavail * found.f_frsize, available, (available + reserved) // 2)
