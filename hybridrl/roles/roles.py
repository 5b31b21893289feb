"""The models of a run: the policy and the other models that the algorithm needs.

Collective: all ranks call every function together. Decides which models are trained, and which
gradients are applied in one optimizer step. Every model is split over the ranks of its role
(`placement`), by default over all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

import torch

from hybridrl.algorithms.base import Algorithm, CriticAlgorithm, SelectiveAlgorithm
from hybridrl.config.own_code import imported
from hybridrl.config.roles import run_models
from hybridrl.config.rules_experts import replays
from hybridrl.config.rules_numerics import gpu_numerics_rules
from hybridrl.config.rules_sampling import centers_scores, num_likely, replays_sampling
from hybridrl.config.schema import Config, PpoConfig
from hybridrl.contracts.batch import BatchError, Producer, ScoredBatch, TrainBatch
from hybridrl.contracts.prompts import UNKNOWN_LOGP
from hybridrl.errors import UserError
from hybridrl.metrics.flops import GeneratedLengths, forward_flops, generate_flops, train_flops
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.adapters.settings import base_notice, lora_of
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
from hybridrl.rollout.registry import ENGINES
from hybridrl.training.from_config import build_model, model_source
from hybridrl.training.model import ModelSource, ParallelModel
from hybridrl.training.peer_weights import peer_weights
from hybridrl.training.update import Gradients, explosion_of


@dataclass(frozen=True)
class Roles:
    """The models that an algorithm needs; None for roles that it does not need.

    Policy, reference and critic are loaded from `source`.
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
        return "policy" in self.trained and num_steps_done >= self.num_critic_warmup_steps

    def gradients(
        self,
        part: TrainBatch,
        num_steps_done: int,
        terms: Mapping[str, TrainBatch] = MappingProxyType({}),
    ) -> list[Gradients]:
        """Accumulates gradients of all trained models on a mini-batch and on the terms' batches."""
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
        """Selects the samples from which the algorithm learns, moves their tokens to the ranks that
        train on them, and adds the columns that the algorithm needs. Collective.

        Args:
            needs_old_logps: Whether to add the policy's log-probabilities even if the algorithm
                does not need them.
            temperature: Temperature of the log-probabilities; None means the sampling temperature.
            num_updates: Number of mini-batches into which the samples will be split.
        """
        if isinstance(algorithm, SelectiveAlgorithm):
            scored = scored.select(algorithm.selected(scored))
        batch, needs = scored.to_train(Producer.here("the trainer")), algorithm.needs
        batch = self.with_tokens_where_trained(batch, num_updates)
        columns: dict[str, torch.Tensor] = {}
        if needs.old_logps or needs_old_logps:
            if self.policy.old_is_sampled and needs.rollouts:
                columns["old_logp_T"] = batch.behaviour_logp_T * batch.response_mask_T
            else:
                columns["old_logp_T"] = self.policy.logprobs(batch, temperature)
        if self.reference is not None and needs.reference:
            columns["reference_logp_T"] = self.reference.logprobs(batch, temperature)
        if self.critic is not None and needs.values:
            columns["values_T"] = self.critic.values(batch)
        if self.teacher is not None and needs.has_teacher:
            columns |= self.teacher.columns(batch)
        if not columns:
            return batch
        # Wait here first, because the lookup on another rank may take longer than the timeout of
        # all_agree.
        self.world.arrive("looking up log-probabilities")
        try:
            with self.world.all_agree("looking up log-probabilities"):
                return batch.join_columns(Producer.here("the trainer"), **columns)
        except BatchError as error:  # raised on all ranks
            if (reason := explosion_of(self.trained, error)) is None:
                raise
            raise reason from error

    def learned(self, batch: TrainBatch) -> ScoredBatch | None:
        """Returns the samples of a step, with the engine's log-probabilities replaced by the
        policy's at the start of the step (UNKNOWN_LOGP if not finite). None if these are unknown
        because the policy was not trained in this step.
        """
        start_T = self.policy.take_start_logps()
        old_T = start_T if batch.old_logp_T is None else batch.old_logp_T
        if old_T is None:
            return None
        old_T = old_T.nan_to_num(*[UNKNOWN_LOGP] * 3) * batch.response_mask_T
        shared = {field.name: getattr(batch, field.name) for field in fields(ScoredBatch)}
        plain = ScoredBatch(**shared).with_blobs()
        return plain.join_columns(Producer.here("the trainer"), behaviour_logp_T=old_T)

    def shared_weights(self) -> Iterator[str]:
        """Yields texts that say whether the other models use an adapted policy's frozen weights."""
        if self.policy.model.lora is None:
            return
        if self.reference is not None and self.reference.model is self.policy.model:
            yield "the reference is the policy without adapters"
        models = {
            "reference": None if self.reference is None else self.reference.model,
            "critic": None if self.critic is None else self.critic.model,
        }
        for role, model in models.items():
            if model is None or model is self.policy.model:
                continue
            is_shared = (
                "uses the policy's frozen weights" if model.shares_weights else "is a second model"
            )
            yield f"the {role} {is_shared}"

    @property
    def world(self) -> World:
        return self.policy.model.world

    def with_tokens_where_trained(self, batch: TrainBatch, num_updates: int) -> TrainBatch:
        """Moves tokens to the ranks that train on them, so that no update has to move tokens."""
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
        """Returns the model FLOPs of each phase of a step, summed over ranks.

        A prompt that samples share in a micro-batch counts once, output heads only for response
        tokens. `generated` are the lengths of all responses, `terms` the batches of additional loss
        terms, whose columns are computed during the update.
        """
        shape, policy = self.source.shape, self.policy.model
        trains_policy = self.trains_policy(num_steps_done)
        lengths, responses = batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())
        value = value_update = 0
        if self.critic is not None:
            critic = self.critic.model
            adapters = critic.active_adapter_params
            shared = critic.planner.shared_tokens(batch, is_lookup=True)
            value = forward_flops(shape, lengths, responses, 1, shared, adapters)
            shared = critic.planner.shared_tokens(batch)
            value_update = train_flops(
                shape, lengths, responses, 1, shared, critic.backward, adapters
            )
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
        """Returns the share of positions that another sample computes, and the factor by which
        sharing prompts reduces the model FLOPs of the policy's update; {} if samples do not share
        prompts.
        """
        policy = self.policy.model
        if not policy.planner.shares_prompts or "policy" not in self.trained:
            return {}
        shared = policy.planner.shared_tokens(batch)
        computed = _update_flops(policy, batch, shared)
        return {
            "train/shared_positions": sum(shared) / int(batch.lengths_B.sum()),
            "train/shared_prompts_speedup": _update_flops(policy, batch) / max(computed, 1),
        }


