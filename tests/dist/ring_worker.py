"""One rank of the ring test: two hosts of unlike sizes send each other files; three hosts copy.

With a bound on the size of files, as on a host without room, what fits still comes and nobody waits
in vain. So it is where a file is gone, or a rank fails otherwise: each wait here has a bound.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.checkpoint import begun_copy, memory_folders
from hybridrl.checkpoint.memory_copies import MemoryCopies
from hybridrl.checkpoint.memory_folders import files_of_host, host_folder, usable
from hybridrl.checkpoint.writing import Content, ModelFiles
from hybridrl.parallel import heartbeat, ring
from hybridrl.parallel.groups import World
from hybridrl.parallel.ring import PARTIAL, HostRing, close_connections, next_of
from hybridrl.platform import Platform

HOSTS = ((0,), (1, 2))
SIZES = {"small": 5, "empty": 0, "folder/large": 200_003}  # of several chunks


def content(rank: int, name: str) -> bytes:
    seed = torch.Generator().manual_seed(100 * rank + len(name))
    numbers = torch.randint(0, 256, (SIZES[name],), dtype=torch.uint8, generator=seed)
    return numbers.numpy().tobytes()


def main() -> None:
    root = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ring.CHUNK_BYTES = 60_000
    folder = root / str(rank)
    (folder / "folder").mkdir(parents=True)
    names = []
    for name in SIZES:
        (folder / f"{name}_{rank}").write_bytes(content(rank, name))
        names.append(f"{name}_{rank}")
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    place = HostRing(group, HOSTS)
    assert exchange(place, folder, names) is None
    sources = [source for source, target in next_of(HOSTS).items() if target == rank]
    for source in sources:
        for name in SIZES:
            assert (folder / f"{name}_{source}").read_bytes() == content(source, name)
    assert not list(folder.rglob(f"*{PARTIAL}"))
    received = [folder / f"folder/large_{source}" for source in sources]
    places = [file.stat().st_ino for file in received]
    held = [file.open("rb") for file in received]  # or a new file might get the same number
    own = folder / f"folder/large_{rank}"
    own.write_bytes(content(rank, "folder/large")[:1000:-1])
    assert exchange(place, folder, names) is None
    assert [file.stat().st_ino for file in received] == places  # over what was there
    for source, file in zip(sources, received, strict=True):
        assert file.read_bytes() == content(source, "folder/large")[:1000:-1]
    for file in held:
        file.close()
    own.write_bytes(content(rank, "folder/large"))
    for file in folder.rglob("*_*"):
        if int(file.name[-1]) != rank:
            file.unlink()
    with_limit = (100_000, resource.RLIM_INFINITY)
    without_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, with_limit)
    failure = exchange(place, folder, names)
    assert (failure is not None) == (rank == 0), failure
    for source in sources:
        assert (folder / f"folder/large_{source}").exists() == (rank != 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, without_limit)
    for gone in range(3):
        if rank == gone:
            own.unlink()
        failure = exchange(place, folder, names)
        assert (failure is not None) == (rank == gone), failure
        own.write_bytes(content(rank, "folder/large"))
    assert exchange(place, folder, names) is None
    closed_connections(group, folder, place)
    copies_of_three_hosts(root)
    dist.destroy_process_group()


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns what a call returns or raises on a thread that must end in time."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"a call has not ended within {seconds} s"
    return found[0]


def exchange(place: HostRing, folder: Path, names: list[str]) -> Exception | None:
    """Returns what failed on this rank."""
    found = within(20, lambda: place.exchange(folder, names))
    assert isinstance(found, tuple), found
    return found[0]


def closed_connections(group: dist.ProcessGroup, folder: Path, place: HostRing) -> None:
    """Ranks close connections when they fail or notice it, which wakes all that wait."""

    def work() -> None:
        place.exchange(folder, [])
        dist.all_reduce(torch.zeros(1), group=group)

    if dist.get_rank() != 2:
        assert isinstance(within(20, work), RuntimeError)
    close_connections(group)


def copies_of_three_hosts(root: Path) -> None:
    """Each rank is a host. Copies with lost files or failed threads do not count; nobody hangs."""
    rank = dist.get_rank()
    heartbeat.host_id = lambda: f"host {rank}"
    memory_folders.MEMORY = root / f"memory of {rank}"
    memory_folders.MEMORY.mkdir()
    world = World(Platform(torch.device("cpu"), "gloo"), 60)
    said: list[str] = []
    copies = MemoryCopies(root / "runs" / "run", world, said.append)
    copies.start(0, 1000)
    step = 0

    def copy() -> bool:
        nonlocal step
        step += 1
        files = ModelFiles({}, "qwen3", "bfloat16", root)
        took = copies.take(Content({}, {"step": step}, files, step), waits=True)
        copies.seal({})
        assert copies._begun is not None
        within(20, copies._begun._thread.join)
        return took

    def usable_steps() -> list[int]:
        found = world.gather_objects(files_of_host(copies._number, world.host_ranks))
        return [step for step, *_ in usable(found, None)]

    assert copy()
    assert usable_steps() == [1]
    for culprit, (moment, fails) in enumerate(MOMENTS.items()):
        folder, before = host_folder(copies._number) / f"step_{step + 1}", step
        real = HostRing.exchange, json.loads, begun_copy.write_digested, begun_copy.rng_file
        seal = MemoryCopies.seal
        if rank == culprit % 3:
            fails(folder)
        assert copy(), moment
        HostRing.exchange, json.loads = real[:2]  # type: ignore[method-assign]
        MemoryCopies.seal = seal  # type: ignore[method-assign]
        begun_copy.write_digested, begun_copy.rng_file = real[2:]
        # The copy before is whole, and is not written over by the next one.
        assert usable_steps()[-1] == before, (moment, usable_steps())
        assert copy(), moment
        assert usable_steps() == [step, before], (moment, usable_steps(), said)
        assert len(said) == 1 and f"the copy of step {before} is kept" in said[0], (moment, said)
        assert f"rank{'s' * ('later' in moment)} {culprit % 3}" in said[0], (moment, said)
        said.clear()
        copies._num_failed = 0
    copies.close()
    assert not (root / f"memory of {rank}" / "hybridrl-0").exists() or rank


def before_exchange(number: int, act: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what lets something happen on this rank before so many exchanges of the next copy."""

    def fails(folder: Path) -> None:
        real, done = HostRing.exchange, 0

        def exchange(self: HostRing, *given: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                act(folder)
            return real(self, *given)

        HostRing.exchange = exchange  # type: ignore[method-assign]

    return fails


def before_seal(act: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what lets something happen on this rank once all files are where they shall be."""

    def fails(folder: Path) -> None:
        real = MemoryCopies.seal

        def seal(self: MemoryCopies, *given: Any) -> None:
            assert self._begun is not None
            while len(self._begun.sizes) < 2:
                time.sleep(0.01)
            act(folder)
            real(self, *given)

        MemoryCopies.seal = seal  # type: ignore[method-assign]

    return fails


def remove(name: str) -> Callable[[Path], None]:
    """Returns what removes the files of a name."""

    def act(folder: Path) -> None:
        for file in folder.glob(name):
            file.unlink()

    return act


def raise_in(module: Any, name: str, error: BaseException) -> Callable[[Path], None]:
    """Returns what makes the next call of a function of a module fail."""

    def fails(folder: Path) -> None:
        def fail(*given: Any, **named: Any) -> Any:
            raise error

        setattr(module, name, fail)

    return fails


MOMENTS = {
    "a rank's own file before it is sent": before_exchange(1, remove("rng_*")),
    "all before anything is sent": before_exchange(1, remove("*")),
    "what was received": before_seal(remove("rng_*")),
    "what was received, later": before_exchange(2, remove("rng_*")),
    "a MemoryError while files are written": raise_in(begun_copy, "write_digested", MemoryError()),
    "a ValueError where none is expected": raise_in(begun_copy, "rng_file", ValueError("odd")),
    "a broken header": raise_in(json, "loads", ValueError("not JSON")),
}


if __name__ == "__main__":
    main()
