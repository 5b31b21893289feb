"""One rank of the test of what ranks see of a checkpoint: checkpoint_ranks_worker.py FOLDER

Every rank meets the same error, whichever rank met the cause.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch
from command_line import QUICKSTART
from small_runs import SMALL, files_of_at_most

from hybridrl import Trainer
from hybridrl.checkpoint import opening
from hybridrl.checkpoint.manifest import read_manifest
from hybridrl.checkpoint.model_state import saved_bytes
from hybridrl.errors import CheckpointError

FOLDER = Path(sys.argv[1])
ROOT = FOLDER / "quickstart-grpo" / "checkpoints"
STEPS = ("steps.num_steps=4", "checkpoint.every=2", "checkpoint.keep=9")


def refusal(trainer: Trainer, path: Path) -> str:
    """Returns the error of loading a path; the same on all ranks."""
    try:
        trainer.load_checkpoint(path)
    except CheckpointError as error:
        assert trainer.world.gather_objects(str(error)) == [str(error)] * 2, error
        return str(error)
    raise AssertionError(f"rank {trainer.world.rank} loaded {path}")


def other_paths(trainer: Trainer) -> None:
    rank = trainer.world.rank
    try:
        trainer.load_checkpoint(ROOT / f"step_{2 * (rank + 1)}")
    except CheckpointError as error:
        assert f"step_{2 * (2 - rank)}" in str(error), error
    else:
        raise AssertionError("ranks loaded different checkpoints")


def stale_listings(trainer: Trainer) -> None:
    """Rank 1 sees the manifest of another step for a while, as of a cached listing."""
    looks = []

    def stale(folder: Path) -> tuple[object, str]:
        looks.append(time.monotonic())
        return read_manifest(ROOT / "step_2" if len(looks) < 4 else folder)

    if trainer.world.rank == 1:
        opening.read_manifest = stale  # type: ignore[assignment]
    trainer.load_checkpoint(ROOT / "step_4")
    assert trainer.step == 4 and len(looks) == (4 if trainer.world.rank == 1 else 0)
    opening.STALE_LISTING_S = 1.0
    if trainer.world.rank == 1:
        opening.read_manifest = lambda folder: read_manifest(ROOT / "step_2")
    message = refusal(trainer, ROOT / "step_4")
    assert "on rank 1, host " in message and "shared" in message, message
    opening.read_manifest = read_manifest


def newest_is_rank_0s(trainer: Trainer) -> None:
    """The choice is rank 0's, also where another rank's listing lacks it."""
    trainer.store.root = ROOT if trainer.world.rank == 0 else FOLDER / "empty"
    assert trainer.store.newest() == ROOT / "step_4"
    trainer.store.root = ROOT


def damage_that_one_rank_reads(trainer: Trainer) -> None:
    copy = FOLDER / "damaged"
    if trainer.world.rank == 0:
        shutil.copytree(ROOT, copy)
        for name in ("rng_rank_1.safetensors", "policy/__1_0.distcp"):
            file = copy / "step_4" / name
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    trainer.world.gather_objects(None)
    message = refusal(trainer, copy)
    assert "__1_0.distcp" in message and f"{copy / 'step_2'}: train with" in message, message
    if trainer.world.rank == 0:
        shutil.copyfile(
            ROOT / "step_4" / "policy" / "__1_0.distcp", copy / "step_4/policy/__1_0.distcp"
        )
    trainer.world.gather_objects(None)
    message = refusal(trainer, copy)
    assert "rng_rank_1" in message, message


def sizes_are_known_before(trainer: Trainer) -> None:
    """What memory is reserved for is what copies take."""
    store = trainer.store
    store.save(9, trainer.trained, {}, trainer.source.files, waits=False)
    store.finish()
    took, told = store._copies.num_bytes, sum(map(saved_bytes, trainer.trained.values()))
    assert 0.98 * took <= told <= 1.02 * took, (took, told)
    shutil.rmtree(ROOT / "step_9", ignore_errors=True)
    trainer.world.gather_objects(None)


def a_disk_that_is_full_on_one_rank(trainer: Trainer) -> None:
    trainer.train_step()
    size = 10_000 if trainer.world.rank == 1 else 1 << 40
    try:
        with files_of_at_most(size):
            trainer.save_checkpoint()
    except CheckpointError as error:
        assert "step_5" in str(error), error
    else:
        raise AssertionError("saved on a full disk")
    assert not (ROOT / "step_5").exists()
    trainer.save_checkpoint()
    trainer.load_checkpoint(ROOT / "step_5")


def main() -> None:
    torch.set_num_threads(1)
    knobs = [*SMALL, f"run.dir={FOLDER}", "train.tp=2", *STEPS]
    trainer = Trainer.from_config(QUICKSTART / "grpo.yaml", knobs)
    trainer.fit()
    other_paths(trainer)
    stale_listings(trainer)
    newest_is_rank_0s(trainer)
    damage_that_one_rank_reads(trainer)
    trainer.load_checkpoint(ROOT / "step_4")
    sizes_are_known_before(trainer)
    trainer.load_checkpoint(ROOT / "step_4")
    a_disk_that_is_full_on_one_rank(trainer)
    trainer.close()


if __name__ == "__main__":
    main()
