"""One rank of the ring test: two hosts of unlike sizes send each other files.

With a bound on the size of files, as on a host without room, what fits still comes and nobody waits
in vain.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.parallel import ring
from hybridrl.parallel.ring import PARTIAL, HostRing, next_of

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
    assert place.exchange(folder, names) is None
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
    assert place.exchange(folder, names) is None
    assert [file.stat().st_ino for file in received] == places  # over what was there
    for source, file in zip(sources, received, strict=True):
        assert file.read_bytes() == content(source, "folder/large")[:1000:-1]
    for file in held:
        file.close()
    own.write_bytes(content(rank, "folder/large"))
    for file in folder.rglob("*_*"):
        if int(file.name[-1]) != rank:
            file.unlink()
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    failure = place.exchange(folder, names)
    assert (failure is not None) == (rank == 0), failure
    for source in sources:
        assert (folder / f"folder/large_{source}").exists() == (rank != 0)
    assert place.exchange(folder, []) is None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