def _lm_flops(policy: ParallelModel, batch: TrainBatch) -> tuple[int, int]:
    lengths, responses = batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())
    shape, shared = policy.source.shape, policy.planner.shared_tokens(batch, is_lookup=True)
    lookups = 0
    if batch.old_logp_T is not None:
        adapters = policy.active_adapter_params
        lookups += forward_flops(shape, lengths, responses, None, shared, adapters)
    if batch.reference_logp_T is not None:  # without adapters
        lookups += forward_flops(shape, lengths, responses, prefixes=shared)
    return lookups, _update_flops(policy, batch, policy.planner.shared_tokens(batch))


def _update_flops(
    policy: ParallelModel, batch: TrainBatch, shared: Sequence[int] | None = None
) -> int:
    lengths, responses = batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())
    backward = policy.backward
    shape, adapters = policy.shape, policy.active_adapter_params
    return train_flops(shape, lengths, responses, None, shared, backward, adapters)


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
    """Builds the models and loads their initial weights. Raises UserError if there are loss terms
    without a policy in training.

    Args:
        models: Dict to which each model is added by name, for an out-of-memory error.
        has_reference, has_teacher, has_reward_models: Whether to build these models if the
            algorithm needs them. False if their columns are already known or are not used.
        terms: Additional terms of the policy's loss; None means the terms in the section `mix`.
    """
    world, needs = meshes.world, algorithm.needs
    terms = make_auxiliary_losses(config) if terms is None else terms
    if terms and not needs.policy:
        raise UserError(
            "mix",
            f"terms {', '.join(terms)}",
            f"no terms with algorithm {algorithm.name}, which does not train a policy",
            "Remove the section mix.",
        )
    roles = run_models(config, needs, [term.algorithm.needs for term in terms.values()])
    lora = lora_of(config.lora)
    source = model_source(
        config.model,
        world.platform,
        config.longest_sequence(),
        lora,
        config.run.seed,
        is_exported=True,
        trains_mtp=roles.trains_policy and config.train.mtp_coef > 0,
    )
    section = config.algorithm
    warmup = section.critic_warmup_steps if isinstance(section, PpoConfig) else 0
    # The length of each model's learning-rate schedule is the number of that model's updates.
    num_updates = config.steps.num_steps * config.steps.updates_per_step
    num_policy_updates = max(num_updates - warmup * config.steps.updates_per_step, 0)
    temperature = (config.rollout.temperature or 1.0) if needs.rollouts else 1.0
    models["policy"] = model = _build(meshes, "policy", source, config)
    notify(model.layers.said)
    if model.delta_rule.said:
        notify(model.delta_rule.said)
    if model.prompt_calls.said:
        notify(model.prompt_calls.said)
    if said := base_notice(config.lora, config.model):
        notify(f"lora: {said}")
    if said := positions_summary(source.hf_config, config.longest_sequence()):
        notify(f"positions: {said}")
    if roles.trains_policy:
        if said := trained_summary(model.frozen_parts, source.family, source.shape):
            notify(f"trained: {said}")
        if config.model.path is None and source.shape.vision and config.train.freeze is None:
            notify(
                "the vision tower has random weights and is frozen; train.freeze=[] trains it too"
            )
        model.make_trainable(config.train.learning_rate, peer_weights(config, world, notify))
    else:
        model.freeze()
    policy = Policy(model, algorithm, num_policy_updates, temperature)
    policy.old_is_sampled = config.old_is_sampled
    lender = None if lora is None else model  # all models of one base use the same frozen weights
    trained: dict[str, ParallelModel] = {"policy": model} if roles.trains_policy else {}
    reference = None
    if roles.has_reference and has_reference and config.lora.shares_reference:
        reference = Policy(model, algorithm, num_policy_updates, temperature, uses_adapters=False)
    elif roles.has_reference and has_reference:
        base = replace(source, family=base_of(source.family), base=None, trains_mtp=False)
        models["reference"] = frozen = _build(meshes, "reference", base, config, lender)
        frozen.freeze()
        reference = Policy(frozen, algorithm, num_policy_updates, temperature)
    critic = None
    if roles.has_critic:
        if not isinstance(algorithm, CriticAlgorithm):
            raise UserError(
                "algorithm.name",
                f"{algorithm.name}, whose class {type(algorithm).__qualname__} has no value_loss",
                "a class with the method value_loss, because its needs.values is true",
                "Define value_loss in the class, or set needs.values to False.",
            )
        models["critic"] = trained["critic"] = _build(meshes, "critic", source, config, lender)
        if not needs.policy:
            trained["critic"].read_scores(LAST if needs.scores else BEFORE_LAST)
        rate = config.train.critic_learning_rate
        trained["critic"].make_trainable(config.train.learning_rate if rate is None else rate)
        critic = Critic(trained["critic"], algorithm, num_updates)
    served = roles.reward_models if has_reward_models else {}
    reward_models = make_reward_models(config, meshes, source, models, served, needs.greedy, notify)
    teacher = None
    if roles.has_teacher and has_teacher:
        teacher = make_teacher(config, meshes.of("teacher"), source, models, needs, temperature)
    return Roles(source, policy, reference, critic, trained, warmup, reward_models, terms, teacher)


