"""Training loop: generate, score, compute log-probabilities, estimate advantages, update, reshard.

SPMD without a controller: every rank runs this code. Each rank knows the lengths and rewards of all
samples, but stores the tokens of only some samples. `Trainer.train_step` takes one step. The phases
of a step are public methods, so a script can combine them into another dataflow. Observers
(observers.py) do all other work of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybridrl import console
from hybridrl.algorithms.base import AdaptiveAlgorithm, GroupAlgorithm
from hybridrl.checkpoint.random_states import rng_state
from hybridrl.config.load import as_config
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import Prompt, ScoredBatch, TrainBatch
from hybridrl.data.supervised import supervised_batch
from hybridrl.errors import UserError
from hybridrl.generation.resampling import replace_uniform_groups
from hybridrl.loop.observers import StepRecord, last_step
from hybridrl.loop.user_arguments import ARGUMENTS, Given, unknown_argument
from hybridrl.metrics.values import SKIPPED, average
from hybridrl.parallel.stopping import check_stop
from hybridrl.training.batches.batch_plan import mini_batch_sizes
from hybridrl.training.update import optimizer_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.prompt_store import Rows
    from hybridrl.loop.evaluate import Evaluation
    from hybridrl.loop.user_prompts import UserPrompt
    from hybridrl.rewards.functions import RewardFunction


class Trainer:
    """One training run on this rank.

    Public attributes, for scripts with other dataflows: `policy`, `reference`, `critic`, `engine`,
    `sampler`, `algorithm`, `hybrid_engine`, `prompts`.

    Args:
        config: Configuration whose individual values are valid. Rules that involve several knobs
            are checked here.
        prompts: Rows that replace `data.prompts`: any iterable of mappings, including a
            `datasets.Dataset`.
        reward: Function f(prompt, response, columns) -> float that replaces the section `reward`,
            or a list of functions, whose scores are added.
        tokenizer: Tokenizer that replaces `model.tokenizer`.
        mix: Mapping from NAME to the rows that replace `mix.NAME.data.prompts`.
        trains: Whether the run trains. If False, the run only evaluates: it loads no teacher, and
            loads a reference only if a loss on held-out rows needs the reference.
    """

    def __init__(
        self,
        config: Config,
        *,
        prompts: Rows | None = None,
        reward: RewardFunction | Sequence[RewardFunction] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mix: Mapping[str, Rows] | None = None,
        trains: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise unknown_argument(unknown)
        given = Given(prompts=prompts, reward=reward, tokenizer=tokenizer, mix=mix or {})
        # Imported here, so that the loop does not depend on the modules that build its parts.
        from hybridrl.loop.build import Run

        self._run, self._trains = (run := Run(config, given, trains)), trains
        self.config, self.world, self.platform = run.config, run.world, run.platform
        self.tokenizer, self.scorer = run.data.tokenizer, run.data.scorer
        self.images = run.data.images
        self.prompts, self.eval_prompts = run.data.prompts, run.data.eval_prompts
        self.mix = run.data.mix
        self.algorithm, self.roles, self.models = run.algorithm, run.roles, run.ledger.models
        self.source, self.trained = run.roles.source, run.roles.trained
        self.policy, self.critic = run.roles.policy, run.roles.critic
        self.reference, self.engine = run.roles.reference, run.engine
        self.sampler, self.hybrid_engine = run.sampler, run.hybrid_engine
        self.journal, self.skipped, self.observers = run.journal, run.skipped, run.observers
        self.evaluations, self.validation = run.evaluations, run.validation
        self.checkpoints, self.store = run.checkpoints, run.checkpoints.store

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | Config,
        overrides: Sequence[str] = (),
        **objects: Any,
    ) -> Trainer:
        """Builds a trainer from a YAML file, a mapping or a Config.

        Texts `key=value` in `overrides` override values of the configuration, and `objects`
        (`prompts`, `reward`, `tokenizer`, `mix`) replace the corresponding sections. Raises
        ConfigError if the configuration is invalid, and UserError if an argument is unknown.
        """
        if unknown := objects.keys() - ARGUMENTS:
            raise unknown_argument(unknown)
        return cls(as_config(config, overrides), **objects)

    @property
    def step(self) -> int:
        return self._run.position.step

    @console.protected()
    def fit(
        self,
        num_steps: int | None = None,
        *,
        until: int | None = None,
        resume: Literal["newest", "previous"] = "newest",
    ) -> dict[str, float]:
        """Trains for `num_steps` more steps, or up to step `until`, by default `steps.num_steps`.

        A new trainer resumes from a checkpoint in its run folder if there is one: from the newest,
        or with `resume="previous"` from the newest intact one before it. `num_steps` then counts
        from the step of this checkpoint. A trainer that has already loaded a checkpoint or taken a
        step continues from its current state.

        Returns:
            `seconds`, including earlier starts of the run. If there are evaluation prompts,
                `eval_reward_before` and `eval_reward_after`. If a scorer defines accuracy,
                `accuracy_before` and `accuracy_after`. If held-out rows have responses,
                `validation/loss_before` and similar. A value is missing if the first or last
                evaluation did not produce it.

        Raises:
            UserError: Both `num_steps` and `until` are given, or one is negative.
            KeyboardInterrupt, SystemExit: The process received SIGINT or SIGTERM. The next call of
                `fit` continues from the same state.
        """
        position, checkpoints = self._run.position, self.checkpoints
        position.start_clock()
        with checkpoints.locked():
            if not position.has_begun and (found := checkpoints.newest(resume)) is not None:
                self._run.times.over("choice of the state")
                self.load_checkpoint(found)
                self._run.times.over("state")
            first = self.step
            last = last_step(num_steps, until, first, self.config.steps.num_steps)
            is_done = 0 < last <= first or (first > 0 and self.evaluations.reach_goal(first))
            # A signal may have prevented a measurement that was due after the last step.
            is_left = self.evaluations.are_due(first, last)
            if is_done and not is_left and not self.validation.is_left_over(first, last):
                checkpoints.save_copy()
                by_step = self.evaluations.by_step
                return self.journal.nothing_to_do(first, last, by_step, position.seconds)
            for observer in self.observers:
                observer.fit_begins(first, last)
            self._run.times.over("records and copies")
            try:
                with checkpoints.saved_at_stop(last, resume), self._run.ledger.explained():
                    self._train_to(last)
                    for observer in self.observers:
                        observer.fit_ends()
                seconds = position.stop_clock()
                return self.journal.finish(first, self.step, self.evaluations.by_step, seconds)
            finally:
                self.journal.close()

    def _train_to(self, last: int) -> None:
        if self.algorithm.needs.rollouts:
            if self._run.phases.is_checked:
                self.enter_rollout()
            else:
                self.check_engine()
        self._run.times.over("first weights")
        self.checkpoints.start_clock()
        if (found := self._measure(last)) and self.step:
            self.journal.log(self.step, found)
            self.save_checkpoint()  # otherwise every start would evaluate again
        while self.step < last and not self.evaluations.reach_goal(self.step):
            with ExitStack() as stack:
                for observer in self.observers:
                    stack.enter_context(observer.around_step(self.step + 1))
                metrics = self.train_step()
            try:
                check_stop(self.world)
                self._measure(last, metrics)
            finally:
                for observer in self.observers:
                    observer.step_recorded(self.step, metrics)
            ends = last if not self.evaluations.reach_goal(self.step) else self.step
            for observer in self.observers:
                observer.step_is_over(self.step, ends, metrics)

    def _measure(self, last: int, metrics: dict[str, float] | None = None) -> dict[str, float]:
        metrics = {} if metrics is None else metrics
        for observer in self.observers:
            metrics |= observer.measures(self.step, last)
        return metrics

    def memory_table(self) -> str:
        """Returns a table of this rank's memory, as after the next switch of phases."""
        return self._run.ledger.table()

    def train_step(self) -> dict[str, float]:
        """Takes one step. Returns its metrics, which are the same on all ranks."""
        self._begin_step()
        phase = self.journal.phase
        prompts = self.sampler.take(self.prompts, self.config.steps.prompts_per_step)
        scored, metrics = self.sample(prompts)
        with self.sampler.ahead(self.prompts, phase("generate")):
            check_stop(self.world)
            with phase("logprobs"):
                batch = self.add_columns(scored)
            with phase("advantages"), self.world.all_agree("estimating advantages"):
                batch = self.algorithm.advantages(batch)
            check_stop(self.world)
            with phase("update"):
                metrics |= self.update(batch)
        self._end_update()
        if self.algorithm.needs.rollouts:
            metrics |= self.reshard()
        record = StepRecord(self.step, scored, batch, metrics)
        for observer in self.observers:
            observer.step_ends(record)
        return record.metrics

    def _begin_step(self) -> None:
        """Begins a step. If the last attempt failed, repeats the same step from its beginning."""
        if not self._trains:
            raise UserError("trains", False, "True", "Create a Trainer with trains=True.")
        if self._run.position.is_in_step:
            self.sampler.drop()
            self._run.position.rewind()
        for observer in self.observers:
            observer.step_begins(self.step + 1)
        self._run.position.begin_step()

    def _end_update(self) -> None:
        self._run.position.end_step()
        self.sampler.end_step()
        for observer in self.observers:
            observer.weights_changed(self.step)

    def sample(self, prompts: Sequence[Prompt]) -> tuple[ScoredBatch, dict[str, float]]:
        """Returns scored samples for the step's prompts, and metrics. Raises UserError if none has
        a score.

        For algorithms without rollouts, the samples are the responses in the data. If the algorithm
        resamples, groups without a learning signal are replaced by samples for other prompts.
        """
        needs, metrics = self.algorithm.needs, dict[str, float]()
        if not needs.rollouts:
            self.enter_training()
            return supervised_batch(prompts, needs.feedback), metrics
        if (scored := self._respond(prompts, 0)) is None:
            raise self.scorer.nothing_left()
        if isinstance(self.algorithm, GroupAlgorithm):
            scored, metrics = replace_uniform_groups(
                self.algorithm,
                scored,
                take=partial(self.sampler.take, self.prompts),
                respond=self._respond,
                next_group=len(prompts),
            )
        self.enter_training()
        return scored, metrics

    def _respond(self, prompts: Sequence[Prompt], first_group: int) -> ScoredBatch | None:
        """Generates and scores responses, in groups from `first_group`; None without a score."""
        algorithm, sampler = self.algorithm, self.sampler
        self.enter_rollout()
        with self.journal.phase("generate"):
            local = sampler.generate(
                prompts, step=self.step, first_group=first_group, greedy=algorithm.needs.greedy
            )
        has_rounds = isinstance(algorithm, GroupAlgorithm) and algorithm.max_resampling > 0
        # A reward model needs the memory that the engine uses during generation.
        if sampler.reward_models or not has_rounds:
            self.enter_training()
        with self.journal.phase("reward"):
            return sampler.score_or_none(local)

    def add_columns(self, scored: ScoredBatch) -> TrainBatch:
        """Returns the samples to train on, on their ranks, with the columns that `needs` list."""
        num_updates = self.config.steps.updates_per_step
        is_reused = self.algorithm.needs.rollouts and num_updates > 1
        return self.roles.add_columns(self.algorithm, scored, is_reused, num_updates=num_updates)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Takes one optimizer step for each equal part of the batch and of loss terms. A step is
        skipped if its loss or gradient is not finite. Returns mean metrics. Raises UserError if
        `train.max_skipped_steps` optimizer steps in a row were skipped.
        """
        roles, found, end = self.roles, list[dict[str, float]](), 0
        sizes = mini_batch_sizes(batch, self.config.steps.updates_per_step)
        mixed = self.mix.batches(roles, len(sizes), roles.trains_policy(self.step))
        for index, (size, terms) in enumerate(zip(sizes, mixed, strict=True)):
            part, end = batch.select(range(end, end + size)), end + size
            random_states = rng_state()  # copied before the forward pass changes them
            gradients = roles.gradients(part, self.step, terms)
            found.append(optimizer_step(gradients))
            if found[-1][SKIPPED]:
                self.skipped.add(self.step + 1, index, part, terms, gradients, random_states)
            else:
                self.skipped.in_a_row = 0
        metrics = average(found) | roles.policy.step_mismatch(batch, found[0])
        if isinstance(self.algorithm, AdaptiveAlgorithm):
            metrics |= self.algorithm.after_step(batch)
        return metrics

    def reshard(self, verifies: bool = False) -> dict[str, float]:
        """Sends the current weights to the engine; returns metrics of the transfer."""
        return self._run.phases.reshard(verifies)

    def check_engine(self) -> None:
        """Compares the engine with the trainer; see `EnginePhases.check`."""
        self._run.phases.check(self.memory_table)

    def enter_training(self, frees_memory: bool = False) -> None:
        """Switches to the training phase if necessary."""
        self._run.phases.enter_training(frees_memory)

    def enter_rollout(self) -> None:
        """Switches to the rollout phase if necessary. This sends the weights to the engine."""
        self._run.phases.enter_rollout()

    def evaluate(self, temperature: float | None = None) -> Evaluation:
        """Generates and scores responses to the evaluation prompts and to `eval.sets`.
        `temperature` replaces `eval.temperature`; 0 means greedy. Raises UserError if there are no
        evaluation prompts.
        """
        return self._run.evaluation.measure(temperature)

    def validate(self) -> dict[str, float]:
        """Returns metrics on held-out rows with responses (see `Validation.measure`), if any."""
        return self.validation.measure() if self.validation.has_rows else {}

    def generate(
        self,
        prompts: Sequence[UserPrompt],
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[str]:
        """Generates a response to each prompt with the current weights (see `responses_to`);
        collective.

        Args:
            prompts: Texts or chats (lists of messages), the same on all ranks, like the responses.
            temperature: Sampling temperature; `eval.temperature` if None.
            max_new_tokens: Maximum length of a response; that of the run's evaluations if None.
        """
        from hybridrl.loop.user_prompts import responses_to

        self.enter_rollout()
        return responses_to(
            prompts, self.config, self.tokenizer, self.sampler, temperature, max_new_tokens
        )

    def save_hf(self, path: str | Path) -> Path:
        """Writes the trained policy or reward model as an HF directory, which must be new or empty;
        collective. Returns the directory. Raises UserError if it is not empty, or cannot be
        written.
        """
        return self.checkpoints.save_hf(Path(path), self.tokenizer)

    def save_checkpoint(self, waits: bool = True) -> Path:
        """Writes `checkpoints/step_N` with everything that the run needs to continue.

        Without `waits`, it is completed during later steps, or when `fit` ends. Raises UserError if
        a file cannot be written, or another process has taken over the run folder.
        """
        return self.checkpoints.save(waits)

    def load_checkpoint(self, path: str | Path) -> None:
        """Restores all state from a folder `checkpoints/step_N`, or a run's newest one."""
        self.checkpoints.load(Path(path))

    def close(self) -> None:
        """Finishes writing a checkpoint that is in progress, and leaves the process group."""
        self._run.close()
