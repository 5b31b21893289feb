"""Checks rows of data before any rank starts, unless they were checked before. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hybridrl.config.needs import Feedback, Needs
from hybridrl.config.schema import Config, DataConfig, ModelConfig
from hybridrl.config.source import read_model_config
from hybridrl.config.teacher import is_scored
from hybridrl.config.wrapped_models import has_images
from hybridrl.data.evaluation_sets import set_rows
from hybridrl.data.feedback import checked, label_columns
from hybridrl.data.forms import Kind, formed_rows, kind_of, validate_file
from hybridrl.data.prompt_store import unless_checked
from hybridrl.data.rows import BadRows
from hybridrl.errors import DataError, UserError
from hybridrl.rewards.functions import NEEDS_ANSWER, RowCheck, check_rewards


@dataclass(frozen=True)
class RowChecks:
    """Conditions that rows must meet so that responses to them can be scored.

    `check` checks one row. It is None if `reward.on_error` makes bad rows harmless, or if the
    rewards themselves are invalid.
    """

    columns: Sequence[str] = ()
    check: RowCheck | None = None
    reads_images: bool = False

    @staticmethod
    def of(config: Config) -> RowChecks:
        """Returns the conditions that a run's rewards impose."""
        images, reward = _reads_images(config.model), config.reward
        if not is_scored(config):
            return RowChecks(reads_images=images)
        is_checked = reward.on_error == "stop" and not check_rewards(reward)
        return RowChecks(_answer_columns(config), RowCheck(reward) if is_checked else None, images)

    def prompts(self, data: DataConfig, paths: Sequence[str]) -> list[UserError]:
        """Checks rows with prompts for which the run generates responses."""
        checks = [list(self.columns), [] if self.check is None else self.check.identity()]
        return unless_checked(
            data,
            paths,
            ["prompts", *checks, *["images"] * self.reads_images],
            lambda: self._files(data, paths, "prompts", self.columns, self.check),
        )

    def training(
        self, data: DataConfig, paths: Sequence[str], needs: Needs | None
    ) -> list[UserError]:
        """Checks training rows. If the algorithm is a user's class, only prompts are checked."""
        if needs is None or needs.rollouts:
            return self.prompts(data, paths)
        feedback = needs.feedback
        kind, columns = kind_of(feedback, has_responses=True), label_columns(data, feedback)
        return unless_checked(
            data,
            paths,
            [kind, columns, *["images"] * self.reads_images],
            lambda: self._responses(data, paths, kind, columns, feedback),
        )

    def _files(
        self,
        data: DataConfig,
        paths: Sequence[str],
        kind: Kind,
        required: Sequence[str],
        check: RowCheck | None = None,
    ) -> list[UserError]:
        found = []
        for path in paths:
            arguments = path, data, kind, required, check, self.reads_images
            found += errors_of(validate_file, *arguments)
        return found

    def _responses(
        self,
        data: DataConfig,
        paths: Sequence[str],
        kind: Kind,
        required: Sequence[str],
        feedback: Feedback | None,
    ) -> list[UserError]:
        found = self._files(data, paths, kind, required)
        if found or feedback is None:
            return found
        bad, good = BadRows(data.on_bad_row), set[int]()

        def check_feedback() -> None:
            rows = formed_rows(paths, data, kind, required, bad, self.reads_images)
            for row in checked(rows, data, feedback, bad):
                good.add(row.source)
            bad.check(good)

        return errors_of(check_feedback)


def check_first_row(config: Config, needs: Needs, reads_images: bool) -> bool:
    """Reads each source of training rows up to the first usable row. Returns whether these rows
    have images. Raises DataError for a source without a usable row.
    """
    has_some = False
    kind, required = kind_of(needs.feedback, not needs.rollouts), _answer_columns(config)
    if not needs.rollouts:
        required = label_columns(config.data, needs.feedback)
    for path in config.data.prompts or ():
        bad = BadRows("drop")
        rows = formed_rows([path], config.data, kind, required, bad, reads_images)
        first = list(islice(rows, 1))
        bad.check([row.source for row in first])
        has_some |= any(row.images for row in first)
    return has_some


def _answer_columns(config: Config) -> list[str]:
    scorers = config.reward.scorers().values() if is_scored(config) else ()
    is_needed = any(one.function in NEEDS_ANSWER for one in scorers)
    return [config.data.answer_key] if is_needed else []


def _reads_images(model: ModelConfig) -> bool:
    """Whether a model reads images; False if its config.json is unusable."""
    try:
        return has_images(read_model_config(model))
    except UserError:
        return False


def set_errors(config: Config) -> Iterator[UserError]:
    """Yields the errors in the rows and the scorers of `eval.sets`."""
    for name, section in config.eval.sets.items():
        for error in check_rewards(section.scored_by):
            key = error.name.replace("reward", f"eval.sets.{name}.scorer", 1)
            yield UserError(key, error.value, error.allowed, error.remedy)
        function = section.scored_by.function
        try:
            rows = set_rows(section, config.data, _reads_images(config.model))
            for number, row in enumerate(rows, 1):
                if function in NEEDS_ANSWER and "answer" not in row:
                    yield DataError(
                        f"eval.sets.{name}.path",
                        f"no answer in row {number}",
                        f"an answer in every row, for {function}",
                        "Set data.answer_key to the answers' column, or choose another scorer.",
                    )
                    break
        except UserError as error:
            yield error


def errors_of(check: Callable[..., object], *arguments: object) -> list[UserError]:
    """Calls `check`, and returns the UserError that it raises, if any."""
    try:
        check(*arguments)
    except UserError as error:
        return [error]
    return []
