"""The loop: generate, score, look up log-probabilities, estimate advantages, update, reshard.

SPMD: every rank runs this same code and knows lengths and rewards of all samples, but holds the
tokens of some only; there is no controller. A step is `Trainer.train_step`, on one screen; what it
calls is public, so another dataflow is another script over the same parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hybridrl import console
from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import AdaptiveAlgorithm, Algorithm, GroupAlgorithm
from hybridrl.algorithms.preference import feedback_metrics
from hybridrl.checkpoint.model_state import connect_shares, saved_bytes
from hybridrl.checkpoint.run_lock import RunLock
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.identity import check_run_folder, run_folder
from hybridrl.config.load import as_config
from hybridrl.config.own_code import contained, make_working_folder_importable
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import Prompt, ScoredBatch, TrainBatch
from hybridrl.data.prompt_store import Rows
from hybridrl.data.supervised import supervised_batch
from hybridrl.errors import UserError
from hybridrl.generation.resampling import UniformGroupsWarning, replace_uniform_groups
from hybridrl.loop import garbage, ledger, rollout_setup, setup
from hybridrl.loop.copying import Copies
from hybridrl.loop.engine_phases import EnginePhases
from hybridrl.loop.evaluate import Evaluation
from hybridrl.loop.exports import Exports, export_with_tokenizer
from hybridrl.loop.journal import Journal
from hybridrl.loop.model_card import model_card
from hybridrl.loop.position import Position
from hybridrl.loop.run_data import Given, make_data
from hybridrl.loop.run_starts import StartTimes
from hybridrl.loop.saves import SaveClock, again, load_run_state, run_state, stop_notice
from hybridrl.loop.schedule import last_step
from hybridrl.loop.skipped import SkippedSteps
from hybridrl.loop.updates import take_updates
from hybridrl.loop.user_arguments import ARGUMENTS, unknown_argument
from hybridrl.loop.user_prompts import UserPrompt, responses_to
from hybridrl.loop.validation import Validation
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.stopping import StopAsked, check_stop, stops_on_signals
from hybridrl.platform import Platform, start_kernels_in_order
from hybridrl.rewards.functions import RewardFunction
from hybridrl.roles.roles import make_roles
from hybridrl.rollout.build import EngineAdapter
from hybridrl.rollout.engine import Holding
from hybridrl.training.mismatch import MismatchWarning
from hybridrl.training.model import ParallelModel


class Trainer:
    """One training run on this rank.

    Attributes (public, for other dataflows): `policy`, `reference`, `critic`, `engine`,
    `algorithm`, `hybrid_engine`, `prompts`.

    Args:
        config: the whole configuration, already validated by itself; rules between knobs are
            checked here.
        prompts: rows in place of `data.prompts` (any iterable of mappings, a `datasets.Dataset`
            too).
        reward: Function f(prompt, response, columns) -> float in place of the section `reward`, or
            a list of them, whose scores are added.
        tokenizer: in place of `model.tokenizer`.
        mix: rows in place of `mix.NAME.data.prompts`, by NAME.
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
        self.config, self._trains = config, trains
        self._times = StartTimes()
        self._times.over("imports")
        garbage.collect_earlier()
        make_working_folder_importable()
        start_kernels_in_order(config.train.tp, config.train.cp)
        self.platform = Platform.detect()
        self.platform.activate()
        start_process_group(self.platform, config.run.collective_timeout_s)
        self.models: dict[str, ParallelModel] = {}
        self._engine_bytes: Callable[[], Mapping[str, Holding]] = dict  # until there is an engine
        self._keeps_memory: Callable[[], bool] = bool
        try:
            with contained(), ledger.explained(self.memory_table):
                self._build(Given(prompts, reward, tokenizer, mix or {}))
        except BaseException as error:
            # A corrected attempt can start; after other errors NCCL might wait for lost ranks, and
            # so would gloo for a rank that does not answer.
            is_lost = isinstance(error, PeerError) and error.is_lost
            if isinstance(error, UserError) or (self.platform.is_cpu and not is_lost):
                stop_process_group()
            raise

    def _build(self, given: Given) -> None:
        config = self.config = setup.pinned_on_all_ranks(self.config)
        machines = setup.find_machines(self.platform)
        setup.check_rules(config, machines, self._trains)
        meshes = setup.make_meshes(config, self.platform, machines)
        self._times.over("process groups")
        self.world = meshes.world
        self.platform.seed(config.run.seed)
        with self.world.all_agree("checking the run folder"):
            check_run_folder(config, self._trains)
        self.journal = Journal(config, self.world)
        setup.tell_order(config, meshes, self.journal.notify)
        self.step, self.seconds, self._started = 0, 0.0, time.monotonic()
        self._has_begun = False  # a checkpoint was loaded, or a step taken
        self._is_settled = False  # a step of this process has made what stays
        self._saved_step = 0  # of the checkpoint that was saved or loaded last
        self._lock = RunLock(self.journal.folder)
        replay = self.journal.folder / "replay"
        self.skipped = SkippedSteps(config, self.world, replay, self.journal.notify)
        self.algorithm: Algorithm = make_algorithm(config.algorithm)
        of_run = config, self.world, self.algorithm.needs, given, self.journal.notify
        data = make_data(*of_run, self._trains)
        self.tokenizer, self.scorer, self.mix = data.tokenizer, data.scorer, data.mix
        self.prompts, self.eval_prompts = data.prompts, data.eval_prompts
        config = self.config = setup.with_epochs(config, len(self.prompts))
        self._position = Position(self.prompts, self.mix)
        self.evaluations = data.evaluations(config)
        self._times.over("data")
        parts = (config, meshes, self.algorithm, self.models, self.journal.notify)
        roles = make_roles(
            *parts,
            has_reference=self._trains or bool(data.validation),
            has_teacher=self._trains,
            terms=self.mix.terms,
        )
        self.roles, self.source, self.trained = roles, roles.source, roles.trained
        self.policy, self.reference, self.critic = roles.policy, roles.reference, roles.critic
        self.validation = Validation(
            config.steps,
            data.validation,
            self.algorithm,
            roles,
            self.enter_training,
            self.journal,
            self.evaluations,
        )
        self._times.over("models")
        self._warnings = (MismatchWarning(self.source.dtype), UniformGroupsWarning())
        generation = rollout_setup.make_generation(
            config,
            roles,
            meshes.placement,
            (self.scorer, self.tokenizer),
            self.journal.notify,
            self._note_engine,
        )
        self.engine, self.sampler, self.hybrid_engine = generation
        self._keeps_memory = lambda: self.hybrid_engine.keeps_memory
        self.journal.unseen_bytes = lambda: rollout_setup.unseen_bytes(self.trained, self.engine)
        made = self.hybrid_engine, self.sampler, self.policy
        self._phases = EnginePhases(config, *made, self.journal)
        of_store = config.checkpoint.keep, self.journal.notify, meshes.name, config.run.grace_s
        self.store = CheckpointStore(run_folder(config) / "checkpoints", self.world, *of_store)
        self.exports = Exports(config, self.journal.notify)
        self._saves = SaveClock(config.checkpoint, self.world)
        for model in roles.trained.values():
            connect_shares(model)
        num_bytes = sum(map(saved_bytes, roles.trained.values()))  # while all of it is in place
        self.copies = Copies(config, self.store, num_bytes, self.journal.notify, self._trains)
        self._times.over("plan of the weights")

    def _note_engine(self, engine: EngineAdapter) -> None:
        self._engine_bytes = engine.memory
        self._times.over("engine")

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | Config,
        overrides: Sequence[str] = (),
        **objects: Any,
    ) -> Trainer:
        """Builds a trainer from a YAML file, a mapping or a Config.

        Args:
            config: where the configuration comes from.
            overrides: `key=value` texts on top.
            **objects: `prompts`, `reward`, `tokenizer`, `mix` in place of their sections.

        Raises:
            ConfigError: the configuration is wrong.
            UserError: an argument has another name.
        """
        if unknown := objects.keys() - ARGUMENTS:
            raise unknown_argument(unknown)
        return cls(as_config(config, overrides), **objects)

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

        A trainer that has neither loaded a checkpoint nor taken a step goes on from a checkpoint of
        its run folder, if there is one; `num_steps` counts from there.

        Args:
            num_steps: how many more steps to take.
            until: the step to end with.
            resume: which checkpoint to go on from: the newest, or the newest whole one before it.

        Returns:
            `seconds`, those of earlier starts of the run included; where there are evaluation
            prompts `eval_reward_before` and `eval_reward_after`, and where a scorer says how right
            responses are `accuracy_before` and `accuracy_after`, each only if the first evaluation
            or the last one has it; of held-out rows with responses `validation/loss_before` and the
            like.

        Raises:
            UserError: both `num_steps` and `until` are given, or one is negative.
            KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the next `fit` goes on from here.
        """
        self._started = time.monotonic()
        with self._lock.held(self.world, self.journal.notify):
            if not self._has_begun and (found := self.copies.newest(resume)) is not None:
                self._times.over("choice of the state")
                self.load_checkpoint(found)
                self._times.over("state")
            default, first = self.config.steps.num_steps, self.step
            last = last_step(num_steps, until, first, default)
            is_done = 0 < last <= first or (first and self.evaluations.reach_goal(self.step))
            is_measured = not (
                self.evaluations.are_due(self.step, last)
                or self.validation.is_left_over(self.step, last)
            )
            if is_done and is_measured:
                if self.store.copy_in_memory is not None:
                    self.save_checkpoint()  # of what no checkpoint has
                by_step = self.evaluations.by_step
                return self.journal.nothing_to_do(first, last, by_step, self.seconds)
            self.journal.start(first, last)
            self.copies.start(first, last)
            self._times.over("records and copies")
            try:
                save = partial(self._save_at_stop, last, resume)
                asked = stops_on_signals(self.world, save, stop_notice(self.config))
                with self.store.completed(), asked, ledger.explained(self.memory_table):
                    self._train_to(last)
                    self.copies.close()
                self.seconds += time.monotonic() - self._started
                return self.journal.finish(first, self.step, self.evaluations.by_step, self.seconds)
            finally:
                self.journal.close()

    def _train_to(self, last: int) -> None:
        """Takes the steps up to `last`, with the evaluations and checkpoints that are due."""
        if self.algorithm.needs.rollouts:
            if self._phases.is_checked:
                self.enter_rollout()
            else:
                self.check_engine()
        self._times.over("first weights")
        self._saves.start()
        found = self.validation.begin(self.step, last)
        if self.evaluations.are_due(self.step, last):
            found |= self._evaluate_and_keep()
        if self.step and found:  # a stop came before what was due after this step
            self.journal.log(self.step, found)
            self.save_checkpoint()  # or every start would evaluate again
        while self.step < last and not self.evaluations.reach_goal(self.step):
            with self.journal.traced(self.step + 1):
                metrics = self.train_step()
            if self._times.over("first step", is_last=True):
                self.journal.note_start(self._times.seconds)
            try:
                check_stop(self.world)
                metrics |= self.validation.measure_due(self.step, last)
                if self.evaluations.are_due(self.step, last):
                    metrics |= self._evaluate_and_keep()
            finally:
                self.journal.log(self.step, metrics)
                self.copies.seal(self.evaluations.by_step)
            self.journal.warn(self._warnings, self.step, metrics)
            ends = last if not self.evaluations.reach_goal(self.step) else self.step
            self.store.finish_if_written()
            if self._saves.is_due(self.step, ends):
                self.save_checkpoint(waits=self._saves.waits(self.step, ends))

    def _save_at_stop(self, last: int, resume: str, stop: StopAsked) -> None:
        """Saves what no checkpoint has, with what a step under way has generated."""
        self.enter_training()
        rollouts, saved = self.sampler.has_rollouts, "nothing is new since the last checkpoint"
        self._position.rewind()
        try:
            self.store.finish()
            if rollouts or self.step != self._saved_step:
                saved = f"saved to {self.save_checkpoint()}"
                self._has_begun = False  # another `fit` begins with this checkpoint
            self.copies.close()
        finally:
            self.sampler.drop()
        saved += f", with the responses of step {self.step + 1} so far" if rollouts else ""
        done = f"{stop} after step {self.step} of {last}: {saved}"
        self.journal.notify(f"{done}. {again(resume)} goes on from there.")
        self.world.arrive("removing old checkpoints")

    def memory_table(self) -> str:
        """Returns what this rank's device holds, by part, from the next change of phases on."""
        held = ledger.entries(self.models, self._engine_bytes(), self._keeps_memory())
        return ledger.table(held, self.platform)

    def train_step(self) -> dict[str, float]:
        """Takes one step and returns its metrics, the same on all ranks."""
        if not self._trains:
            raise UserError("trains", False, "a Trainer with trains=True", "Make another to train.")
        if self._position.is_in_step:  # it has failed before
            self.sampler.drop()
            self._position.rewind()
        timer = self.journal.timer
        timer.start_step(self.step + 1)
        self._position.begin_step()
        self._has_begun = True
        prompts = self.sampler.take(self.prompts, self.config.steps.prompts_per_step)
        sampled: dict[str, float] = {}
        if self.algorithm.needs.rollouts:
            scored, sampled = self.sample(prompts)
        else:
            self.enter_training()
            scored = supervised_batch(prompts, self.algorithm.needs.feedback)
        with self.sampler.ahead(self.prompts, timer.phase("generate")):
            check_stop(self.world)
            with timer.phase("logprobs"):
                batch = self.add_columns(scored)
            with timer.phase("advantages"), self.world.all_agree("estimating advantages"):
                batch = self.algorithm.advantages(batch)
            check_stop(self.world)  # the signal came with the agreement above
            with timer.phase("update"):
                metrics = self.update(batch) | sampled | {"train/epoch": self.prompts.epoch}
        if isinstance(self.algorithm, AdaptiveAlgorithm):
            metrics |= self.algorithm.after_step(batch)
        self.step += 1
        self._position.end_step()
        self.sampler.end_step()
        if not self._is_settled:
            garbage.set_aside(self.platform)
            self._is_settled = True
        self.copies.take_due(self.step, self.trained, self._state, self.source.files, timer)
        if self.algorithm.needs.rollouts:
            metrics |= self.reshard()
            self.journal.dump_samples(self.step, scored, self.roles.learned(batch), self.scorer)
            metrics |= self.journal.describe(scored) | self.sampler.metrics()
        metrics |= feedback_metrics(batch) if self.algorithm.needs.feedback else {}
        metrics |= self.roles.sharing(batch)
        flops = self.roles.flops(batch, self.step - 1, self.sampler.generated, self.mix.taken)
        shown = scored if self.algorithm.needs.rollouts else batch
        return self.journal.summarize(shown, metrics, flops)

    def sample(self, prompts: Sequence[Prompt]) -> tuple[ScoredBatch, dict[str, float]]:
        """Returns the scored samples of the step's prompts, and metrics; where the algorithm asks
        for it, groups that teach nothing are replaced by further prompts'.

        Raises:
            UserError: no response to the prompts has a score.
        """
        metrics: dict[str, float] = {}
        if (scored := self._respond(prompts, 0)) is None:
            raise self.scorer.nothing_left()
        if isinstance(self.algorithm, GroupAlgorithm):
            take = partial(self.sampler.take, self.prompts)
            parts = take, self._respond, len(prompts)  # generates again, in rounds
            scored, metrics = replace_uniform_groups(self.algorithm, scored, *parts)
        self.enter_training()
        return scored, metrics

    def _respond(self, prompts: Sequence[Prompt], first_group: int) -> ScoredBatch | None:
        """Returns the scored samples of prompts, whose first group has this number; None where no
        response has a score.
        """
        algorithm, sampler, timer = self.algorithm, self.sampler, self.journal.timer
        self.enter_rollout()
        with timer.phase("generate"):
            step, greedy = self.step, algorithm.needs.greedy
            local = sampler.generate(prompts, step=step, first_group=first_group, greedy=greedy)
        has_rounds = isinstance(algorithm, GroupAlgorithm) and algorithm.max_resampling > 0
        # A reward model's pass needs the memory that the engine has while it generates.
        if sampler.reward_models or not has_rounds:
            self.enter_training()
        with timer.phase("reward"):
            return sampler.score_or_none(local)

    def add_columns(self, scored: ScoredBatch) -> TrainBatch:
        """Returns the samples that the algorithm learns from, with the columns that its `needs`
        name; moves their tokens to the ranks that train on them.
        """
        num_updates = self.config.steps.updates_per_step
        is_reused = self.algorithm.needs.rollouts and num_updates > 1
        return self.roles.add_columns(self.algorithm, scored, is_reused, num_updates=num_updates)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Takes the optimizer steps of a step; returns mean metrics, as `take_updates` says."""
        number = self.config.steps.updates_per_step
        parts = self.algorithm, self.roles, self.mix, self.skipped
        return take_updates(batch, self.step, number, *parts)

    def reshard(self, verifies: bool = False) -> dict[str, float]:
        """Brings the weights of this step into the engine, as `EnginePhases.reshard` says."""
        return self._phases.reshard(self.step, verifies)

    def check_engine(self) -> None:
        """Compares the engine with the trainer, or raises, as `EnginePhases.check` says."""
        self._phases.check(self.step, self.memory_table)

    def enter_training(self, frees_memory: bool = False) -> None:
        """Ends the rollout phase, as `EnginePhases.enter_training` says."""
        self._phases.enter_training(frees_memory)

    def enter_rollout(self) -> None:
        """Begins the rollout phase, as `EnginePhases.enter_rollout` says."""
        self._phases.enter_rollout(self.step)

    def evaluate(self, temperature: float | None = None) -> Evaluation:
        """Scores responses to the evaluation prompts and to `eval.sets`.

        Args:
            temperature: in place of `eval.temperature`; 0 is greedy.

        Raises:
            UserError: there are no evaluation prompts.
        """
        self.enter_rollout()
        # A reward model's pass needs the memory that the engine has while it generates.
        end_rollout = self.enter_training if self.sampler.reward_models else None
        with self.journal.timer.phase("evaluate"):
            return self.evaluations.measure(self.sampler, temperature, end_rollout)

    def validate(self) -> dict[str, float]:
        """Returns what the algorithm makes of held-out rows with responses, as
        `Validation.measure`; nothing where there are none.
        """
        if not self.validation.has_rows:
            return {}
        self.enter_training()
        with self.journal.timer.phase("evaluate"):
            return self.validation.measure()

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
        return responses_to(
            prompts, self.config, self.tokenizer, self.sampler, temperature, max_new_tokens
        )

    def save_hf(self, path: str | Path) -> Path:
        """Writes the trained model as an HF directory: the policy, or the reward model that is
        trained in its place; collective. Returns the directory.

        Args:
            path: Directory to make; it must not exist, or be empty.

        Raises:
            UserError: the directory has files, or cannot be written.
        """
        was_rollout = self._phases.is_rollout
        self.enter_training(frees_memory=True)  # weights may be away
        model = self.trained.get("policy") or next(iter(self.trained.values()))
        card = model_card(self.config, model, f"step_{self.step}", self.evaluations.by_step)
        export_with_tokenizer(model, Path(path), self.source.files.side_files, self.tokenizer, card)
        if was_rollout:
            self.reshard()
        return Path(path)

    def _evaluate_and_keep(self) -> dict[str, float]:
        """Evaluates and notes what was found for this step; returns its metrics."""
        self.evaluations.announce(self.step, self.journal.notify)
        found = self.evaluate()
        self.evaluations.keep(self.step, found, self.journal.notify)
        return found.metrics()

    def save_checkpoint(self, waits: bool = True) -> Path:
        """Writes `checkpoints/step_N` with everything that the run needs to go on.

        Args:
            waits: until it is complete; else it is when a later step or `fit` ends.

        Raises:
            UserError: a file could not be written, or another run has taken the run folder over.
        """
        with self._lock.held(self.world, self.journal.notify):
            was_rollout = self._phases.is_rollout
            state = self._state()
            # The optimizer's state may be away, and the engine holds memory.
            self.enter_training(frees_memory=True)
            with self.journal.timer.phase("checkpoint"):
                waits = waits or self.config.checkpoint.export_hf  # of these weights
                folder = self.store.save(self.step, self.trained, state, self.source.files, waits)
                self.exports.write(folder, self.trained, self.evaluations.by_step)
            self._saved_step = self.step
            self._saves.start()
            if was_rollout:
                self.reshard()
            return folder

    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside weights, optimizers and random states."""
        seconds = self.seconds + time.monotonic() - self._started
        cursors = {**self._position.state(), "rollouts": self.sampler.state()}
        of_models = self.algorithm, self.trained
        return run_state(self.step, seconds, cursors, *of_models, self.evaluations.by_step)

    def load_checkpoint(self, path: str | Path) -> None:
        """Restores weights, optimizers, prompt cursor, random states and unfinished rollouts.

        Args:
            path: a `checkpoints/step_N` folder, or a run folder, which stands for its newest.
        """
        self.enter_training(frees_memory=True)  # as to save
        state = self.store.load(Path(path), self.trained)
        self.hybrid_engine.send_frozen_again()  # those of the checkpoint
        assert state.step is not None  # the store refuses weights alone
        self._has_begun = True
        self.step, self.seconds = state.step, state.seconds
        is_own = [one.step for one in self.store.lineage[:1]] == [state.step]
        self._saved_step = state.step if is_own else 0  # the run has no checkpoint of this step
        self.evaluations.by_step = dict(state.evaluations)
        self._position.load({"prompts": state.prompts, "mix": state.mix})
        load_run_state(state, self.algorithm, self.trained, self.journal.notify)
        self.sampler.load_state(state.rollouts, self.prompts)
        self.reshard()

    def close(self) -> None:
        """Completes a checkpoint that is being written, and leaves the process group."""
        self.store.complete_at_end()
        self.journal.close()
        self._lock.release()
        self.sampler.close()
        self.evaluations.close()
        self.hybrid_engine.close()
        self.engine.close()
        for model in self.models.values():
            model.close()
        garbage.take_back()
        stop_process_group()
