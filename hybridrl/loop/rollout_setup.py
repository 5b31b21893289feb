"""Builds the engine, the sampler, and the hybrid engine, which sends weights. Collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl import ops
from hybridrl.algorithms import needs_of
from hybridrl.config.lag import generates_ahead, max_unfinished, no_lag, num_in_flight
from hybridrl.config.placement import Placement
from hybridrl.config.rules_experts import replays
from hybridrl.config.rules_sampling import num_likely
from hybridrl.config.schema import Config, RolloutConfig
from hybridrl.data.end_tokens import end_tokens
from hybridrl.data.images import ImageTokens
from hybridrl.environments.chat import ObservationEncoder
from hybridrl.environments.table import check_environment, observes_messages
from hybridrl.errors import ConfigError
from hybridrl.generation.agent_episodes import AgentEpisodes
from hybridrl.generation.episodes import Episodes
from hybridrl.generation.sampler import Sampler
from hybridrl.generation.schedule import Schedule
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.memory.alias import shared_names
from hybridrl.hybrid_engine.memory.lending import LentMemory, MemoryLender
from hybridrl.hybrid_engine.planning.expert_maps import ExpertTensors, lay_out_engines
from hybridrl.loop.agent_setup import make_agent_episodes
from hybridrl.loop.setup import ranks_per_node
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.quantized import quantized_shapes
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
from hybridrl.rollout.engine import RolloutEngine, SamplingParams, TokenTexts
from hybridrl.rollout.model_rules import held_family, merging_notice
from hybridrl.rollout.registry import ENGINES
from hybridrl.training.memory import TrainedModelMemory, released
from hybridrl.training.model import ModelSource, ParallelModel
from hybridrl.training.quantized_weights import QuantizedWeights
from hybridrl.training.trained_weights import TrainedWeights


def rollout_layout(
    model: ParallelModel,
    rollout: RolloutConfig,
    sources: Sequence[RankLayout],
    ranks: Sequence[int] | None = None,
) -> RolloutLayout:
    """Assigns ranks, by default all, to engine replicas and to parts of them. If the engine accepts
    any placement of experts, they are placed so that the fewest bytes are sent.
    """
    source, node = model.source, ranks_per_node(model.world)
    parts = fused_layouts(base_of(source.family), source.shape, rollout.tp, rollout.ep)
    takes_maps = rollout.ep > 1 and ENGINES[rollout.engine].takes_expert_maps
    tensors = ExpertTensors(source.family, source.shape) if takes_maps else None
    return lay_out_engines(sources, parts, tensors, node, ranks).best.layout


def engine_source(
    model: ParallelModel, rollout: RolloutConfig, source: WeightSource
) -> WeightSource:
    """Returns the weights as engines receive them: quantized if `rollout.quantization` says so.
    Raises ModelError on every rank if one holds only part of a block of a quantized weight.
    """
    if rollout.quantization == "none":
        return source
    quantized = quantized_shapes(base_of(model.source.family), model.source.shape)
    return QuantizedWeights(source, model.world.rank, quantized)


def report_merging(
    source: ModelSource, rollout: RolloutConfig, notify: Callable[[str], None]
) -> None:
    """Reports LoRA adapters that the engine receives merged into the weights."""
    note = merging_notice(rollout.engine, source.family, source.shape)
    if note is not None:
        notify(
            f"warning: {note}; in 16 bits they lose most of an update while it is small: 94% of "
            "the first step's at a learning rate of 1e-4, 19% after 100 steps"
        )


def training_memories(
    models: Collection[ParallelModel],
) -> tuple[list[TrainedModelMemory], list[TrainedWeights]]:
    """Returns the memory that models release before, and after, the engine has their weights."""
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
    """Builds the engine on its ranks, and a placeholder on all other ranks. Trained models release
    their memory meanwhile, so that the engine measures as much free memory as it will find during
    rollout.
    """
    world, engine = model.world, cast(EngineAdapter, AbsentEngine())
    later_bytes = sum(memory.bytes_to_come() for memory in memories)
    with (
        released([*memories, *copies]),
        world.all_agree("starting the rollout engine", is_unbounded=True),
    ):
        if world.rank in layout.ranks:
            engine = build_engine(config, model, layout, later_bytes, source.shard)
            share_memory(engine, memories, world.platform.device, is_mostly_frozen(source))
    if len(layout.ranks) < world.size:
        world.count_groups_alike()
    return engine


def share_memory(
    engine: EngineAdapter,
    memories: Sequence[TrainedModelMemory],
    device: torch.device,
    keeps_weights: bool = False,
) -> None:
    """Places released models' gradients in the sleeping engine's memory, if it can lend some. csrc/
    must be compiled; otherwise gradients are freed before each rollout. With `keeps_weights`, the
    engine lends only its KV cache (`MemoryLender.lend`).
    """
    place = ops.storage_placer(device)
    if place is None or not isinstance(engine, MemoryLender):
        return
    for memory in memories:
        num_bytes = memory.gradient_bytes()
        if pieces := engine.lend(num_bytes, keeps_weights):
            memory.move_gradients_to(LentMemory(DeviceMapping(device), num_bytes, pieces), place)


def is_mostly_frozen(source: WeightSource) -> bool:
    """Whether most of this rank's weights are frozen, so that weights exceed gradients in size."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in source.tensors.items()}
    return 2 * sum(sizes.get(name, 0) for name in source.frozen) > sum(sizes.values())


