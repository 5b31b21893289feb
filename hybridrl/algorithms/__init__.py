"""Table of algorithms by name. Only `make_algorithm` imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from hybridrl.config.algorithm import PRESETS
from hybridrl.config.needs import Needs
from hybridrl.config.own_code import imported
from hybridrl.config.schema import AlgorithmConfig, CustomAlgorithmConfig
from hybridrl.config.supervised import PAIR_PRESETS
from hybridrl.errors import UserError, error_text, short

if TYPE_CHECKING:
    from hybridrl.algorithms.base import Algorithm

ALGORITHMS = {
    **dict.fromkeys(("grpo", *PRESETS), "hybridrl.algorithms.grpo:Grpo"),
    "reinforce_pp": "hybridrl.algorithms.ppo:ReinforcePlusPlus",
    "ppo": "hybridrl.algorithms.ppo:Ppo",
    "vapo": "hybridrl.algorithms.ppo:Ppo",
    "sft": "hybridrl.algorithms.sft:Sft",
    **dict.fromkeys(PAIR_PRESETS, "hybridrl.algorithms.preference:Dpo"),
    "kto": "hybridrl.algorithms.preference:Kto",
    "online_dpo": "hybridrl.algorithms.online_dpo:OnlineDpo",
    "reward_model": "hybridrl.algorithms.reward_model:RewardModel",
    "on_policy_distillation": "hybridrl.algorithms.distillation:OnPolicyDistillation",
    "distillation": "hybridrl.algorithms.distillation:Distillation",
    "gkd": "hybridrl.algorithms.distillation:Distillation",
}
_METHODS = ("name", "needs", "advantages", "denominator", "loss")


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Creates the algorithm for a config section. A user's class, `package.module:Class`, receives
    the section's `options` as keyword arguments.

    Raises:
        UserError: The class cannot be imported or instantiated, or lacks a member of `Algorithm`.
    """
    if not isinstance(config, CustomAlgorithmConfig):
        builtin: Algorithm = imported(ALGORITHMS[config.name])(config)
        return builtin
    try:
        algorithm: Algorithm = imported(config.name)(**config.options)
    except ImportError as error:
        raise _unusable(config.name, error_text(error)) from error
    except UserError:
        raise
    except ValidationError as error:
        raise _wrong_option(error) from error
    except Exception as error:  # the user's code may raise anything
        raise _unusable(config.name, f"{type(error).__name__}: {error_text(error)}") from error
    required = [*_METHODS]
    if hasattr(algorithm, "needs"):
        if not isinstance(algorithm.needs, Needs):
            reason = f"Its needs are {short(algorithm.needs)}, not a hybridrl.config.needs.Needs."
            raise _unusable(config.name, reason)
        if algorithm.needs.values:
            required.append("value_loss")
    missing = [name for name in required if not hasattr(algorithm, name)]
    if missing:
        raise _unusable(config.name, f"It has no {', '.join(missing)}.")
    return algorithm


def needs_of(config: AlgorithmConfig) -> Needs:
    """Returns the needs of a section's algorithm; see `make_algorithm` for a user's class."""
    return make_algorithm(config).needs if config.needs is None else config.needs


def not_a_term(term: str, algorithm: str) -> UserError:
    return UserError(
        f"mix.{term}.algorithm.name",
        algorithm,
        "an algorithm that needs no rollouts, critic or teacher, and has no state",
        "Use it as the main algorithm: set algorithm.name.",
    )


def _wrong_option(error: ValidationError) -> UserError:
    details = error.errors()[0]
    key = ".".join(("algorithm.options", *map(str, details["loc"])))
    if details["type"] == "extra_forbidden":
        remedy = "Correct the name, or remove it."
        return UserError(key, "an unknown option", f"the knobs of {error.title}", remedy)
    allowed = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return UserError(key, short(details["input"]), allowed, f"Change {key}.")


def _unusable(path: str, reason: str) -> UserError:
    allowed = f"{', '.join(ALGORITHMS)} or package.module:Class"
    return UserError("algorithm.name", path, allowed, reason)
