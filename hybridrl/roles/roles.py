"""The models of a run: the policy, and what its algorithm needs beside it.

Owns who is trained and whose gradients make one optimizer step. Every model is cut over the ranks
of its role (`placement`), by default all; collective like them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import torch

from hybridrl.algorithms.base import Algorithm, CriticAlgorithm, SelectiveAlgorithm
from hybridrl.config.roles import run_models
from hybridrl.config.rules_experts import replays
from hybridrl.config.schema import Config, PpoConfig
from hybridrl.contracts.batch import BatchError, Producer, ScoredBatch, TrainBatch
from hybridrl.contracts.samples import UNKNOWN_LOGP
from hybridrl.errors import UserError
from hybridrl.metrics.flops import (
    GeneratedLengths,
    forward_flops,
    generate_flops,
    train_flops,
)
from hybridrl.models.families.by_length import positions_summary
from hybridrl.models.score_token import BEFORE_LAST, LAST
from hybridrl.models.trainable import trained_summary
from hybridrl.models.weights import Head
from hybridrl.parallel.exchange import bring
from hybridrl.parallel.groups import World, same_on_all_ranks
from hybridrl.parallel.mesh import Meshes
from hybridrl.roles.auxiliary import AuxiliaryLoss, make_auxiliary_losses
from hybridrl.roles.critic import Critic
from hybridrl.roles.policy import LossTerm, Policy
from hybridrl.roles.reward_models import RewardModel, make_reward_models
from hybridrl.roles.teacher import Teacher, make_teacher
from hybridrl.training.exploded import explosion_of
from hybridrl.training.from_config import build_model, model_source
from hybridrl.training.model import ModelSource, ParallelModel
from hybridrl.training.peer_weights import peer_weights
from hybridrl.training.update import Gradients


@dataclass(frozen=True)
class Roles:
    """The models that an algorithm needs.

    Args:
        source: which model they all are.
        policy, reference, critic: None where the algorithm has no such role.
        trained: the trained models by name.
        num_critic_warmup_steps: steps in which only the critic is trained.
        reward_models: reward models that score what is sampled.
        terms: further terms of the policy's loss, by name.
        teacher: that a distillation learns from.
    """

    source: ModelSource
    policy: Policy
    reference: Policy | None
    critic: Critic | None
    trained: dict[str, ParallelModel]
    num_critic_warmup_steps: int
    reward_models: Sequence[RewardModel] = ()
    terms: Mapping[str, AuxiliaryLoss] = field(default_factory=dict)
    teacher: Teacher | None = None

    def trains_policy(self, num_steps_done: int) -> bool:
        """Whether the policy is trained in the step after so many."""
        return "policy" in self.trained and num_steps_done >= self.num_critic_warmup_steps

    def gradients(
        self,
        part: TrainBatch,
        num_steps_done: int,
        terms: Mapping[str, TrainBatch] = MappingProxyType({}),
    ) -> list[Gradients]:
        """Accumulates the gradients of every model that learns from this mini-batch, and of the
        policy from those of further terms, by name.
        """
        found = [self.critic.gradients(part)] if self.critic is not None else []
        if self.trains_policy(num_steps_done):
            more = [
                LossTerm(name, self.terms[name].algorithm, self.terms[name].weight, batch)
                for name, batch in terms.items()
            ]
            found.append(self.policy.gradients(part, terms=more))
        return found

    def add_columns(
        self,
        algorithm: Algorithm,
        scored: ScoredBatch,
        needs_old_logps: bool = False,
        temperature: float | None = None,
        num_updates: int = 1,
    ) -> TrainBatch:
        """Selects the samples that an algorithm learns from, moves their tokens to the ranks that
        train on them, and adds the columns that its `needs` name: log-probabilities of policy,
        reference and teacher, and values. Collective.

        Args:
            needs_old_logps: adds those of the policy even if the algorithm does not ask.
            temperature: of log-probabilities; None: that of the main algorithm's samples.
            num_updates: mini-batches that the samples are cut into.
        """
        if isinstance(algorithm, SelectiveAlgorithm):
            scored = scored.select(algorithm.selected(scored))
        batch, needs = scored.to_train(Producer.here("the trainer")), algorithm.needs
        batch = self.with_tokens_where_trained(batch, num_updates)
        columns: dict[str, torch.Tensor] = {}
        if needs.old_logps or needs_old_logps:
            columns["old_logp_T"] = self.policy.logprobs(batch, temperature)
        if self.reference is not None and needs.reference:
            columns["reference_logp_T"] = self.reference.logprobs(batch, temperature)
        if self.critic is not None and needs.values:
            columns["values_T"] = self.critic.values(batch)
        if self.teacher is not None and needs.has_teacher:
            columns |= self.teacher.columns(batch)
        if not columns:
            return batch
        # What all_agree gives up after, a lookup may take longer on another rank.
        self.world.arrive("looking up log-probabilities")
        try:
            with self.world.all_agree("looking up log-probabilities"):
                return batch.join_columns(Producer.here("the trainer"), **columns)
        except BatchError as error:  # on all ranks
            if (reason := explosion_of(self.trained, error)) is None:
                raise
            raise reason from error

    def learned(self, batch: TrainBatch) -> ScoredBatch | None:
        """Returns the samples that a step has learned from with the policy's log-probabilities at
        its start in place of the engine's, UNKNOWN_LOGP where one is not finite; None where they
        are not known, since the policy was not trained.
        """
        start_T = self.policy.take_start_logps()
        old_T = start_T if batch.old_logp_T is None else batch.old_logp_T
        if old_T is None:
            return None
        old_T = old_T.nan_to_num(*[UNKNOWN_LOGP] * 3) * batch.response_mask_T
        shared = {field.name: getattr(batch, field.name) for field in fields(ScoredBatch)}
        plain = ScoredBatch(**shared).with_blobs()
        return plain.join_columns(Producer.here("the trainer"), behaviour_logp_T=old_T)

    @property
    def world(self) -> World:
        """All ranks."""
        return self.policy.model.world

    def with_tokens_where_trained(self, batch: TrainBatch, num_updates: int) -> TrainBatch:
        """Returns the batch with the tokens on the ranks that train on them, so that the update
        moves none.
        """
        models = list(self.trained.values()) or [self.policy.model]
        wanted = [model.planner.training_ranks(batch, num_updates) for model in models]
        want_BW = torch.stack(wanted).any(0)
        digest = hashlib.sha256(want_BW.numpy().tobytes()).hexdigest()
        same_on_all_ranks(self.world, "which ranks train on which samples", digest)
        return bring(batch, want_BW, self.world, num_updates)

    def flops(
        self,
        batch: TrainBatch,
        num_steps_done: int,
        generated: GeneratedLengths,
        terms: Sequence[TrainBatch] = (),
    ) -> dict[str, int]:
        """Returns the model FLOPs of a step's phases that were computed, all ranks together: a
        prompt that samples share in a micro-batch once. Output heads count for response tokens
        only, which alone have a loss.

        Args:
            batch: of the step, with all its columns.
            num_steps_done: before it.
            generated: all that was generated for it.
            terms: batches of further terms, whose columns are made in the update too.
        """
        shape, policy = self.source.shape, self.policy.model
        trains_policy = self.trains_policy(num_steps_done)
        lengths, responses = batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())
        value = value_update = 0
        if self.critic is not None:
            critic = self.critic.model
            seen, learned = (
                critic.planner.shared_tokens(batch, is_lookup) for is_lookup in (True, False)
            )
            value = forward_flops(shape, lengths, responses, 1, seen)
            value_update = train_flops(shape, lengths, responses, 1, learned, critic.backward)
        lookups, update = _lm_flops(policy, batch)
        if self.teacher is not None:
            teacher = self.teacher.model
            shared = teacher.planner.shared_tokens(batch, is_lookup=True)
            lookups += forward_flops(teacher.source.shape, lengths, responses, prefixes=shared)
        return {
            "generate": generate_flops(shape, generated),
            "logprobs": lookups + value,
            "update": trains_policy * update
            + value_update
            + sum(sum(_lm_flops(policy, term)) for term in terms),
        }

    def sharing(self, batch: TrainBatch) -> dict[str, float]:
        """Returns by what factor shared prompts lower the model FLOPs of the policy's update;
        nothing where samples do not share prompts.
        """
        policy = self.policy.model
        if not policy.planner.shares_prompts or "policy" not in self.trained:
            return {}
        computed = _update_flops(policy, batch, policy.planner.shared_tokens(batch))
        return {"train/shared_prompts_speedup": _update_flops(policy, batch) / max(computed, 1)}


def _lm_flops(policy: ParallelModel, batch: TrainBatch) -> tuple[int, int]:
    """Returns what a batch's columns of log-probabilities took, and its update of the policy."""
    lengths, responses = batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())
    num = sum(column is not None for column in (batch.old_logp_T, batch.reference_logp_T))
    seen = policy.planner.shared_tokens(batch, is_lookup=True)
    forward = forward_flops(policy.source.shape, lengths, responses, prefixes=seen)
    return num * forward, _update_flops(policy, batch, policy.planner.shared_tokens(batch))


