"""Further terms of the policy's loss, each with prompts of its own: which rows come when, and the
columns that their algorithms read.

The loss of an optimizer step is the main one plus the sum over terms of weight times loss, each
divided by its own global denominator; the passes of all add to one gradient, of one norm, which is
applied or skipped as one (update.py). An optimizer step takes its part of a term's rows, and looks
them up with the weights that it begins with, so that also a preference loss, which is linear in
them, has its exact gradient in every one. Collective; every rank takes the same rows.
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
from hybridrl.errors import UserError
from hybridrl.roles.auxiliary import errors_of_term, make_auxiliary_losses
from hybridrl.roles.policy import TERM_TEMPERATURE
from hybridrl.roles.roles import Roles


class Mix:
    """The rows of all terms.

    Attributes:
        terms: what they are, by name.
        taken: the batches of the step's optimizer steps so far, with their columns.

    Args:
        config: of the run.
        store: loads the rows.
        notify: tells the user, once.
        given: rows in place of a term's `data.prompts`, by its name.

    Raises:
        UserError: a term has no rows, or there is no term of a name in `given`.
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
            # Another order than that of other sources with as many rows.
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
        """Yields the batches of each optimizer step of a step, by name, with their columns as of
        the weights when they are asked for.

        Args:
            roles: compute the columns.
            num_updates: optimizer steps of the step.
            trains_policy: without it nothing is taken.
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
                # Nearly equal parts: dropped responses may leave a step fewer updates than usual.
                ends = [len(taken) * end // num_updates for end in (number, number + 1)]
                part = taken[slice(*ends)]
                batch = supervised_batch(part, algorithm.needs.feedback)
                batch = roles.add_columns(algorithm, batch, temperature=TERM_TEMPERATURE)
                with roles.world.all_agree(f"estimating advantages of {name}"):
                    found[name] = algorithm.advantages(batch)
            self.taken += found.values()
            yield found

    def state(self) -> dict[str, Any]:
        """Returns what `load_state` needs, for JSON."""
        return {name: source.state() for name, source in self._sources.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where the terms stood.

        Raises:
            DataError: they were of other rows, or others.
        """
        for name, source in self._sources.items():
            with errors_of_term(name):
                source.load_state(state.get(name, {"fingerprint": "none"}))


def _check_given(config: Config, given: Mapping[str, Rows]) -> None:
    """Raises a UserError where rows have no term, or a term no rows."""
    for name in given:
        if name not in config.mix:
            names = ", ".join(config.mix) or "none: the section mix is empty"
            raise UserError("mix", name, f"rows of the run's terms ({names})", f"Add mix.{name}.")
    for name, term in config.terms().items():
        key = f"mix.{name}.data.prompts"
        if term.data.prompts is None and name not in given:
            raise UserError(
                key, "nothing", "a source of rows", f"Set {key}, or pass mix={{{name!r}: rows}}."
            )
