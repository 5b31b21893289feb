"""What a run reads before it begins: tokenizer, prompts and the scorer of responses.

The first rank of each node reads the prompts, and computes what follows from all of them, while the
node's others wait; these map what it has written, and are told what it has found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hybridrl.algorithms.base import Needs
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import Prompt
from hybridrl.data.mixture import prompt_source
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import LoadedPrompts, PromptSource
from hybridrl.parallel.groups import World
from hybridrl.rewards.base import Scorer
from hybridrl.trainer import setup
from hybridrl.trainer.mix import Mix


class RunData(NamedTuple):
    """What a run reads, and what scores its responses."""

    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    prompts: PromptSource
    eval_prompts: Sequence[Prompt]
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
    store = PromptStore(tokenizer)
    mixed = config if trains else config.model_copy(update={"mix": {}})

    def load() -> tuple[LoadedPrompts, PromptSource, Sequence[Prompt], Mix]:
        loaded, evaluated = setup.load_data(config, store, needs, given.prompts)
        for prompts in (loaded.prompts, evaluated):
            store.once(partial(setup.check_token_range, prompts, num_tokens))
        source = prompt_source(loaded, config.data, config.run.seed, store.once)
        return loaded, source, evaluated, Mix(mixed, store, say, given.mix)

    builder = world.mates[0]
    with contextlib.closing(store):
        with world.all_agree("reading the prompts") as agreement:
            if world.rank == builder:
                loaded, source, evaluated, mix = load()
                agreement.told = store.files, store.notes, store.found
        told = agreement.heard
        for line in dict.fromkeys(line for one in told if one is not None for line in one[1]):
            say(line)
        with world.all_agree("mapping the prompts"):
            if world.rank != builder:
                files, _, found = told[builder]
                store.follow(files, found)
                loaded, source, evaluated, mix = load()
    say(loaded.report())
    return RunData(tokenizer, scorer, source, evaluated, mix)
