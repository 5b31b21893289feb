"""What a run reads before it begins: tokenizer, prompts and the scorer of responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hybridrl.algorithms.base import Needs
from hybridrl.batch import Prompt
from hybridrl.config.schema import Config
from hybridrl.data.prompts import LoadedPrompts
from hybridrl.parallel.groups import World
from hybridrl.rewards.base import Scorer
from hybridrl.trainer import setup
from hybridrl.trainer.mix import Mix


class RunData(NamedTuple):
    """What a run reads, and what scores its responses."""

    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    prompts: LoadedPrompts
    eval_prompts: tuple[Prompt, ...]
    mix: Mix


def make_data(
    config: Config,
    world: World,
    needs: Needs,
    given: setup.Given,
    say: Callable[[str], None],
    trains: bool = True,
) -> RunData:
    """Reads what a run reads; collective.

    Args:
        needs: of the algorithm.
        given: by the user's script in place of sections.
        say: tells the user, once.
        trains: False leaves out what only training reads.
    """
    with world.all_agree("loading the tokenizer"):
        num_tokens = setup.model_source(config.model, world.platform).shape.vocab_size
        tokenizer = given.tokenizer or setup.load_tokenizer(config.model, num_tokens)
    scorer = setup.make_scorer(config, tokenizer, given.reward, needs.group_samples)
    with world.all_agree("reading the prompts"):
        loaded, evaluated = setup.load_data(config, tokenizer, needs, given.prompts)
        setup.check_token_range((*loaded.prompts, *evaluated), num_tokens)
        mixed = config if trains else config.model_copy(update={"mix": {}})
        mix = Mix(mixed, tokenizer, say, given.mix)
    say(loaded.report())
    return RunData(tokenizer, scorer, loaded, evaluated, mix)
