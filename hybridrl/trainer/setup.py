"""Builds the parts of a run from its configuration: the model source, roles, the engine and the
data.

Each function makes one part from its own section; `loop.py` puts them together. Collective: all
ranks build the same parts in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.algorithms.base import Needs
from hybridrl.config.engines import ENGINES
from hybridrl.config.hub import hub_names, with_names
from hybridrl.config.identity import pinned
from hybridrl.config.placement import Machines, Placement
from hybridrl.config.rules import check
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from hybridrl.config.source import model_directory, read_model_config, tokenizer_directory
from hybridrl.config.teacher import is_scored, teacher_rules
from hybridrl.config.tokenizer import check_token_numbers, check_tokenizer_files
from hybridrl.contracts.batch import Prompt
from hybridrl.data.mixture import hold_out
from hybridrl.data.prompt_file import largest_token
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import LoadedPrompts, Reading
from hybridrl.environments.chat import ObservationEncoder
from hybridrl.environments.table import check_environment, observes_messages
from hybridrl.errors import ConfigError, ModelError, UserError
from hybridrl.hybrid_engine.alias import TrainingShard
from hybridrl.hybrid_engine.assign import assign
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.order import is_settled, lay_out, order_layout
from hybridrl.models.family import read_model
from hybridrl.models.hf import load_hf
from hybridrl.models.init import init_weights
from hybridrl.models.weights import VALUE_HEAD, Head, RankLayout, fused_layouts, hf_shapes
from hybridrl.parallel import peer_memory
from hybridrl.parallel.groups import World, from_rank_0, same_on_all_ranks
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.mesh import Mesh, Meshes
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.platform import Platform
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.functions import RewardFunction, no_reward
from hybridrl.rollout.absent import AbsentEngine
from hybridrl.rollout.build import EngineAdapter, EngineInputs, build
from hybridrl.rollout.engine import RolloutEngine, SamplingParams
from hybridrl.trainer.episodes import Episodes
from hybridrl.trainer.memory import TrainedModelMemory, released
from hybridrl.trainer.model import ModelSource, ParallelModel
from hybridrl.trainer.peer_weights import PeerWeights
from hybridrl.trainer.sampler import Sampler
from hybridrl.trainer.trained_weights import TrainedWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Rows = Iterable[Mapping[str, object]]


class Given(NamedTuple):
    """What a user's script gives in place of sections of the configuration, if it does."""

    prompts: Rows | None
    reward: RewardFunction | None
    tokenizer: PreTrainedTokenizerBase | None
    mix: Mapping[str, Rows]


def pinned_on_all_ranks(config: Config) -> Config:
    """Returns a configuration with every hub name at the commit that rank 0 finds for it; the other
    ranks ask nobody. Collective, before there is a World.

    Raises:
        UserError: on every rank; as of `pinned`.
    """
    return with_names(config, from_rank_0(lambda: hub_names(pinned(config))))


def check_rules(config: Config, machines: Machines, has_teacher: bool = True) -> None:
    """Judges the whole configuration together with the world size and the model's shape.

    Args:
        config: of the run.
        machines: under the ranks.
        has_teacher: whether the teacher, if there is one, is read and judged.

    Raises:
        ConfigError: with every violated rule.
    """
    has_model = (config.model.path is None) != (config.model.init is None)
    model_config = read_model_config(config.model) if has_model else None
    dtype = str(Platform.detect().default_dtype()).removeprefix("torch.")
    size = machines.num_ranks
    found = check(config, size, model_config, dtype, is_script=True, machines=machines)
    found += teacher_rules(config, model_config or {}) if has_teacher else ()
    if found:
        raise ConfigError(found)


def find_machines(platform: Platform) -> Machines:
    """Returns what is under the ranks; collective."""
    size = dist.get_world_size()
    own = None if platform.is_cpu else torch.cuda.get_device_name(platform.device)
    names: list[Any] = [None] * size
    dist.all_gather_object(names, own)
    return Machines(size, _local_ranks(size), None if None in names else names)


