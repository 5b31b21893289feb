"""Opens one checkpoint on all ranks. If a rank finds damage, all ranks raise the same error.

Rank 0 chooses and checks the checkpoint. Then each rank waits until it sees the same manifest,
because shared file systems show new files late.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.folders import Checkpoint, SavedState, find_checkpoint, with_remedy
from hybridrl.checkpoint.manifest import MANIFEST, read_manifest
from hybridrl.checkpoint.run_lock import Notify
from hybridrl.errors import CheckpointError, OtherModelError
from hybridrl.parallel.groups import Agreement, World

# How long a rank waits for a folder that rank 0 sees: shared file systems keep listings for a while
# (NFS: up to 60 s by default).
STALE_LISTING_S = 90.0
POLL_S = 0.5


def open_on_all_ranks(
    path: Path, world: World, notify: Notify = print
) -> tuple[Checkpoint, SavedState]:
    """Opens on every rank the checkpoint that rank 0 finds at `path`, complete. Only rank 0's state
    contains rollouts, which may not fit into the memory of every rank. Raises CheckpointError on
    all ranks if the checkpoint is damaged, or if ranks see different ones.
    """
    with world.all_agree("finding the checkpoint") as agreement:
        found = find_checkpoint(path) if world.rank == 0 else None
        agreement.value = (str(path), found)
    differing = [rank for rank, seen in enumerate(agreement.values) if seen[0] != str(path)]
    if differing:
        named = ", ".join(f"rank {rank}: {agreement.values[rank][0]}" for rank in differing[:8])
        raise CheckpointError(
            "the checkpoint to load",
            f"{path} on rank {world.rank}; {named}",
            "the same path on all ranks",
            "",
        )
    folder: Path = agreement.values[0][1]
    rollouts: dict[str, Any] = {}
    with damage_is_told(world, "reading the checkpoint", folder, notify) as agreement:
        if world.rank == 0:
            checkpoint = Checkpoint.open(folder)
            state = checkpoint.check()
            rollouts = state.rollouts
            agreement.value = (checkpoint.digest, state.model_dump(exclude={"rollouts"}))
    digest, saved = agreement.values[0]
    with world.all_agree("reading the manifest"):
        checkpoint = _wait_for(folder, digest, world)
    if world.rank == 0 and not checkpoint.manifest.has_digests:
        notify(f"{folder} has no digests, because an older version wrote it: it is not verified")
    return checkpoint, SavedState.model_validate({**saved, "rollouts": rollouts})


def _wait_for(folder: Path, digest: str, world: World) -> Checkpoint:
    """Waits until this rank sees the manifest that rank 0 sees, and returns the checkpoint."""
    deadline = time.monotonic() + STALE_LISTING_S
    while True:
        try:
            manifest, found = read_manifest(folder)
            if found == digest:
                return Checkpoint(folder, manifest, digest)
            seen = f"a manifest with digest {found}"
        except CheckpointError as error:
            seen = f"{error.name}: {error.value}"
        if time.monotonic() > deadline:
            raise CheckpointError(
                str(folder / MANIFEST),
                f"{seen}, on rank {world.rank}, host {socket.gethostname()}, after "
                f"{STALE_LISTING_S:g} s",
                f"a manifest with digest {digest}, which rank 0 sees",
                "All ranks must see the same files: check that the file system is shared.",
            )
        time.sleep(POLL_S)


@contextmanager
def damage_is_told(
    world: World, what: str, folder: Path, notify: Notify = print, is_unbounded: bool = False
) -> Iterator[Agreement]:
    """Raises, for a block that reads a checkpoint, the same error on all ranks.

    It names the newest undamaged checkpoint in the folder, unless the checkpoint `folder` is
    undamaged and belongs to another model. `what` describes the block in errors. The block must not
    contain collectives, unless one that fails on one rank ends on all.
    """
    with world.all_agree(what, is_unbounded) as agreement:
        try:
            yield agreement
        except CheckpointError as error:
            agreement.value = error
    errors = [one for one in agreement.values if isinstance(one, CheckpointError)]
    if not errors:
        return
    damages = [one for one in errors if not isinstance(one, OtherModelError)]
    if not damages:
        raise errors[0]
    with world.all_agree("finding another checkpoint") as other:
        if world.rank == 0:
            other.value = with_remedy(damages[0], folder, notify)
    raise other.values[0]