def unseen_bytes(trained: Mapping[str, ParallelModel], engine: EngineAdapter) -> int:
    """Returns the bytes that torch does not count, minus those that a sleeping engine released."""
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
    """Builds this rank's part of the engine replica that generates with `model`'s weights. The
    trainer will allocate `reserved_bytes` and keep them during rollout. The engine may use its
    `shard` directly as parameters.
    """
    source, world, rollout = model.source, model.world, config.rollout
    return build(
        EngineInputs(
            rollout,
            source.computed_config,
            held_family(rollout.engine, source.family, source.shape),
            source.dtype,
            layout,
            world.rank,
            world.platform.device,
            max_tokens=config.longest_request(),
            reserved_bytes=reserved_bytes,
            timeout_s=config.run.collective_timeout_s,
            shard=shard if ENGINES[rollout.engine].shares_memory else None,
            records_experts=replays(config),
            directory=source.directory,
            is_exact=config.numerics.is_exact,
        )
    )


def report_copies(
    world: World,
    shard: TrainingShard | None,
    engine: EngineAdapter,
    notify: Callable[[str], None],
) -> None:
    """Reports matrices that trainer and engine split equally but store separately; collective."""
    missed = 0
    if isinstance(engine, SharingEngine) and shard is not None:
        missed = len(shared_names(shard.layout, engine.layout()).keys() - engine.shared)
    if most := max(world.gather_objects(missed)):
        notify(
            f"engine memory: up to {most} matrices per rank are stored twice, although trainer "
            f"and engine split them in the same way; padding between Megatron's experts can "
            f"cause this"
        )


def make_sampler(
    config: Config,
    model: ParallelModel,
    layout: RolloutLayout,
    engine: RolloutEngine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageTokens | None,
    reward_models: Sequence[RewardModel],
    placement: Placement,
    notify: Callable[[str], None],
) -> Sampler:
    world, source = model.world, model.source
    with world.all_agree("reading end tokens"):
        ends = end_tokens(config.model, source.hf_config, tokenizer)
    vocab_size = source.shape.vocab_size
    sampling = replace(
        sampling_params(config.rollout, ends), num_likely=num_likely(config, vocab_size)
    )
    engine.token_texts = TokenTexts(tokenizer)
    replica = ReplicaGroup(layout, world.rank, world.heartbeat)
    episodes: Episodes | AgentEpisodes | None = None
    if config.agent.is_on:
        needs_report = scorer.counts_turns
        episodes = make_agent_episodes(
            config, world, replica, tokenizer, ends, vocab_size, images, needs_report, notify
        )
    elif config.environment.name is not None:
        episodes = make_episodes(config, world, replica, tokenizer, ends, vocab_size, images)
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
        exact_with=_exact_with(config, source),
        notify=notify,
    )


def _exact_with(config: Config, source: ModelSource) -> str | None:
    """Names what decides the bits of sampled log-probabilities; None if old ones are computed."""
    if not config.old_is_sampled:
        return None
    processor = torch.backends.cpu.get_cpu_capability()
    dtype = str(source.dtype).removeprefix("torch.")
    return f"{config.rollout.engine} ({dtype}, torch {torch.__version__}, {processor})"


def make_schedule(config: Config, placement: Placement) -> Schedule:
    """Returns the schedule of generation; UserError if the algorithm does not correct for lag."""
    steps, rollout = config.steps, config.rollout
    num = steps.prompts_per_step
    if not steps.max_policy_lag:
        return Schedule(max_lag=0, per_step=num, in_flight=num)
    if not needs_of(config.algorithm).allows_lag:
        raise no_lag(config)
    return Schedule(
        max_lag=steps.max_policy_lag,
        per_step=num,
        in_flight=num_in_flight(config),
        at_bound=rollout.at_lag_bound,
        ahead_until=max_unfinished(config) if generates_ahead(config, placement) else None,
    )


def make_hybrid_engine(
    config: Config,
    model: ParallelModel,
    source: WeightSource,
    engine: EngineAdapter,
    memories: Sequence[TrainedModelMemory],
    copies: Sequence[TrainedWeights],
    placement: Placement,
) -> HybridEngine:
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
        engine_stays=generates_ahead(config, placement),
    )


def sampling_params(config: RolloutConfig, ends: tuple[int, ...]) -> SamplingParams:
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
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    vocab_size: int,
    images: ImageTokens | None,
) -> Episodes:
    """Creates the object that runs multi-turn episodes with an environment. Collective."""
    arguments = config.data.template_arguments
    with world.all_agree("finding the environment"):
        if found := check_environment(config.environment):
            raise ConfigError(found)
        encoder = ObservationEncoder(tokenizer, vocab_size, ends, arguments, images)
        if observes_messages(config.environment):  # fail now rather than at the first tool call
            encoder([{"role": "tool", "content": "-"}])
        return Episodes(config.environment, replica, tokenizer, encoder, config.run.seed)
