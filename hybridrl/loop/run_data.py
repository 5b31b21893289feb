"""Loads the tokenizer, the prompts and the scorer for responses before a run starts. Collective:
the first rank of each node reads the prompts and computes everything that depends on all of them.
The other ranks then memory-map the files that it wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.agents.template_check import check_images
from hybridrl.algorithms.base import Needs
from hybridrl.config.schema import Config, DataConfig, ModelConfig, RewardConfig
from hybridrl.config.source import tokenizer_directory
from hybridrl.config.teacher import is_scored
from hybridrl.config.tokenizer import check_token_numbers, check_tokenizer_files
from hybridrl.contracts.batch import Prompt
from hybridrl.data.end_tokens import end_tokens, shown_tokens
from hybridrl.data.evaluation_sets import set_data, set_rows
from hybridrl.data.images import ImageTokens, image_tokens
from hybridrl.data.mixture import hold_out, prompt_source
from hybridrl.data.prompt_files import largest_token
from hybridrl.data.prompt_store import PromptStore, Rows, load_rows, reading_of
from hybridrl.data.prompts import LeftOut, LoadedPrompts, PromptSource, Reading
from hybridrl.data.text_tokens import TextTokens
from hybridrl.errors import DataError, ModelError
from hybridrl.loop.evaluate import Evaluations, EvaluationSet
from hybridrl.loop.user_arguments import Given
from hybridrl.parallel.groups import World
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.functions import NEEDS_ANSWER, RowCheck, no_reward
from hybridrl.roles.mix import Mix
from hybridrl.training.from_config import model_source


class RunData(NamedTuple):
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer
    prompts: PromptSource
    eval_prompts: Sequence[Prompt]
    eval_sets: Mapping[str, EvaluationSet]
    validation: Sequence[Prompt]
    mix: Mix
    images: ImageTokens | None

    def evaluations(self, config: Config) -> Evaluations:
        own = EvaluationSet(self.eval_prompts, config.reward, config.eval.samples_per_prompt)
        return Evaluations(config.steps, config.eval, own, self.eval_sets)


def make_data(
    config: Config,
    world: World,
    needs: Needs,
    given: Given,
    notify: Callable[[str], None],
    trains: bool,
) -> RunData:
    """Loads the data for a run; collective. If `trains` is False, no training data is needed."""
    with world.all_agree("loading the tokenizer"):
        source = model_source(config.model, world.platform)
        num_tokens = source.shape.vocab_size
        tokenizer = given.tokenizer or load_tokenizer(config.model, num_tokens)
        ends = end_tokens(config.model, source.hf_config, tokenizer)
    unscored = None if is_scored(config) else no_reward
    function = unscored if given.reward is None else given.reward
    scorer = Scorer(
        config.reward,
        tokenizer,
        function,
        needs.group_samples,
        config.environment,
        config.agent,
    )
    images = None
    if (vision := source.shape.vision) is not None:
        with world.all_agree("reading the image processor's files"):
            most = config.data.max_image_pixels
            images = image_tokens(vision, source.directory, tokenizer, most)
    store = PromptStore(tokenizer, end_tokens=ends, images=images)
    mixed = config if trains else config.model_copy(update={"mix": {}})
    builder = world.host_ranks[0]

    def load() -> tuple[LoadedPrompts, RunData]:
        sets = load_sets(config, tokenizer, store, notify)
        set_prompts = [evaluation_set.prompts for evaluation_set in sets.values()]
        if trains or config.data.prompts or given.prompts is not None:
            loaded, evaluated = load_data(config, store, needs, given.prompts, notify)
            has_rows = world.rank == builder and given.prompts is not None
            if has_rows and given.reward is None and is_scored(config):
                check_answers(config.reward, (*loaded.prompts, *evaluated))
        else:  # the run only evaluates and needs no training data
            evaluated = load_held_out(config.data, store, notify)
            loaded = None
        validation = load_validation(config, store, needs, evaluated, notify)
        if loaded is None:
            # `hybridrl serve` may have no data, but a source of prompts needs a prompt.
            known = (evaluated, validation, *set_prompts, (Prompt(0, "", ends[:1] or (0,)),))
            loaded = LoadedPrompts(next(filter(None, known)), np.array([], np.int32), LeftOut(""))
        for prompts in (loaded.prompts, evaluated, validation, *set_prompts):
            check_token_range(prompts, num_tokens)
        data = RunData(
            tokenizer,
            scorer,
            prompt_source(loaded, config.data, config.run.seed),
            scorable(config, evaluated),
            sets,
            validation,
            Mix(mixed, store, notify, given.mix),
            images,
        )
        return loaded, data

    with contextlib.closing(store):
        with world.all_agree("reading the prompts") as agreement:
            if world.rank == builder:
                loaded, data = load()
                agreement.value = store.files, store.notes
        reports = agreement.values
        for line in dict.fromkeys(line for r in reports if r is not None for line in r[1]):
            notify(line)
        with world.all_agree("mapping the prompts"):
            if world.rank != builder:
                files, _ = reports[builder]
                store.follow(files)
                loaded, data = load()
    notify(loaded.report())
    if config.agent.is_on and images is not None:
        name = config.model.tokenizer or config.model.path or str(config.model.init)
        arguments = config.data.template_arguments
        with world.all_agree("checking the chat template of agents"):
            check_images(tokenizer, name, arguments, images, loaded.prompts)
    report_special_tokens(tokenizer, loaded.prompts[0], ends, notify)
    return data


def report_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
    first: Prompt,
    ends: Sequence[int],
    notify: Callable[[str], None],
) -> None:
    """Reports the special tokens that begin prompts, and end tokens other than the tokenizer's."""
    front = TextTokens(tokenizer).front
    if front and first.tokens[: len(front)] == front:
        begin = shown_tokens(tokenizer, front)
        notify(f"prompts begin with {begin} (data.add_special_tokens, or the chat template)")
    if set(ends) != {tokenizer.eos_token_id}:
        notify(f"end tokens of responses: {shown_tokens(tokenizer, ends)}")


