"""Folders of copies in host memory: where they lie, which one is complete, who writes its files.

Owns `/dev/shm/hybridrl-UID/RUN/step_N` on each host: files of a checkpoint, of which a host has
some. They stay when processes end, and go with the host. RUN is a number that the run folder keeps
(`copies_id`), so that a folder which was begun anew finds none of them. No torch.
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
OF_RUN = "run"  # in a folder of copies: the run folder, and the number that it had
DEVICE = "device"  # likewise: of the file system of `run.dir`
GENERATIONS = 2  # of copies: one is complete while the next is written
SHARDED = ".distcp"  # torch's ending of files of sharded tensors


@dataclass(frozen=True)
class HostFiles:
    """What a host has of a run's copies.

    Args:
        ranks: of the host.
        sizes: of each file in bytes, by step and then by path.
        manifests: of those steps whose manifest is there.
    """

    ranks: Sequence[int]
    sizes: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    manifests: Mapping[int, Manifest] = field(default_factory=dict)


def run_id(run_folder: Path) -> str:
    """Returns the number of a run folder, which is made where there is none.

    Raises:
        OSError: there may be one that cannot be read now; with another the run's copies would be
            lost.
    """
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
    """Returns where this host keeps the copies of a run."""
    return MEMORY / f"hybridrl-{os.getuid()}" / number


def make_host_folder(run_folder: Path, number: str) -> None:
    """Makes the folder of a run's copies, and removes those of runs that are no more.

    Raises:
        OSError: there is no memory file system, or the folder is another user's.
    """
    folder = host_folder(number)
    if not MEMORY.is_dir():
        raise FileNotFoundError(None, f"no {MEMORY}")
    with suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700)
    found = folder.parent.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o077:
        raise PermissionError(None, f"{folder.parent} is not a folder of this user alone")
    _remove_orphans(folder.parent)
    folder.mkdir(exist_ok=True)
    (folder / OF_RUN).write_text(f"{number}\n{run_folder.absolute()}\n", encoding="utf-8")
    with suppress(FileNotFoundError):  # of a host that does not see the run folder
        (folder / DEVICE).write_text(f"{run_folder.absolute().parent.stat().st_dev}\n", "ascii")


def _remove_orphans(root: Path) -> None:
    for file in root.glob(f"*/{OF_RUN}"):
        if _is_orphan(file):
            shutil.rmtree(file.parent, ignore_errors=True)


def _is_orphan(file: Path) -> bool:
    """Returns whether a run is certainly no more: in the file system where its `run.dir` was, this
    can be read and has no such run folder, or one that was begun anew. A file system that is away
    for a while, or that this container lacks, says nothing about the run.

    Args:
        file: OF_RUN of its copies.
    """
    try:
        number, _, run_folder = file.read_text(encoding="utf-8").strip().partition("\n")
        run_dir, name = os.path.split(run_folder)
        with suppress(FileNotFoundError):  # earlier versions wrote none
            if int(file.with_name(DEVICE).read_text("ascii")) != os.stat(run_dir).st_dev:
                return False  # an empty mount point, for example
        try:
            found = Path(run_folder, RUN_ID).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            # A network file system may remember for a while that a file was not there: lists are
            # read anew.
            return name not in os.listdir(run_dir) or RUN_ID not in os.listdir(run_folder)
        return found.isalnum() and found != number
    except (OSError, ValueError):
        return False


def remove_copies(number: str, keep: Sequence[int] = ()) -> None:
    """Removes a run's copies from this host.

    Args:
        number: of the run.
        keep: steps whose copies stay; without any the folder goes too.
    """
    folder = host_folder(number)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other runs' are in it
            folder.parent.rmdir()
        return
    dropped = [path for step, path in _steps(folder) if step not in keep]
    # The kernel frees a file's memory in the call that removes it, so files go beside each other.
    files = [file for path in dropped for file in path.rglob("*") if file.is_file()]
    in_threads([partial(_remove_file, file) for file in files], MOST_THREADS)
    for path in dropped:
        shutil.rmtree(path, ignore_errors=True)


def _remove_file(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def renew_copy(number: str, step: int, complete: int | None, parts: Sequence[str]) -> None:
    """Makes the folder of a run's next copy on this host, of the copy before the complete one.

    Its sharded files stay, to be written over: taking new memory for them, and giving theirs back,
    each takes as long as writing. It counts no more before any of them changes.

    Args:
        number: of the run.
        step: of the next copy.
        complete: step of the copy that stays; None: there is none.
        parts: folders in a copy.
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
    """Removes all files of a folder, and of those in it, but for some."""
    for path in list(folder.rglob("*")):
        if not path.is_dir() and not is_kept(path):
            path.unlink()


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step_*"):
        if match := STEP_FOLDER.fullmatch(path.name):
            yield int(match[1]), path


def files_of_host(number: str, ranks: Sequence[int]) -> HostFiles:
    """Returns what this host has of a run's copies.

    Args:
        number: of the run.
        ranks: of the host.
    """
    sizes: dict[int, dict[str, int]] = {}
    manifests: dict[int, Manifest] = {}
    for step, folder in _steps(host_folder(number)):
        sizes[step] = {}
        for path in folder.rglob("*"):
            with suppress(OSError):  # somebody removes files there
                if path.is_file():
                    sizes[step][path.relative_to(folder).as_posix()] = path.stat().st_size
        if MANIFEST in sizes[step] and MANIFEST_DIGEST in sizes[step]:
            with suppress(CheckpointError):  # it was being written
                manifests[step] = read_manifest(folder)[0]
    return HostFiles(ranks, sizes, manifests)


def usable(
    hosts: Sequence[HostFiles], newest: Ancestor | None
) -> Iterator[tuple[int, Manifest, dict[str, int]]]:
    """Yields the copies from which the run can go on, the newest first: step, manifest, and the
    rank that writes each file, one whose host has it.

    A copy is newer than the newest checkpoint, which it comes after; where the user has gone back,
    or has removed checkpoints, it does not. A checkpoint that was being written when the copy was
    taken may be missing all the same: ranks were lost before it was complete. The manifest that is
    given then has nothing of it.

    Args:
        hosts: all that are there.
        newest: the newest checkpoint; None: there is none.
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
    """Returns how much copies may take of this host's memory: half of what is free, since
    checkpoints and files that are read need some too, and no more than the memory file system has.

    Args:
        reserved: what checkpoints have of it already. Negative: what will be taken before.
    """
    found, available = os.statvfs(MEMORY), available_bytes()
    return min(found.f_bavail * found.f_frsize, available, (available + reserved) // 2)
