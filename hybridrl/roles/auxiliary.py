"""Auxiliary losses: further terms of the policy's loss, as the section `mix` names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hybridrl.algorithms import make_algorithm, not_a_term
from hybridrl.algorithms.base import AdaptiveAlgorithm, Algorithm
from hybridrl.config.schema import Config
from hybridrl.errors import UserError


@dataclass(frozen=True)
class AuxiliaryLoss:
    """What a term is, without its rows.

    Args:
        algorithm: gives its loss.
        weight: of it.
    """

    algorithm: Algorithm
    weight: float


def make_auxiliary_losses(config: Config) -> dict[str, AuxiliaryLoss]:
    """Makes the terms of the section `mix` that have a weight, by name.

    Raises:
        UserError: a user's own algorithm cannot be a term.
    """
    terms = {}
    for name, section in config.terms().items():
        with errors_of_term(name):
            algorithm = make_algorithm(section.algorithm)
        if not algorithm.needs.fits_term or isinstance(algorithm, AdaptiveAlgorithm):
            raise not_a_term(name, section.algorithm.name)
        terms[name] = AuxiliaryLoss(algorithm, section.weight)
    return terms


@contextmanager
def errors_of_term(name: str) -> Iterator[None]:
    """Makes errors of the sections `data` and `algorithm`, and of rows, those of a term's."""
    try:
        yield
    except UserError as error:
        place = re.sub(r"^prompts(?=\[)", f"mix[{name!r}]", error.name)  # rows from Python
        key, allowed, remedy = (
            re.sub(r"\b(data|algorithm)\.(?=\w)", rf"mix.{name}.\1.", text)
            for text in (place, error.allowed, error.remedy)
        )
        raise type(error)(key, error.value, allowed, remedy) from error
