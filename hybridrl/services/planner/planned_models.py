"""Finds the models that a configuration needs, even with a user's own algorithm. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.algorithms import needs_of, not_a_term
from hybridrl.config.needs import Needs
from hybridrl.config.own_code import contained
from hybridrl.config.placement import REWARD
from hybridrl.config.roles import RunModels, run_models
from hybridrl.config.rules_placement import cut_rules
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import read_model_config
from hybridrl.errors import UserError
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import read_model


def planned_models(config: Config) -> tuple[RunModels | None, list[UserError]]:
    """Returns the models of the run, or errors, including any failure in the user's code.

    A user's own algorithm is instantiated, because only it knows whether it needs a critic.
    """
    needs: dict[str, Needs] = {}
    found: list[UserError] = []
    terms = config.terms()
    sections = {"": config.algorithm} | {name: term.algorithm for name, term in terms.items()}
    for term, section in sections.items():
        try:
            with contained():
                needs[term] = needs_of(section)
        except UserError as error:
            is_key = term and error.name.startswith("algorithm.")
            name = f"mix.{term}.{error.name}" if is_key else error.name
            found.append(UserError(name, error.value, error.allowed, error.remedy))
            continue
        if term and not needs[term].fits_term:
            found.append(not_a_term(term, section.name))
    if found:
        return None, found
    own = needs.pop("")
    models = run_models(config, own, needs.values())
    for scorer, served in models.reward_models.items():
        found += _reward_model_rules(config, scorer, served)
    return models, found


def _reward_model_rules(config: Config, scorer: str, served: ModelConfig) -> Iterator[UserError]:
    try:
        content = read_model_config(served)
        read_model(served.family, content)
        at_length(content, config.longest_sequence())
        errors = list(cut_rules(config, REWARD + scorer, content))
    except UserError as error:
        errors = [error]
    for fault in errors:
        name = f"{REWARD}{scorer}: {fault.name}"
        yield UserError(name, fault.value, fault.allowed, fault.remedy)
