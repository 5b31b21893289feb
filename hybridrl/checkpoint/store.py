"""Saves and loads the checkpoints of a run. Collective.

A checkpoint is the folder `checkpoints/step_N`. It contains a sharded part for each trained model
(`policy/`, `critic/`), in Megatron's format, `state.json` (the state of the training loop), `hf/`
(config.json and tokenizer files, so that the checkpoint can be converted without other files),
`rng_rank_R.safetensors`, and `manifest.json` with digests of the other files, which reveals files
that were lost or changed later. The folder is written as `step_N.partial` and renamed when it is
complete. It can be loaded in any layout of ranks. All ranks must see the same folder under the same
path; rank 0 chooses and checks the checkpoint, and each rank verifies the files that it reads.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from hybridrl.checkpoint.folders import (
    Checkpoint,
    SavedState,
    newest_first,
    newest_whole,
    step_folders,
)
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.manifest import Ancestor, damaged, read_listed
from hybridrl.checkpoint.model_state import Saved, load_model
from hybridrl.checkpoint.opening import Notify, damage_is_told, open_on_all_ranks
from hybridrl.checkpoint.random_states import rng_file, set_rng_state
from hybridrl.checkpoint.saved_adapters import check_adapters, check_passed_over
from hybridrl.checkpoint.writing import (
    BegunCheckpoint,
    Content,
    ModelFiles,
    put_back_replaced,
    remove_leftovers,
    write_errors_are_told,
)
from hybridrl.errors import CheckpointError
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.groups import World
from hybridrl.parallel.waiting_room import BarrierOutcome, timed_barrier

# Number of ancestors in a manifest in addition to the checkpoints that are kept, because some older
# checkpoints may not have been removed yet.
KEPT_BEYOND = 20
# Seconds that ranks wait for each other after an error, to complete the checkpoint that is being
# written. Ranks that end because of the same error arrive much sooner.
COME_S = 3.0
_NUMBERS = count()  # numbers the checkpoints that this process begins, identically on all ranks


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that a thread is writing, and the run's lineage once it is complete. `number` is
    identical on all ranks; `attempts` counts the calls of `complete_at_end`.
    """

    begun: BegunCheckpoint
    lineage: list[Ancestor]
    writing: threading.Thread
    number: int = field(default_factory=partial(next, _NUMBERS))
    attempts: Iterator[int] = field(default_factory=count)