def _update_flops(
    policy: ParallelModel, batch: TrainBatch, shared: Sequence[int] | None = None
) -> int:
    """Returns what an update takes; `shared` tokens of each sample are computed with another."""
    lengths, responses = batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())
    backward = policy.backward
    return train_flops(policy.source.shape, lengths, responses, None, shared, backward)


def make_roles(
    config: Config,
    meshes: Meshes,
    algorithm: Algorithm,
    models: dict[str, ParallelModel],
    notify: Callable[[str], None],
    has_reference: bool = True,
    has_teacher: bool = True,
    has_reward_models: bool = True,
    terms: Mapping[str, AuxiliaryLoss] | None = None,
) -> Roles:
    """Builds the models and fills in their first weights.

    Args:
        config: of the run.
        meshes: that they are cut over, by role.
        algorithm: says which are needed.
        models: gets each as soon as it is there, by name, for the table of an out-of-memory error.
        notify: tells the user, once.
        has_reference, has_teacher: False leaves the reference or the teacher out, where its columns
            are known already, or nothing reads them.
        has_reward_models: False leaves out reward models.
        terms: further ones of the policy's loss; None: made as the section `mix` says.

    Raises:
        UserError: there are terms, and no policy is trained.
    """
    world, needs = meshes.world, algorithm.needs
    terms = make_auxiliary_losses(config) if terms is None else terms
    _check_terms(terms, algorithm)
    held = run_models(config, needs, [term.algorithm.needs for term in terms.values()])
    source = model_source(config.model, world.platform, config.longest_sequence())
    chosen = config.algorithm
    warmup = chosen.critic_warmup_steps if isinstance(chosen, PpoConfig) else 0
    # The length of each model's learning-rate schedule: the updates that it takes itself.
    num_updates = config.steps.num_steps * config.steps.updates_per_step
    num_policy_updates = max(num_updates - warmup * config.steps.updates_per_step, 0)
    temperature = (config.rollout.temperature or 1.0) if needs.rollouts else 1.0
    models["policy"] = model = _build(meshes, "policy", source, config)
    _tell(model, config.longest_sequence(), notify)
    if held.trains_policy:
        if said := trained_summary(config.train.freeze, source.family, source.shape):
            notify(f"trained: {said}")
        model.make_trainable(config.train.learning_rate, peer_weights(config, world, notify))
    else:
        model.freeze()
    policy = Policy(model, algorithm, num_policy_updates, temperature)
    trained: dict[str, ParallelModel] = {"policy": model} if held.trains_policy else {}
    reference = None
    if held.has_reference and has_reference:
        models["reference"] = frozen = _build(meshes, "reference", source, config)
        frozen.freeze()
        reference = Policy(frozen, algorithm, num_policy_updates, temperature)
    critic = None
    if held.has_critic and isinstance(algorithm, CriticAlgorithm):
        models["critic"] = trained["critic"] = _build(meshes, "critic", source, config)
        if not needs.policy:
            trained["critic"].read_scores(LAST if needs.scores else BEFORE_LAST)
        critic = _make_critic(config, trained["critic"], algorithm, num_updates)
    served = held.reward_models if has_reward_models else {}
    reward_models = make_reward_models(config, meshes, source, models, served, needs.greedy, notify)
    teacher = None
    if held.has_teacher and has_teacher:
        teacher = make_teacher(config, meshes.of("teacher"), source, models, needs, temperature)
    return Roles(source, policy, reference, critic, trained, warmup, reward_models, terms, teacher)


def _tell(model: ParallelModel, longest: int, notify: Callable[[str], None]) -> None:
    notify(model.layers.said)
    if said := positions_summary(model.source.hf_config, longest):
        notify(f"positions: {said}")


def _build(meshes: Meshes, role: str, source: ModelSource, config: Config) -> ParallelModel:
    head: Head = "value" if role == "critic" else "lm"
    model = build_model(meshes.of(role), source, head, config)
    if role == "policy" and replays(config):
        model.replay_experts()
    return model


def _make_critic(
    config: Config, model: ParallelModel, algorithm: CriticAlgorithm, num_updates: int
) -> Critic:
    rate = config.train.critic_learning_rate
    model.make_trainable(config.train.learning_rate if rate is None else rate)
    return Critic(model, algorithm, num_updates)


def _check_terms(terms: Collection[str], algorithm: Algorithm) -> None:
    if terms and not algorithm.needs.policy:
        raise UserError(
            "mix",
            f"terms {', '.join(terms)}",
            f"nothing with algorithm {algorithm.name}, which trains no policy",
            "Remove mix.",
        )
