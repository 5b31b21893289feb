"""Auxiliary losses: additional terms of the policy's loss, from the section `mix`."""

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
    """Algorithm and weight of a loss term, without the term's data."""

    algorithm: Algorithm
    weight: float


def make_auxiliary_losses(config: Config) -> dict[str, AuxiliaryLoss]:
    """Creates the weighted loss terms of `mix`, by name. Raises UserError for an unusable one."""
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
    """Makes keys in errors about a term's data and algorithm begin with `mix.NAME`."""
    try:
        yield
    except UserError as error:
        place = re.sub(r"^prompts(?=\[)", f"mix[{name!r}]", error.name)  # rows passed from Python
        key, allowed, remedy = (
            re.sub(r"\b(data|algorithm)\.(?=\w)", rf"mix.{name}.\1.", text)
            for text in (place, error.allowed, error.remedy)
        )
        raise type(error)(key, error.value, allowed, remedy) from error
