"""Arguments of a Trainer that replace sections of the configuration; errors for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.prompt_store import Rows
    from hybridrl.rewards.functions import RewardFunction

ARGUMENTS = frozenset({"prompts", "reward", "tokenizer", "mix", "trains"})
# Names of arguments in TRL and other libraries, and hybridrl's names for the same arguments.
_MEANT = {
    "dataset": "prompts",
    "data": "prompts",
    "rows": "prompts",
    "train_dataset": "prompts",
    "eval_dataset": "data.eval_prompts in the configuration",
    "processing_class": "tokenizer",
    "rewards": "reward",
    "reward_fn": "reward",
    "reward_func": "reward",
    "reward_funcs": "reward",
    "reward_function": "reward",
    "model": "model.path in the configuration",
    "args": "config, the first argument",
    "overrides": "overrides, the second argument of Trainer.from_config",
}


@dataclass(frozen=True)
class Given:
    """Objects from the user's script that replace sections of the configuration."""

    prompts: Rows | None
    reward: RewardFunction | Sequence[RewardFunction] | None
    tokenizer: PreTrainedTokenizerBase | None
    mix: Mapping[str, Rows]


def unknown_argument(names: Iterable[str]) -> UserError:
    name = min(names)
    near = difflib.get_close_matches(name, ARGUMENTS, n=1, cutoff=0.4)
    meant = _MEANT.get(name) or next(iter(near), None)
    remedy = f"Did you mean {meant}?" if meant else "Set knobs in the configuration."
    return UserError(name, "an unknown argument", ", ".join(sorted(ARGUMENTS)), remedy)