def make_meshes(config: Config, platform: Platform, machines: Machines) -> Meshes:
    """Lays the policy over its ranks and makes their process groups; the rules hold."""
    world = World(platform, config.run.collective_timeout_s, config.run.stall_timeout_s)
    placement, _ = placed(config, machines)
    return Meshes(world, placement, training_layout(config, placement))


def training_layout(config: Config, placement: Placement) -> TrainLayout:
    """Returns where each of the policy's ranks trains; with `train.order=auto` the model's shape
    and the nodes decide. Where LOCAL_WORLD_SIZE does not say which ranks share one, or policy and
    engines are not on all ranks, the order is Megatron's own.
    """
    train, tp = config.train, config.rollout.tp
    world_size = len(placement.policy.ranks)
    if not placement.is_shared:
        return lay_out(train, world_size)
    if is_settled(train, tp) or "LOCAL_WORLD_SIZE" not in os.environ:
        return lay_out(train, world_size)
    hf_config = read_model_config(config.model)
    family, shape = read_model(config.model.family, hf_config)
    return order_layout(train, family, shape, world_size, tp, _local_ranks(world_size)).layout


def model_source(config: ModelConfig, platform: Platform) -> ModelSource:
    """Reads the model's config.json and finds its family."""
    hf_config = read_model_config(config)
    dtype = platform.default_dtype() if config.dtype == "auto" else DTYPES[config.dtype]
    family, _ = read_model(config.family, hf_config)
    directory = model_directory(config, weights=False)
    if config.tokenizer is not None and Path(config.tokenizer).is_dir():
        directory = Path(config.tokenizer)
    return ModelSource(family, hf_config, dtype, config.family or family.name, directory)


def build_model(mesh: Mesh, source: ModelSource, head: Head, config: Config) -> ParallelModel:
    """Builds a model over a mesh and fills in its weights, from `model.path` or from the seed.

    A critic starts from the policy's weights; its value head, which no language model has, starts
    at zero.
    """
    model = ParallelModel(mesh, source, head, config.train)
    with mesh.world.all_agree("loading the weights"):
        if config.model.path is not None:
            load_weights(model, config.model, missing_ok={VALUE_HEAD} if head == "value" else ())
        elif mesh.is_member:
            shapes = hf_shapes(source.family, source.shape, head)
            init_weights(model.layout(), shapes, model.weights(), source.hf_config, config.run.seed)
    return model


def load_weights(
    model: ParallelModel, section: ModelConfig, missing_ok: Collection[str] = ()
) -> None:
    """Fills in the weights that this rank has a part of, from a HF directory or hub name.

    Args:
        model: over its mesh.
        section: says where they are.
        missing_ok: HF tensors that may be missing there, and stay as they are.
    """
    if model.mesh.is_member:
        shapes = hf_shapes(model.source.family, model.source.shape, model.head)
        directory = model_directory(section)
        load_hf(directory, model.layout(), model.weights(), shapes, missing_ok=set(missing_ok))


