"""Builds what generates: the engine on the ranks of its role, the sampler that drives it, and the
hybrid engine that brings it the policy's weights. Collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl import ops
from hybridrl.algorithms import needs_of
from hybridrl.config.lag import generates_ahead, max_unfinished, no_lag, num_in_flight
from hybridrl.config.placement import Placement
from hybridrl.config.rules_experts import replays
from hybridrl.config.schema import Config, RolloutConfig
from hybridrl.data.end_tokens import end_tokens
from hybridrl.environments.chat import ObservationEncoder
from hybridrl.environments.table import check_environment, observes_messages
from hybridrl.errors import ConfigError
from hybridrl.generation.episodes import Episodes
from hybridrl.generation.sampler import Sampler
from hybridrl.generation.schedule import Schedule
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.memory.alias import shared_names
from hybridrl.hybrid_engine.memory.lending import LentMemory, MemoryLender
from hybridrl.hybrid_engine.planning.expert_maps import ExpertTensors, lay_out_engines
from hybridrl.loop.setup import ranks_per_node
from hybridrl.models.sources import TrainingShard, WeightSource
from hybridrl.models.weights import RankLayout, fused_layouts
from hybridrl.parallel.device_mapping import DeviceMapping
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rewards.base import Scorer
from hybridrl.roles.reward_models import RewardModel
from hybridrl.rollout.absent import AbsentEngine
from hybridrl.rollout.build import EngineAdapter, EngineInputs, SharingEngine, build
from hybridrl.rollout.common.stops import TokenTexts
from hybridrl.rollout.engine import RolloutEngine, SamplingParams
from hybridrl.rollout.registry import ENGINES
from hybridrl.training.memory import TrainedModelMemory, released
from hybridrl.training.model import ModelSource, ParallelModel
from hybridrl.training.trained_weights import TrainedWeights


def rollout_layout(
    model: ParallelModel,
    rollout: RolloutConfig,
    sources: Sequence[RankLayout],
    ranks: Sequence[int] | None = None,
) -> RolloutLayout:
    """Returns which part of which engine replica each of these ranks is (None: all ranks), and
    which experts it has where the engine takes any, so that the fewest bytes move.
    """
    source, node = model.source, ranks_per_node(model.world)
    parts = fused_layouts(source.family, source.shape, rollout.tp, rollout.ep)
    takes_maps = rollout.ep > 1 and ENGINES[rollout.engine].takes_expert_maps
    tensors = ExpertTensors(source.family, source.shape) if takes_maps else None
    return lay_out_engines(sources, parts, tensors, node, ranks).best.layout


def training_memories(
    models: Collection[ParallelModel],
) -> tuple[list[TrainedModelMemory], list[TrainedWeights]]:
    """Returns what trained models give up before an engine gets their weights, and afterwards."""
    return (
        [model.memory for model in models if model.memory is not None],
        [m.trained_weights for m in models if m.trained_weights is not None],
    )


def start_engine(
    config: Config,
    model: ParallelModel,
    source: WeightSource,
    layout: RolloutLayout,
    memories: Sequence[TrainedModelMemory],
    copies: Sequence[TrainedWeights],
) -> EngineAdapter:
    """Builds the engine, which finds the memory that will be free while it generates; on a rank
    without one what stands for it.
    """
    world, engine = model.world, cast(EngineAdapter, AbsentEngine())
    to_come = sum(memory.bytes_to_come() for memory in memories)
    with (
        released([*memories, *copies]),
        world.all_agree("starting the rollout engine", is_unbounded=True),
    ):
        if world.rank in layout.ranks:
            engine = build_engine(config, model, layout, to_come, source.shard)
            share_memory(engine, memories, world.platform.device)
    if len(layout.ranks) < world.size:
        world.count_groups_alike()
    return engine


def share_memory(
    engine: EngineAdapter, memories: Sequence[TrainedModelMemory], device: torch.device
) -> None:
    """Puts gradients of released models into memory of the sleeping engine, where it can lend some
    and csrc/ was compiled; else they stay as they are, freed for each rollout.
    """
    place = ops.storage_placer(device)
    if place is None or not isinstance(engine, MemoryLender):
        return
    for memory in memories:
        num_bytes = memory.gradient_bytes()
        if pieces := engine.lend(num_bytes):
            memory.lay_gradients(LentMemory(DeviceMapping(device), num_bytes, pieces), place)


def unseen_bytes(trained: Mapping[str, ParallelModel], engine: EngineAdapter) -> int:
    """Returns the bytes in use of this rank's device that torch's allocator does not count, less
    those of a sleeping engine's tensors, which it counts though they have no memory.
    """
    memories, _ = training_memories(trained.values())
    released = engine.released_bytes() if isinstance(engine, MemoryLender) else 0
    return sum(memory.unseen_bytes for memory in memories) - released


def build_engine(
    config: Config,
    model: ParallelModel,
    layout: RolloutLayout,
    reserved_bytes: int = 0,
    shard: TrainingShard | None = None,
) -> EngineAdapter:
    """Builds this rank's part of the engine replica that generates with `model`'s weights.

    Args:
        reserved_bytes: Bytes of the device that the trainer takes only later but holds in rollout.
        shard: The trainer's memory that the engine may use as its parameters.
    """
    source, world, rollout = model.source, model.world, config.rollout
    return build(
        EngineInputs(
            rollout,
            source.computed_config,
            source.family,
            source.dtype,
            layout,
            world.rank,
            world.platform.device,
            max_tokens=config.longest_request(),
            reserved_bytes=reserved_bytes,
            timeout_s=config.run.collective_timeout_s,
            shard=shard if ENGINES[rollout.engine].shares_memory else None,
            records_experts=replays(config),
        )
    )


def tell_copies(
    config: Config, model: ParallelModel, engine: EngineAdapter, notify: Callable[[str], None]
) -> None:
    """Reports how many parameters training and engine cut alike and yet hold twice; collective."""
    missed = 0
    if isinstance(engine, SharingEngine) and not config.train.release_weights_in_rollout:
        missed = len(shared_names(model.layout(), engine.layout()).keys() - engine.shared)
    if most := max(model.world.gather_objects(missed)):
        notify(
            f"engine memory: up to {most} matrices of a rank are held twice, though training cuts "
            "them alike; experts are, where padding keeps Megatron's from lying evenly apart"
        )


def make_sampler(
    config: Config,
    model: ParallelModel,
    layout: RolloutLayout,
    engine: RolloutEngine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    reward_models: Sequence[RewardModel] = (),
    placement: Placement | None = None,
) -> Sampler:
    """Builds the sampler of this rank; collective."""
    world, source = model.world, model.source
    with world.all_agree("reading end tokens"):
        ends = end_tokens(config.model, source.hf_config, tokenizer)
    sampling = sampling_params(config.rollout, ends)
    engine.token_texts = TokenTexts(tokenizer)
    replica = ReplicaGroup(layout, world.rank, world.heartbeat)
    episodes = make_episodes(config, world, replica, source, tokenizer, ends)
    return Sampler(
        world=world,
        layout=layout,
        replica=ReplicaGroup(layout, world.rank, world.heartbeat),
        engine=engine,
        scorer=scorer,
        sampling=sampling,
        samples_per_prompt=config.steps.samples_per_prompt,
        seed=config.run.seed,
        episodes=episodes,
        reward_models=reward_models,
        schedule=make_schedule(config, placement),
    )


def make_schedule(config: Config, placement: Placement | None = None) -> Schedule:
    """Returns what may start when.

    Raises:
        UserError: The user's own algorithm does not say that it corrects for a lag.
    """
    steps, rollout = config.steps, config.rollout
    num = steps.prompts_per_step
    if not steps.max_policy_lag:
        return Schedule(max_lag=0, per_step=num, in_flight=num)
    if not needs_of(config.algorithm).allows_lag:
        raise no_lag(config)
    is_ahead = placement is not None and generates_ahead(config, placement)
    return Schedule(
        max_lag=steps.max_policy_lag,
        per_step=num,
        in_flight=num_in_flight(config),
        at_bound=rollout.at_lag_bound,
        ahead_until=max_unfinished(config) if is_ahead else None,
    )


def make_hybrid_engine(
    config: Config,
    model: ParallelModel,
    source: WeightSource,
    engine: EngineAdapter,
    memories: Sequence[TrainedModelMemory],
    copies: Sequence[TrainedWeights],
    placement: Placement | None = None,
) -> HybridEngine:
    """Plans how the weights of the policy come into the engine; collective."""
    return HybridEngine(
        source,
        engine,
        model.world,
        staging_bytes=config.rollout.staging_mib << 20,
        verify_every=config.rollout.verify,
        training=memories,
        training_weights=copies,
        domain_size=ranks_per_node(model.world),
        peer_memory=model.peers,
        timeout_s=config.run.collective_timeout_s,
        engine_stays=placement is not None and generates_ahead(config, placement),
    )


def sampling_params(config: RolloutConfig, ends: tuple[int, ...]) -> SamplingParams:
    """Returns how training samples are drawn; each of the tokens `ends` ends a response."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=ends,
        stop_strings=config.stop_strings,
        min_new_tokens=config.min_new_tokens,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
    )


def make_episodes(
    config: Config,
    world: World,
    replica: ReplicaGroup,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
) -> Episodes | None:
    """Builds the turns of responses, if there is an environment; collective."""
    if config.environment.name is None:
        return None
    arguments = config.data.template_arguments
    encoder = ObservationEncoder(tokenizer, source.shape.vocab_size, ends, arguments)
    with world.all_agree("finding the environment"):
        if found := check_environment(config.environment):
            raise ConfigError(found)
        if observes_messages(config.environment):  # else found out at the first call of a tool
            encoder([{"role": "tool", "content": "-"}])
        return Episodes(config.environment, replica, tokenizer, encoder, config.run.seed)
