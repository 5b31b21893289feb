"""Rows with responses: demonstrations, preference pairs, labelled responses. No torch.

Owns which columns such rows have and what they must say; prompts.py reads and tokenizes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from hybridrl.config.needs import Feedback
from hybridrl.config.schema import DataConfig
from hybridrl.data.forms import text_columns
from hybridrl.data.rows import BadRows, Row
from hybridrl.errors import DataError, RowError, short


def label_columns(config: DataConfig, feedback: Feedback | None) -> list[str]:
    """Returns the columns that say something of a row's response."""
    if feedback == "pairs" and config.margin_key is not None:
        return [config.margin_key]
    return [config.label_key] if feedback == "labels" else []


def checked(
    rows: Iterable[Row], config: DataConfig, feedback: Feedback | None, bad: BadRows
) -> Iterator[Row]:
    """Passes rows on, whose columns are complete, and counts in `bad` those with equal sides, or
    with a margin or a label that is none.

    Raises:
        DataError: after the last row, for the label that no row has.
    """
    labels: set[bool] = set()
    for row in rows:
        try:
            _check(row, config, feedback)
        except RowError as error:
            bad.add(row.source, error)
            continue
        if feedback == "labels":
            labels.add(row.columns[config.label_key] is True)
        yield row
    if labels and not bad.stops:  # else the bad rows are what is said
        check_classes(labels, config)


def _check(row: Row, config: DataConfig, feedback: Feedback | None) -> None:
    if feedback == "pairs":
        better, worse = (row.columns[name] for name in text_columns(config, feedback)[1:])
        if better == worse:
            raise equal_sides(row, config)
        margin = 0 if config.margin_key is None else row.columns[config.margin_key]
        is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
        if not is_number or not 0 <= margin <= sys.float_info.max:  # type: ignore[operator]
            got = f"{config.margin_key} = {short(margin)}"
            raise RowError(row.place, got, "a finite number of at least 0", "Mend that row.")
    elif feedback == "labels":
        label = row.columns[config.label_key]
        if not isinstance(label, bool):
            got = f"{config.label_key} = {short(label)}"
            raise RowError(row.place, got, "true or false", "Mend that row.")


def equal_sides(row: Row, config: DataConfig) -> RowError:
    """Returns the error of a pair that prefers a response to itself."""
    return RowError(
        row.place,
        f"the same in {config.chosen_key!r} and {config.rejected_key!r}",
        "two different responses, in text and in tokens",
        "Remove that row: it prefers neither.",
    )


def check_classes(labels: set[bool], config: DataConfig) -> None:
    """Raises DataError unless there are responses of both labels."""
    for label in (True, False):
        if label not in labels:
            shown = str(label).lower()
            raise DataError(
                ", ".join(config.prompts or ("prompts",)),
                f"no row with {config.label_key} = {shown} that is short enough",
                "responses of both labels, for kto",
                f"Add rows with {config.label_key} = {shown}, or use sft.",
            )