def _match_engine(model: ParallelModel, config: Config) -> None:
    """Makes a model compute the engine's bits. Raises UserError if it does not support that."""
    traits = ENGINES[config.rollout.engine]
    if model.world.platform.is_cpu:
        attend = traits.exact_attention
        model.match_engine(None if attend is None else imported(attend))
        return
    for error in gpu_numerics_rules(config, model.source.hf_config):
        raise error
    assert traits.exact_kernels is not None  # otherwise there is an error
    model.match_engine(kernels=imported(traits.exact_kernels))


def _build(
    meshes: Meshes,
    role: str,
    source: ModelSource,
    config: Config,
    lender: ParallelModel | None = None,
) -> ParallelModel:
    head: Head = "value" if role == "critic" else "lm"
    mesh = meshes.of(role)
    is_alike = lender is not None and lender.mesh is mesh
    model = build_model(mesh, source, head, config, lender if is_alike else None)
    if role == "policy" and replays(config):
        model.replay_experts()
    if role in ("policy", "reference") and (num := num_likely(config, source.shape.vocab_size)):
        is_centered = role == "policy" and centers_scores(config)
        if replays_sampling(config) or is_centered:
            model.use_likely_tokens(replays_sampling(config), is_centered, num)
    if head == "lm" and config.numerics.is_exact:
        _match_engine(model, config)
    return model
