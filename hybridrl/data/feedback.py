"""Checks rows with responses: demonstrations, preference pairs and labelled responses. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from hybridrl.config.needs import Feedback
from hybridrl.config.schema import DataConfig
from hybridrl.data.forms import text_columns
from hybridrl.data.rows import BadRows, Row
from hybridrl.errors import BadRowError, DataError, short


def label_columns(config: DataConfig, feedback: Feedback | None) -> list[str]:
    if feedback == "pairs" and config.margin_key is not None:
        return [config.margin_key]
    return [config.label_key] if feedback == "labels" else []


def checked(
    rows: Iterable[Row], config: DataConfig, feedback: Feedback | None, bad: BadRows
) -> Iterator[Row]:
    """Yields usable rows; counts others in `bad`. Raises DataError if all labels are equal."""
    labels: set[bool] = set()
    for row in rows:
        try:
            _check(row, config, feedback)
        except BadRowError as error:
            bad.add(row.source, error)
            continue
        if feedback == "labels":
            labels.add(row.columns[config.label_key] is True)
        yield row
    if labels and not bad.stops:  # otherwise the error about bad rows takes precedence
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
            raise BadRowError(row.place, got, "a finite number of at least 0", "Fix that row.")
    elif feedback == "labels":
        label = row.columns[config.label_key]
        if not isinstance(label, bool):
            got = f"{config.label_key} = {short(label)}"
            raise BadRowError(row.place, got, "true or false", "Fix that row.")


def equal_sides(row: Row, config: DataConfig) -> BadRowError:
    return BadRowError(
        row.place,
        f"equal responses in {config.chosen_key!r} and {config.rejected_key!r}",
        "two different responses, in text and in tokens",
        "Remove that row, because it prefers neither response.",
    )


def check_classes(labels: set[bool], config: DataConfig) -> None:
    for label in (True, False):
        if label not in labels:
            shown = str(label).lower()
            raise DataError(
                ", ".join(config.prompts or ("prompts",)),
                f"no row with {config.label_key} = {shown} that is short enough",
                "responses with both labels, which kto needs",
                f"Add rows with {config.label_key} = {shown}, or use sft.",
            )