def load_tokenizer(config: ModelConfig, num_tokens: int) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that `model.tokenizer`, or the model's own directory, holds; no remote
    code.

    Raises:
        ModelError: it cannot be read, or has tokens beyond the model's `num_tokens`.
    """
    check_tokenizer_files(config)
    where = str(tokenizer_directory(config))
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        vocabulary = tokenizer.get_vocab()
    except Exception as error:  # damaged files raise whatever transformers stumbles over
        said = " ".join(str(error).split())[:160]
        raise ModelError(
            "model.tokenizer",
            where,
            "a directory or hub name with whole tokenizer files",
            f"Set model.tokenizer. transformers said {type(error).__name__}: {said}.",
        ) from error
    check_token_numbers(f"model.tokenizer {where}", vocabulary, num_tokens)
    return tokenizer


def check_token_range(prompts: Sequence[Prompt], num_tokens: int) -> None:
    """Refuses prompts that a user's own tokenizer gave tokens of which the model has none.

    Raises:
        ModelError: naming the first prompt's number and the token's.
    """
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
                "Give the model's own tokenizer.",
            )


def make_scorer(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFunction | None,
    group_samples: int,
) -> Scorer:
    """Makes what scores responses: by `reward`, else by the section, if anything.

    Args:
        group_samples: as of `Needs`.
    """
    unscored = None if is_scored(config) else no_reward
    function = reward or unscored
    return Scorer(config.reward, tokenizer, function, group_samples, config.environment)


def load_data(
    config: Config, store: PromptStore, needs: Needs, rows: Rows | None
) -> tuple[LoadedPrompts, Sequence[Prompt]]:
    """Loads the prompts to train on, with the responses that the algorithm needs of the data, and
    those of the evaluation.
    """
    data = config.data
    loaded = load_rows(data, config.rollout, store, needs, rows)
    if data.eval_share:
        loaded, held_out = hold_out(loaded, data.eval_share, store.once)
        return loaded, held_out[: data.eval_limit]
    if not data.eval_prompts:
        return loaded, ()
    return loaded, store.load(Reading(data, data.eval_prompts, limit=data.eval_limit)).prompts


def load_rows(
    data: DataConfig,
    rollout: RolloutConfig,
    store: PromptStore,
    needs: Needs,
    rows: Rows | None = None,
) -> LoadedPrompts:
    """Loads prompts, or `rows` in their place, with the responses that an algorithm needs."""
    if needs.rollouts:
        return store.load(Reading(data, rows))
    limit, feedback = rollout.max_new_tokens, needs.feedback
    return store.load(Reading(data, rows, max_response_tokens=limit, feedback=feedback))


def rollout_layout(
    model: ParallelModel,
    tp: int,
    sources: Sequence[RankLayout],
    ranks: Sequence[int] | None = None,
    ep: int = 1,
) -> RolloutLayout:
    """Returns which part of which engine replica each of these ranks is, None: of all, so that the
    fewest bytes move; `tp` and `ep` are the replica's sizes.
    """
    source, node = model.source, ranks_per_node(model.world)
    parts = fused_layouts(source.family, source.shape, tp, ep)
    return assign(sources, parts, node, ranks=ranks).layout


def training_memories(
    models: Collection[ParallelModel],
) -> tuple[list[TrainedModelMemory], list[TrainedWeights]]:
    """Returns what trained models give up before an engine gets their weights, and afterwards."""
    return (
        [model.memory for model in models if model.memory is not None],
        [m.trained_weights for m in models if m.trained_weights is not None],
    )


def ranks_per_node(world: World) -> int:
    """Returns how many consecutive ranks are of one node; collective."""
    found = _local_ranks(world.size)
    same_on_all_ranks(world, "LOCAL_WORLD_SIZE", str(found))
    return found


def _local_ranks(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # unset where nothing launched this


def start_engine(
    config: Config,
    model: ParallelModel,
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
            engine = build_engine(config, model, layout, to_come)
    if len(layout.ranks) < world.size:
        world.count_groups_alike()
    return engine


def weights_home(config: Config, world: World, say: Callable[[str], None]) -> PeerWeights | None:
    """Returns where the policy's parameters go, None where weights travel as packed messages.

    Args:
        say: tells the user, once, why 'auto' did not choose 'peer'.

    Raises:
        UserError: on every rank, if `rollout.transport` is 'peer' but ranks cannot reach others.
    """
    wanted = config.rollout.transport
    released = config.train.release_weights_in_rollout
    if wanted == "packed" or world.size == 1 or (wanted == "auto" and released):
        return None
    if wanted == "auto" and world.platform.is_cpu:
        return None  # nothing is gained there
    device, hosts = world.platform.device, world.gather_objects(peer_memory.host_id())
    reasons = world.gather_objects(peer_memory.why_unreachable(device, hosts))
    if not any(reasons):
        reasons = world.gather_objects(peer_memory.why_unusable(device, world.timeout_s))
    found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if not found:
        return PeerWeights(world)
    if wanted == "peer":
        raise UserError(
            "rollout.transport",
            "peer",
            "packed or auto here",
            f"Set rollout.transport=auto. {found[0]}.",
        )
    say(f"weights travel as packed messages: {found[0]}")
    return None


def build_engine(
    config: Config, model: ParallelModel, layout: RolloutLayout, reserved_bytes: int = 0
) -> EngineAdapter:
    """Builds this rank's part of the engine replica that generates with `model`'s weights.

    Args:
        reserved_bytes: of the device, which the trainer takes only later but holds during rollout.
    """
    source, world, rollout = model.source, model.world, config.rollout
    shard = None
    # Weights that are released would be freed with the trainer's.
    if ENGINES[rollout.engine].shares_memory and not config.train.release_weights_in_rollout:
        shard = TrainingShard(model.layout(), model.weights_in_place())
    return build(
        EngineInputs(
            rollout,
            source.hf_config,
            source.family,
            source.dtype,
            layout,
            world.rank,
            world.platform.device,
            max_tokens=config.data.max_prompt_tokens + rollout.max_new_tokens,
            reserved_bytes=reserved_bytes,
            timeout_s=config.run.collective_timeout_s,
            shard=shard,
        )
    )


def make_sampler(
    config: Config,
    model: ParallelModel,
    layout: RolloutLayout,
    engine: RolloutEngine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
) -> Sampler:
    """Builds what samples responses with this rank's engine and its peers; collective."""
    world, source = model.world, model.source
    sampling = sampling_params(config.rollout, source, tokenizer)
    replica = ReplicaGroup(layout, world.rank, world.heartbeat)
    episodes = make_episodes(config, world, replica, source, tokenizer)
    parts = world, layout, replica, engine, scorer, sampling
    return Sampler(*parts, config.steps.samples_per_prompt, config.run.seed, episodes)


