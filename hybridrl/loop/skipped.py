"""Counts, reports and saves optimizer steps that are skipped for non-finite values. Collective.

Every rank already knows that the step is skipped. The ranks then exchange which values were not
finite, and whether rank 0 could save the batch. Invariant: the folder contains the newest
`train.max_skipped_steps` + 1 batches, enough for the longest allowed sequence.
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
from hybridrl.training.update import Gradients, explosion_of


class SkippedSteps:
    """Counts skipped optimizer steps, and ends the run after too many since the last one taken."""

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
        """Counts, reports and saves a skipped optimizer step; collective. See `SavedBatch` for the
        arguments. `random_states` are those before the passes. After `train.max_skipped_steps` in a
        row, raises UserError, which names the learning rate if the weights have exploded.
        """
        self.in_a_row += 1
        reason = first_cause(self._world, found)
        rng = self._world.gather_objects(
            {name: state.numpy() for name, state in random_states.items()}
        )
        states = [{name: torch.from_numpy(value) for name, value in own.items()} for own in rng]
        whole = collect(part, self._world)
        term_batches = {name: collect(batch, self._world) for name, batch in terms.items()}
        file, saved = self._folder / file_name(step, update), None
        if whole is not None:
            given = {name: batch for name, batch in term_batches.items() if batch is not None}
            saved = SavedBatch(whole, step, update, reason, to_yaml(self._config), states, given)
        fault = self._save(saved, file)
        place = f"saved to {file}" if fault is None else f"not saved: {fault}"
        row = f"{self.in_a_row} of at most {self._allowed} in a row"
        self._notify(f"step {step}: optimizer step skipped ({row}): {reason}; batch {place}")
        if self.in_a_row >= self._allowed:
            symptom = f"{self.in_a_row} optimizer steps skipped in a row, at step {step}: {reason}"
            models = {gradients.name: gradients.model for gradients in found}
            if (explosion := explosion_of(models, symptom)) is not None:
                raise explosion
            remedy = f"To find the responses that caused it: hybridrl train CONFIG --replay {file}"
            raise UserError(
                "train.max_skipped_steps",
                symptom,
                f"fewer than {self._allowed}",
                "The skipped steps have not changed the weights. "
                + (remedy if fault is None else f"The batch was {place}."),
            )

    def _save(self, saved: SavedBatch | None, file: Path) -> str | None:
        with self._world.all_agree("saving the batch of a skipped step") as agreement:
            if saved is not None:
                try:
                    self._write(saved, file)
                except Exception as error:  # the run continues after any error
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
    """Returns the first value that was not finite, and its rank; collective. Losses come before
    gradients, and earlier micro-batches before later ones. Gradients are summed over replicas, so
    another rank may have caused a gradient that is not finite.
    """
    mine: list[tuple[int, int, int, int, str]] = []
    shares = [(gradients, share) for gradients in found for share in gradients.loss_parts]
    for order, (gradients, share) in enumerate(shares):
        for index in share.bad_micro_batches():
            loss, rows = float(share.results[index].loss), list(share.rows(index))
            text = f"{share.name}/loss is {loss} in micro-batch {index} on rank {world.rank}"
            mine.append((0, index, order, world.rank, f"{text}, rows {rows} of the batch"))
        if (
            share is gradients.loss_parts[0]
            and (name := gradients.model.bad_gradient()) is not None
        ):
            text = f"the gradient of {gradients.name} {name} is not finite on rank {world.rank}"
            mine.append((1, 0, order, world.rank, text))
    causes = [cause for causes in world.gather_objects(mine) for cause in causes]
    if causes:
        return min(causes)[-1]
    bad = next(gradients for gradients in found if not gradients.is_finite)
    losses = ", ".join(f"{share.name}/loss is {share.loss:g}" for share in bad.loss_parts)
    return (
        f"{losses} and {bad.name}/grad_norm is {bad.grad_norm:g}. Each micro-batch's loss and each "
        "gradient is finite, but their sum exceeds fp32"
    )