def load_tokenizer(config: ModelConfig, num_tokens: int) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `model.tokenizer` or of the model, without remote code. Raises
    ModelError if it cannot be read, or has token ids that are not below the model's `num_tokens`.
    """
    check_tokenizer_files(config)
    where = str(tokenizer_directory(config))
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        vocabulary = tokenizer.get_vocab()
    except Exception as error:  # damaged files may raise anything in transformers
        text = " ".join(str(error).split())[:160]
        raise ModelError(
            "model.tokenizer",
            where,
            "a directory or hub name with intact tokenizer files",
            f"Set model.tokenizer. transformers raised {type(error).__name__}: {text}.",
        ) from error
    check_token_numbers(f"model.tokenizer {where}", vocabulary, num_tokens)
    return tokenizer


def check_token_range(prompts: Sequence[Prompt], num_tokens: int) -> None:
    """Raises ModelError for the first prompt with tokens that the model lacks."""
    if largest_token(prompts) < num_tokens:
        return
    for prompt in prompts:
        parts = (prompt.tokens, prompt.response_tokens, prompt.rejected_tokens)
        largest = max(max(tokens, default=0) for tokens in parts if tokens is not None)
        if largest >= num_tokens:
            raise ModelError(
                f"tokenizer: prompt {prompt.prompt_id}",
                f"token {largest}",
                f"tokens below the model's vocab_size = {num_tokens}",
                "Pass the model's own tokenizer.",
            )


def check_answers(reward: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Raises DataError for the first row from Python that the rewards cannot score."""
    if reward.on_error != "stop":
        return
    check = RowCheck(reward)
    for prompt in prompts:
        try:
            check(prompt.text, prompt.columns)
        except DataError as error:
            row = f"prompts[{prompt.prompt_id}]"
            raise DataError(row, error.value, error.allowed, error.remedy) from error


def load_data(
    config: Config,
    store: PromptStore,
    needs: Needs,
    rows: Rows | None,
    notify: Callable[[str], None],
) -> tuple[LoadedPrompts, Sequence[Prompt]]:
    """Loads the prompts for training, with responses if needed, and for evaluation."""
    data = config.data
    loaded = load_rows(data, config.rollout, store, needs, rows)
    if data.eval_share:
        loaded, held_out = hold_out(loaded, data.eval_share)
        return loaded, held_out[: data.eval_limit]
    return loaded, load_held_out(data, store, notify)


def load_held_out(
    data: DataConfig, store: PromptStore, notify: Callable[[str], None]
) -> Sequence[Prompt]:
    """Loads `data.eval_prompts`, or returns () if it is not set. Reports rows that are left out."""
    if not data.eval_prompts:
        return ()
    loaded = store.load(Reading(data, data.eval_prompts, limit=data.eval_limit))
    return _reported("data.eval_prompts", loaded, notify)


def _reported(name: str, loaded: LoadedPrompts, notify: Callable[[str], None]) -> Sequence[Prompt]:
    if loaded.left_out.is_anything():
        notify(f"{name}: {loaded.report()}")
    return loaded.prompts


def load_validation(
    config: Config,
    store: PromptStore,
    needs: Needs,
    held_out: Sequence[Prompt],
    notify: Callable[[str], None],
) -> Sequence[Prompt]:
    """Loads `data.validation`, with the responses that the algorithm learns from. If it is not set,
    returns the rows that `data.eval_share` holds out, if they have responses.
    """
    data = config.data
    if data.validation:
        reading = replace(reading_of(data, config.rollout, needs), source=data.validation)
        return _reported("data.validation", store.load(reading), notify)
    return held_out if data.eval_share and not needs.rollouts else ()


def scorable(config: Config, held_out: Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns the held-out prompts, or () if they lack the answer that the scorer needs."""
    scorers = config.reward.scorers().values() if is_scored(config) else ()
    if not held_out or held_out[0].response_tokens is None or not scorers:
        return held_out
    needs_answer = any(scorer.function in NEEDS_ANSWER for scorer in scorers)
    return () if needs_answer and "answer" not in held_out[0].columns else held_out


def load_sets(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    store: PromptStore,
    notify: Callable[[str], None],
) -> dict[str, EvaluationSet]:
    """Loads `eval.sets`, each with its scorer, and reports rows that are left out."""
    found = {}
    for name, section in config.eval.sets.items():
        rows = list(set_rows(section, config.data, store.reads_images))
        loaded = store.load(Reading(set_data(config.data, section), rows))
        found[name] = EvaluationSet(
            _reported(f"eval.sets.{name}", loaded, notify),
            section.scored_by,
            config.eval.samples_of(section),
            Scorer(section.scored_by, tokenizer, min_samples=1),
        )
    return found