def make_hybrid_engine(
    config: Config,
    model: ParallelModel,
    sources: list[RankLayout],
    engine: EngineAdapter,
    memories: Sequence[TrainedModelMemory],
    copies: Sequence[TrainedWeights],
) -> HybridEngine:
    """Plans how the policy's weights come into the engine; collective.

    Args:
        sources: the policy's layout on every rank.
        memories, copies: of `training_memories`.
    """
    return HybridEngine(
        sources,
        model.weights_in_place(),
        engine,
        staging_bytes=config.rollout.staging_mib << 20,
        verify_every=config.rollout.verify,
        training=memories,
        training_weights=copies,
        domain_size=ranks_per_node(model.world),
        peer_memory=model.peers,
        timeout_s=config.run.collective_timeout_s,
    )


def sampling_params(
    config: RolloutConfig, source: ModelSource, tokenizer: PreTrainedTokenizerBase
) -> SamplingParams:
    """Returns how training samples are drawn; a response ends at the end token of tokenizer or
    model.
    """
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=stop_token_ids(source.hf_config, tokenizer),
    )


def make_episodes(
    config: Config,
    world: World,
    replica: ReplicaGroup,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
) -> Episodes | None:
    """Builds what goes between the turns of responses, if there is an environment; collective."""
    if config.environment.name is None:
        return None
    stops = stop_token_ids(source.hf_config, tokenizer)
    encoder = ObservationEncoder(tokenizer, source.shape.vocab_size, stops)
    with world.all_agree("finding the environment"):
        if found := check_environment(config.environment):
            raise ConfigError(found)
        if observes_messages(config.environment):  # else found out at the first call of a tool
            encoder([{"role": "tool", "content": "-"}])
        return Episodes(config.environment, replica, tokenizer, encoder, config.run.seed)


def stop_token_ids(
    hf_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Returns the end tokens that the tokenizer and the model's config name, in ascending order."""
    named = hf_config.get("eos_token_id")
    ids: Iterable[int | None] = named if isinstance(named, list) else [named]
    return tuple(sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None}))
