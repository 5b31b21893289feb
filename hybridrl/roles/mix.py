"""Selects rows of additional loss terms for each step, and computes their columns. Collective.

Every rank selects the same rows. The loss of an optimizer step is the main loss plus each term's
loss times its weight, each divided by its own global denominator; the sum's gradient has one norm,
and is applied or skipped as a whole (update.py). A step's rows of a term are divided among the
step's optimizer updates. Their columns are computed with the weights from before each update, so
that the gradient of a preference loss, which is linear in the log-probabilities, is exact in every
update.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.contracts.batch import TrainBatch
from hybridrl.data.mixture import prompt_source
from hybridrl.data.prompt_store import PromptStore, Rows, load_rows
from hybridrl.data.supervised import supervised_batch
from hybridrl.errors import MISSING, UserError
from hybridrl.roles.auxiliary import errors_of_term, make_auxiliary_losses
from hybridrl.roles.policy import TERM_TEMPERATURE
from hybridrl.roles.roles import Roles


class Mix:
    """Data rows of all loss terms.

    Args:
        given: Rows from Python, by the term's name; they replace the term's `data.prompts`.

    Attributes:
        taken: Batches used so far in the current step, with their columns.

    Raises:
        UserError: A term has no rows, or `given` contains a name for which there is no term.
    """

    def __init__(
        self,
        config: Config,
        store: PromptStore,
        notify: Callable[[str], None],
        given: Mapping[str, Rows],
    ) -> None:
        self.terms, self._sections = make_auxiliary_losses(config), config.mix
        self._sources = {}
        _check_given(config, given)
        for name, term in self.terms.items():
            # The seed depends on the name, so that sources with equally many rows are shuffled
            # differently.
            data, seed = config.mix[name].data, config.run.seed + zlib.crc32(name.encode())
            with errors_of_term(name):
                needs, rows = term.algorithm.needs, given.get(name)
                loaded = load_rows(data, config.rollout, store, needs, rows)
                self._sources[name] = prompt_source(loaded, data, seed)
            notify(f"mix.{name}: {loaded.report()}")
        self.taken: list[TrainBatch] = []

    def batches(
        self, roles: Roles, num_updates: int, trains_policy: bool
    ) -> Iterator[dict[str, TrainBatch]]:
        """Yields the terms' batches for each optimizer step, with columns from the weights at that
        time.
        """
        self.taken = []
        rows = {
            name: source.take(self._sections[name].prompts_per_step)
            for name, source in self._sources.items()
            if trains_policy
        }
        for number in range(num_updates):
            found = {}
            for name, taken in rows.items():
                algorithm = self.terms[name].algorithm
                # The numbers of rows per update may differ by one, because dropped responses can
                # reduce the number of updates.
                ends = [len(taken) * end // num_updates for end in (number, number + 1)]
                part = taken[slice(*ends)]
                batch = supervised_batch(part, algorithm.needs.feedback)
                batch = roles.add_columns(algorithm, batch, temperature=TERM_TEMPERATURE)
                with roles.world.all_agree(f"estimating advantages of {name}"):
                    found[name] = algorithm.advantages(batch)
            self.taken += found.values()
            yield found

    def state(self) -> dict[str, Any]:
        return {name: source.state() for name, source in self._sources.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises DataError if it was saved with other rows or other terms."""
        for name, source in self._sources.items():
            with errors_of_term(name):
                source.load_state(state.get(name, {"fingerprint": "none"}))


def _check_given(config: Config, given: Mapping[str, Rows]) -> None:
    for name in given:
        if name not in config.mix:
            names = ", ".join(config.mix) or "none, because the section mix is empty"
            raise UserError("mix", name, f"names of terms ({names})", f"Add mix.{name}.")
    for name, term in config.terms().items():
        key = f"mix.{name}.data.prompts"
        if term.data.prompts is None and name not in given:
            raise UserError(
                key, MISSING, "a source of rows", f"Set {key}, or pass mix={{{name!r}: rows}}."
            )