class CheckpointStore:
    """Saves and loads the checkpoints of one run.

    Args:
        root: The run's `checkpoints` folder.
        keep: Number of the newest checkpoints of the run's lineage to keep.
        layout: Layout of the models, as text; random states are restored only in the same layout.
        grace_s: Maximum seconds for which ranks finish writing after an error or at the run's end.

    Attributes:
        copy_in_memory: Copy in host memory from which the run continues, and its lineage, newest
            first. None after the next checkpoint is complete.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        keep: int,
        notify: Notify = print,
        layout: str = "",
        grace_s: float = 30.0,
    ) -> None:
        self.root, self.world, self.keep, self._notify = root, world, keep, notify
        self.layout, self._grace_s = layout, grace_s
        self.copy_in_memory: tuple[Path, Sequence[Ancestor]] | None = None
        self._lineage: list[Ancestor] = []  # lineage of the current state, newest first
        self._copies = HostCopies()
        self._pending: _Pending | None = None  # the checkpoint that is being written

    def put_back_replaced(self) -> None:
        """Restores the name of a checkpoint being replaced. Only the lock's holder may call it."""
        with self.world.all_agree("preparing the checkpoint folder"):
            if self.world.rank == 0:
                put_back_replaced(self.root)

    def newest(self, before_step: int | None = None) -> Path | None:
        """Returns the newest checkpoint, below a step if given, without changing files."""

        def choose() -> Path | None:
            steps = {folder: step for step, folder in step_folders(self.root).items()}
            return next(
                (
                    folder
                    for folder in newest_first(self.root)
                    if before_step is None or steps[folder] < before_step
                ),
                None,
            )

        return self._decide("choosing the checkpoint", choose)

    def previous(self) -> Path:
        """Returns the newest undamaged checkpoint except the newest; CheckpointError if none."""

        def choose() -> Path:
            newest = next(newest_first(self.root), None)
            whole = newest_whole(self.root, newest, self._notify) if newest is not None else None
            if whole is None:
                raise CheckpointError(
                    str(self.root),
                    "no undamaged checkpoint" + (f" other than {newest.name}" if newest else ""),
                    "an undamaged checkpoint before the newest one, for --resume previous",
                    "Leave out --resume, or restore a checkpoint from a backup.",
                )
            return whole

        return self._decide("choosing the checkpoint", choose)

    def _decide(self, what: str, choose: Callable[[], Path | None]) -> Any:
        with self.world.all_agree(what) as agreement:
            if self.world.rank == 0:
                agreement.value = choose()
        return agreement.values[0]

    def save(
        self,
        step: int,
        models: Mapping[str, Saved],
        state: Mapping[str, Any],
        files: ModelFiles,
        waits: bool = True,
    ) -> Path:
        """Writes the checkpoint for a step, and removes old ones if there are more than `keep`.

        If an earlier checkpoint is still being written, it is completed first. `state` is the
        loop's, as JSON values. Without `waits`, all tensors are copied to host memory, a thread
        writes the files, and `finish` completes the checkpoint. Raises CheckpointError if a file of
        this or of the previous checkpoint could not be written.
        """
        self.finish()
        folder = self.root / f"step_{step}"
        order = self._decide_order()
        lineage = [old for old in self._lineage if old.step != step]
        content = Content(models, state, files, step, order, lineage, self.layout)
        begun = BegunCheckpoint(folder, self.world, content, None if waits else self._copies)
        begun.begin()
        after = [Ancestor(step=step, order=order), *lineage][: self.keep + KEPT_BEYOND]
        writing = threading.Thread(target=begun.write, name="checkpoint", daemon=True)
        self._pending = _Pending(begun, after, writing)
        if waits:
            self.finish()
        else:
            writing.start()
        return folder

    def reserve(self, num_bytes: int) -> None:
        """Begins, at the first call, to reserve host memory for this rank's part (`num_bytes`)."""
        self._copies.reserve(num_bytes, len(self.world.host_ranks))

    @property
    def reserved_bytes(self) -> int:
        return self._copies.reserved_bytes

    @property
    def lineage(self) -> list[Ancestor]:
        """Checkpoints in the current state's history, newest first, which may be unfinished."""
        return list(self._lineage if self._pending is None else self._pending.lineage)

    @property
    def unfinished(self) -> Ancestor | None:
        """First entry of `lineage` if this checkpoint is still being written, otherwise None."""
        return None if self._pending is None else self._pending.lineage[0]

    def finish_if_written(self) -> Path | None:
        """Calls `finish` if all ranks have written their files; else returns None. Collective."""
        if self._pending is None:
            return None
        is_done = torch.tensor(int(not self._pending.writing.is_alive()))
        if int(self.world.sum_on_host(is_done)) < self.world.size:
            return None
        return self.finish()

    def finish(self) -> Path | None:
        """Completes the checkpoint that is being written and returns its folder. Collective. If a
        file could not be written, removes all of its files and raises CheckpointError.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        if pending.writing.ident is not None:
            pending.writing.join()
        pending.begun.complete()
        self._lineage, self.copy_in_memory = pending.lineage, None
        if self.world.rank == 0:
            self._remove_old(self._lineage)
        return pending.begun.folder

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Calls `complete_at_end` if its block raises an error, which is raised again."""
        try:
            yield
        except Exception:
            self.complete_at_end(is_after_error=True)
            raise

    def complete_at_end(self, is_after_error: bool = False) -> None:
        """Completes the checkpoint that is being written, if all ranks finish within `grace_s`.
        Reports why it is not complete; all ranks may then call this method again. After an error
        that may keep some ranks from calling it, ranks wait for COME_S instead.
        """
        if self._pending is None:
            return
        pending, world, grace_s = self._pending, self.world, self._grace_s
        name = f"checkpoint/{pending.number}/{next(pending.attempts)}"
        come_s = min(COME_S, grace_s) if is_after_error else grace_s
        with world.heartbeat.part("completing the checkpoint"):
            outcome = timed_barrier(
                name,
                world.size,
                grace_s,
                come_s,
                lambda: not pending.writing.is_alive(),
                world.has_lost,
            )
        why = {
            BarrierOutcome.UNREADY: "not all ranks had written their files within "
            f"run.grace_s={grace_s:g}",
            BarrierOutcome.LATE: "not all ranks were ready to complete it within "
            + (f"{come_s:g} s of an error" if is_after_error else f"run.grace_s={grace_s:g}"),
            BarrierOutcome.LOST: "a rank is lost",
        }.get(outcome, "")
        try:
            if outcome is BarrierOutcome.READY:
                self.finish()
        except (CheckpointError, PeerError) as error:
            why = str(error)
        folder = f"{pending.begun.folder}, which was being written,"
        self._notify(f"{folder} is not complete: {why}" if why else f"{folder} is complete")

    def _decide_order(self) -> int:
        what = "preparing the checkpoint folder"
        with write_errors_are_told(self.world, what, self.root) as agreement:
            if self.world.rank == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.root, "step_*")
                orders = [ancestor.order for ancestor in self._lineage]
                for folder in step_folders(self.root).values():
                    try:
                        orders.append(Checkpoint.open(folder).manifest.order)
                    except CheckpointError:  # damaged: ignore it
                        continue
                agreement.value = max(orders, default=0) + 1
        return int(agreement.values[0])

    def _remove_old(self, lineage: Sequence[Ancestor]) -> None:
        """Removes the lineage except the newest `keep`; a user may still need others."""
        for old in lineage[self.keep :]:
            folder = self.root / f"step_{old.step}"
            try:
                if folder.is_dir() and Checkpoint.open(folder).ancestor == old:
                    shutil.rmtree(folder)
            except (OSError, CheckpointError) as error:  # a failed removal must not stop the run
                self._notify(f"warning: {folder} could not be removed: {error}")

    def load(self, path: Path, models: Mapping[str, Saved]) -> SavedState:
        """Restores models, optimizers and, if the layout is the same, random states.

        `path` is a checkpoint, or a run folder for its newest. Returns the state that was saved.
        Raises CheckpointError if the checkpoint is damaged, contains only weights, or was saved
        from a model with different shapes, adapters or base weights, or with or without an MTP
        layer unlike this run; or if ranks see different checkpoints.
        """
        self.finish()
        checkpoint, state = open_on_all_ranks(path, self.world, self._notify)
        if state.step is None:
            raise CheckpointError(
                str(checkpoint.folder),
                "a checkpoint that contains only weights",
                "a checkpoint of a run",
                "To start from these weights, convert them to an HF directory and set model.path.",
            )
        if missing := [name for name in models if name not in state.num_updates]:
            raise CheckpointError(
                str(checkpoint.folder),
                f"no {missing[0]} among the models ({', '.join(state.num_updates) or 'none'})",
                f"a checkpoint of {', '.join(models)}",
                "Check that the same algorithm saved it.",
            )
        with self.world.all_agree("comparing the models"):
            for model in models.values():
                check_adapters(state.lora, model.lora, model.base, checkpoint.folder)
                check_passed_over(state.passed_over, model.passed_over, checkpoint.folder)
            if "policy" in models:
                _check_mtp(state.trains_mtp, models["policy"].trains_mtp, checkpoint.folder)
        for name, model in models.items():
            if set(model.frozen_parts) != set(state.freeze):
                raise CheckpointError(
                    f"train.freeze of {checkpoint.folder}",
                    ", ".join(state.freeze) or "nothing frozen",
                    f"{', '.join(model.frozen_parts) or 'nothing frozen'}, as in this run's "
                    f"configuration",
                    "Optimizer states exist only for parameters that were trained. Restore the "
                    "old value of train.freeze, or convert the checkpoint to an HF directory and "
                    "start from it with model.path.",
                )
            load_model(checkpoint, name, model, self.world, self._notify)
        if state.layout == self.layout:
            self._load_rng(checkpoint)
        self._lineage = self._lineage_of(checkpoint)
        return state

    def _load_rng(self, checkpoint: Checkpoint) -> None:
        name = rng_file(self.world.rank)
        with damage_is_told(
            self.world, "reading the random states", checkpoint.folder, self._notify
        ):
            content = read_listed(checkpoint.folder, name, checkpoint.manifest)
            try:
                states = load_tensors(content)
            except SafetensorError as error:
                file = checkpoint.folder / name
                raise damaged(file, str(error), "random states, as safetensors") from None
            set_rng_state(states)

    def _lineage_of(self, checkpoint: Checkpoint) -> list[Ancestor]:
        if self.copy_in_memory is not None and checkpoint.folder == self.copy_in_memory[0]:
            return list(self.copy_in_memory[1])
        if checkpoint.folder.resolve().parent != self.root.resolve():
            return []  # another run's checkpoints must not be removed
        own = checkpoint.ancestor
        lineage = [own] if own is not None else []
        if checkpoint.manifest.has_digests:
            return [*lineage, *checkpoint.manifest.lineage]
        # Format 1 stores no lineage. Assume that it consists of all checkpoints with fewer steps.
        steps = sorted(step_folders(self.root), reverse=True)
        return [*lineage, *(Ancestor(step=s, order=0) for s in steps if own and s < own.step)]


def _check_mtp(saved: bool, current: bool, folder: Path) -> None:
    """Raises CheckpointError if only one of a run and its checkpoint trains the MTP layer. A run
    without the layer would discard what it has learned, because exports would contain the layer of
    `model.path`.
    """
    if saved == current:
        return
    trained, other = "above 0, with a trained MTP layer", "0, without an MTP layer"
    raise CheckpointError(
        f"train.mtp_coef of {folder}",
        trained if saved else other,
        f"{other if saved else trained}, as in this run's configuration",
        f"Set train.mtp_coef {'to a number above 0' if saved else 'to 0'}; or convert the "
        "checkpoint with `hybridrl convert --to hf` and start from the result with model.path.",
    )
