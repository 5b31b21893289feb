"""Skipped optimizer steps, whose loss or gradient is not finite: counted, reported, batches saved.

Who waits for whom: all ranks know by themselves whether a step is skipped; only then they tell each
other what was not finite, and rank 0 whether it could save the batch. Invariant: the folder holds
the newest `train.max_skipped_steps` + 1 batches, so a whole row of skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from hybridrl.config.load import to_yaml
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import TrainBatch
from hybridrl.errors import UserError
from hybridrl.loop.saved_batch import FILE_NAME, SavedBatch, file_name
from hybridrl.parallel.exchange import collect
from hybridrl.parallel.groups import World
from hybridrl.training.exploded import explosion_of
from hybridrl.training.update import Gradients


class SkippedSteps:
    """Counts a run's skipped optimizer steps, and ends it when there are too many in a row.

    Attributes:
        in_a_row: Steps that were skipped since the last one that was taken.
    """

    def __init__(
        self, config: Config, world: World, folder: Path, notify: Callable[[str], None]
    ) -> None:
        self._config, self._world, self._folder, self._notify = config, world, folder, notify
        self._allowed = config.train.max_skipped_steps
        self.in_a_row = 0

    def add(
        self,
        step: int,
        update: int,
        part: TrainBatch,
        terms: Mapping[str, TrainBatch],
        found: Sequence[Gradients],
        random_states: Mapping[str, torch.Tensor],
    ) -> None:
        """Takes in an optimizer step that was skipped; collective.

        Args:
            step: Number of the step, from 1.
            update: Number of the optimizer step within it, from 0.
            terms: Mini-batches of further terms of the policy's loss, by name.

        Raises:
            UserError: `train.max_skipped_steps` in a row were skipped; it names the learning rate
                where weights have exploded.
        """
        self.in_a_row += 1
        reason = first_cause(self._world, found)
        rng = self._world.gather_objects(
            {name: state.numpy() for name, state in random_states.items()}
        )
        states = [{name: torch.from_numpy(state) for name, state in one.items()} for one in rng]
        whole = collect(part, self._world)
        of_terms = {name: collect(batch, self._world) for name, batch in terms.items()}
        file, saved = self._folder / file_name(step, update), None
        if whole is not None:
            given = {name: batch for name, batch in of_terms.items() if batch is not None}
            saved = SavedBatch(whole, step, update, reason, to_yaml(self._config), states, given)
        fault = self._save(saved, file)
        told = f"saved to {file}" if fault is None else f"not saved: {fault}"
        row = f"{self.in_a_row} of at most {self._allowed} in a row"
        self._notify(f"step {step}: optimizer step skipped ({row}): {reason}; batch {told}")
        if self.in_a_row >= self._allowed:
            symptom = f"{self.in_a_row} optimizer steps skipped in a row, at step {step}: {reason}"
            models = {one.name: one.model for one in found}
            if (explosion := explosion_of(models, symptom)) is not None:
                raise explosion
            why = f"To see which responses did it: hybridrl train CONFIG --replay {file}"
            raise UserError(
                "train.max_skipped_steps",
                symptom,
                f"fewer than {self._allowed}",
                "The weights are those of before the first of them. "
                + (why if fault is None else f"The batch is {told}"),
            )

    def _save(self, saved: SavedBatch | None, file: Path) -> str | None:
        """Writes the batch, which rank 0 has, in place of the oldest; returns why it could not, on
        all ranks alike.
        """
        with self._world.all_agree("saving the batch of a skipped step") as agreement:
            if saved is not None:
                try:
                    self._write(saved, file)
                except Exception as error:  # be it the disk or a user's column: the run goes on
                    agreement.value = f"{type(error).__name__}: {error}"
        fault: str | None = agreement.values[0]
        return fault

    def _write(self, saved: SavedBatch, file: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        others = [f for f in self._folder.iterdir() if FILE_NAME.fullmatch(f.name) and f != file]
        for old in sorted(others, key=lambda f: f.stat().st_mtime)[: -self._allowed]:
            old.unlink()
        saved.write(file)


def first_cause(world: World, found: Sequence[Gradients]) -> str:
    """Returns what was not finite and on which rank it came first, on all ranks; collective.

    A loss comes before a gradient, a micro-batch before the next. Gradients are summed over
    replicas, so theirs may have begun on another rank.
    """
    mine: list[tuple[int, int, int, int, str]] = []
    shares = [(one, share) for one in found for share in one.loss_parts]
    for order, (one, share) in enumerate(shares):
        for index in share.bad_micro_batches():
            loss, rows = float(share.results[index].loss), list(share.rows(index))
            text = f"{share.name}/loss is {loss} in micro-batch {index} on rank {world.rank}"
            mine.append((0, index, order, world.rank, f"{text}, of the batch's rows {rows}"))
        if share is one.loss_parts[0] and (name := one.model.bad_gradient()) is not None:
            text = f"the gradient of {one.name} {name} is not finite, first on rank {world.rank}"
            mine.append((1, 0, order, world.rank, text))
    causes = [cause for causes in world.gather_objects(mine) for cause in causes]
    if causes:
        return min(causes)[-1]
    bad = next(one for one in found if not one.is_finite)
    losses = ", ".join(f"{share.name}/loss is {share.loss:g}" for share in bad.loss_parts)
    return (
        f"{losses} and {bad.name}/grad_norm {bad.grad_norm:g}, though each "
        "micro-batch's loss and each gradient is finite: together they are beyond fp32"
    )
