"""The training loop: generate, score, look up log-probabilities, estimate advantages, update,
reshard.

SPMD: every rank runs this same code and knows lengths and rewards of all samples, but holds the
tokens of some only; there is no controller. A step is `Trainer.train_step`; what it calls is
public, so another dataflow is another script over the same parts. Everything else that happens in
a run is an observer (observers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybridrl import console
from hybridrl.algorithms.base import AdaptiveAlgorithm, GroupAlgorithm
from hybridrl.config.load import as_config
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import Prompt, ScoredBatch, TrainBatch
from hybridrl.data.supervised import supervised_batch
from hybridrl.errors import UserError
from hybridrl.generation.resampling import replace_uniform_groups
from hybridrl.loop.observers import StepRecord, last_step
from hybridrl.loop.user_arguments import ARGUMENTS, Given, unknown_argument
from hybridrl.parallel.stopping import check_stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.prompt_store import Rows
    from hybridrl.loop.evaluate import Evaluation
    from hybridrl.loop.user_prompts import UserPrompt
    from hybridrl.rewards.functions import RewardFunction


class Trainer:
    """One training run on this rank.

    Attributes (public, for other dataflows): `policy`, `reference`, `critic`, `engine`, `sampler`,
    `algorithm`, `hybrid_engine`, `prompts`.

    Args:
        config: The whole configuration, already validated by itself; rules between knobs are
            checked here.
        prompts: Rows in place of `data.prompts` (any iterable of mappings, a `datasets.Dataset`
            too).
        reward: Function f(prompt, response, columns) -> float in place of the section `reward`, or
            a list of them, whose scores are added.
        tokenizer: Tokenizer in place of `model.tokenizer`.
        mix: Rows in place of `mix.NAME.data.prompts`, by NAME.
        trains: False: only evaluates, without a teacher, and without the reference where no loss on
            held-out rows needs it.
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
        # Here, so that this module knows the parts of a run by what they do, not how they are made.
        from hybridrl.loop.build import Run

        self._run, self._trains = (run := Run(config, given, trains)), trains
        self.config, self.world, self.platform = run.config, run.world, run.platform
        self.tokenizer, self.scorer = run.data.tokenizer, run.data.scorer
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

        Args:
            config: Where the configuration comes from.
            overrides: `key=value` texts on top.
            **objects: `prompts`, `reward`, `tokenizer`, `mix` in place of their sections.

        Raises:
            ConfigError: The configuration is wrong.
            UserError: An argument has another name.
        """
        if unknown := objects.keys() - ARGUMENTS:
            raise unknown_argument(unknown)
        return cls(as_config(config, overrides), **objects)

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._run.position.step

    @console.protected()
    def fit(
        self,
        num_steps: int | None = None,
        *,
        until: int | None = None,
        resume: Literal["newest", "previous"] = "newest",
    ) -> dict[str, float]:
        """Trains: `num_steps` more steps, or up to step `until`; without either up to
        `steps.num_steps`.

        A trainer that has neither loaded a checkpoint nor taken a step continues from a checkpoint
        of its run folder, if there is one; `num_steps` counts from there.

        Args:
            num_steps: Further steps to take.
            until: Step to end with.
            resume: Checkpoint to continue from: the newest, or the newest whole one before it.

        Returns:
            `seconds`, those of earlier starts of the run included; where there are evaluation
            prompts `eval_reward_before` and `eval_reward_after`, and where a scorer says how right
            responses are `accuracy_before` and `accuracy_after`, each only if the first evaluation
            or the last one has it; of held-out rows with responses `validation/loss_before` and the
            like.

        Raises:
            UserError: Both `num_steps` and `until` are given, or one is negative.
            KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the next `fit` continues from
                here.
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
            if is_done and not self._is_measurement_left(last):
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

    def _is_measurement_left(self, last: int) -> bool:
        """Whether a stop came between the last step and an evaluation that was due after it."""
        return self.evaluations.are_due(self.step, last) or self.validation.is_left_over(
            self.step, last
        )

    def _train_to(self, last: int) -> None:
        """Takes the steps up to `last`, with what observers do between them."""
        if self.algorithm.needs.rollouts:
            if self._run.phases.is_checked:
                self.enter_rollout()
            else:
                self.check_engine()
        self._run.times.over("first weights")
        self.checkpoints.start_clock()
        if (found := self._measure(last)) and self.step:
            self.journal.log(self.step, found)
            self.save_checkpoint()  # or every start would evaluate again
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
        """Adds what observers measure now to metrics, and returns them."""
        metrics = {} if metrics is None else metrics
        for observer in self.observers:
            metrics |= observer.measures(self.step, last)
        return metrics

    def memory_table(self) -> str:
        """Returns what this rank's device holds, by part, from the next change of phases on."""
        return self._run.ledger.table()

    def train_step(self) -> dict[str, float]:
        """Takes one step and returns its metrics, the same on all ranks."""
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
        return self._end_step(StepRecord(self.step, scored, batch, metrics))

    def _begin_step(self) -> None:
        """Goes to the beginning of the step, also if it has failed before."""
        if not self._trains:
            raise UserError("trains", False, "a Trainer with trains=True", "Make another to train.")
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

    def _end_step(self, record: StepRecord) -> dict[str, float]:
        for observer in self.observers:
            observer.step_ends(record)
        return record.metrics

    def sample(self, prompts: Sequence[Prompt]) -> tuple[ScoredBatch, dict[str, float]]:
        """Returns the scored samples of the step's prompts, and metrics. Groups that teach nothing
        are replaced by further prompts' where the algorithm asks for it; where it needs no
        rollouts, samples are the responses of the data.

        Raises:
            UserError: No response to the prompts has a score.
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
        """Returns the scored samples of prompts, whose first group has this number; None where no
        response has a score.
        """
        algorithm, sampler = self.algorithm, self.sampler
        self.enter_rollout()
        with self.journal.phase("generate"):
            local = sampler.generate(
                prompts, step=self.step, first_group=first_group, greedy=algorithm.needs.greedy
            )
        has_rounds = isinstance(algorithm, GroupAlgorithm) and algorithm.max_resampling > 0
        # A reward model's pass needs the memory that the engine has while it generates.
        if sampler.reward_models or not has_rounds:
            self.enter_training()
        with self.journal.phase("reward"):
            return sampler.score_or_none(local)

    def add_columns(self, scored: ScoredBatch) -> TrainBatch:
        """Returns the samples that the algorithm learns from, with the columns that its `needs`
        name; moves their tokens to the ranks that train on them.
        """
        num_updates = self.config.steps.updates_per_step
        is_reused = self.algorithm.needs.rollouts and num_updates > 1
        return self.roles.add_columns(self.algorithm, scored, is_reused, num_updates=num_updates)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Takes the optimizer steps of a step; returns mean metrics, as `Updates.take` says."""
        metrics = self._run.updates.take(
            batch, step=self.step, number=self.config.steps.updates_per_step
        )
        if isinstance(self.algorithm, AdaptiveAlgorithm):
            metrics |= self.algorithm.after_step(batch)
        return metrics

    def reshard(self, verifies: bool = False) -> dict[str, float]:
        """Brings the weights of this step into the engine; returns bytes and rate."""
        return self._run.phases.reshard(verifies)

    def check_engine(self) -> None:
        """Compares the engine with the trainer, or raises, as `EnginePhases.check` says."""
        self._run.phases.check(self.memory_table)

    def enter_training(self, frees_memory: bool = False) -> None:
        """Ends the rollout phase, if it is the current one."""
        self._run.phases.enter_training(frees_memory)

    def enter_rollout(self) -> None:
        """Begins the rollout phase with the policy's weights, if it is not the current one."""
        self._run.phases.enter_rollout()

    def evaluate(self, temperature: float | None = None) -> Evaluation:
        """Scores responses to the evaluation prompts and to `eval.sets`.

        Args:
            temperature: Temperature in place of `eval.temperature`; 0 is greedy.

        Raises:
            UserError: There are no evaluation prompts.
        """
        return self._run.evaluation.measure(temperature)

    def validate(self) -> dict[str, float]:
        """Returns what the algorithm makes of held-out rows with responses, as
        `Validation.measure`; nothing where there are none.
        """
        return self.validation.measure() if self.validation.has_rows else {}

    def generate(
        self,
        prompts: Sequence[UserPrompt],
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[str]:
        """Generates a response to each prompt with the present weights, as `responses_to` says;
        collective, all ranks return the same.

        Args:
            prompts: Texts or chats (lists of messages), the same on all ranks.
            temperature: Sampling temperature; None: `eval.temperature`.
            max_new_tokens: Longest response; None: the longest of the run's evaluations.
        """
        self.enter_rollout()
        return self._run.responses_to(prompts, temperature, max_new_tokens)

    def save_hf(self, path: str | Path) -> Path:
        """Writes the trained model as an HF directory: the policy, or the reward model that is
        trained in its place; collective. Returns the directory.

        Args:
            path: Directory to make; it must not exist, or be empty.

        Raises:
            UserError: The directory has files, or cannot be written.
        """
        return self.checkpoints.save_hf(Path(path), self.tokenizer)

    def save_checkpoint(self, waits: bool = True) -> Path:
        """Writes `checkpoints/step_N` with everything that the run needs to continue.

        Args:
            waits: Whether to wait until it is complete; else it is when a later step or `fit` ends.

        Raises:
            UserError: A file could not be written, or another run has taken the run folder over.
        """
        return self.checkpoints.save(waits)

    def load_checkpoint(self, path: str | Path) -> None:
        """Restores weights, optimizers, prompt cursor, random states and unfinished rollouts.

        Args:
            path: A `checkpoints/step_N` folder, or a run folder, which stands for its newest.
        """
        self.checkpoints.load(Path(path))

    def close(self) -> None:
        """Completes a checkpoint that is being written, and leaves the process group."""
        self._run.close()
