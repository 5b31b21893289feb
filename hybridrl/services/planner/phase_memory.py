"""Estimates memory in each phase, for ranks that hold the same models. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

from hybridrl.checkpoint.memory_folders import GENERATIONS
from hybridrl.config.lag import requests_under_way
from hybridrl.config.placement import REWARD, Place
from hybridrl.config.roles import RunModels
from hybridrl.config.rules_optimizer import level_of
from hybridrl.config.schema import Config
from hybridrl.config.source import read_model_config
from hybridrl.config.teacher import read_teacher
from hybridrl.models.adapters.rows import (
    adapted,
    num_active_adapter_parameters,
    num_adapter_parameters,
)
from hybridrl.models.adapters.settings import lora_of
from hybridrl.models.family import Family, ModelShape, read_model
from hybridrl.models.quantized import element_sizes
from hybridrl.models.trainable import (
    BackwardShares,
    backward_shares,
    frozen_names,
    only_parts,
    trained_family,
)
from hybridrl.models.vision.shape import PARAMETER
from hybridrl.models.weights import EXPERTS, Head, RankLayout
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.registry import ENGINES, engine_package
from hybridrl.services.planner import image_costs
from hybridrl.services.planner.likely_tokens import LikelyBytes, likely_bytes
from hybridrl.services.planner.micro_batch_sizes import (
    MicroBatchSize,
    largest_micro_batch,
    usual_micro_batches,
)
from hybridrl.services.planner.muon_costs import num_by_adamw, scratch_bytes
from hybridrl.services.planner.replayed_experts import ReplayBytes, replay_bytes

MIB = 2**20
# The head stores a chunk of fp32 logits and their 16-bit gradients (token_logprobs.py).
BYTES_PER_LOGIT = 6
HEAD_CHUNKS = 8
MOST_HEAD_BYTES = 1 << 30
# GPU memory that NCCL uses for each connected group of ranks (3 groups of 4 ranks: 1.9 to 2.8 GiB),
# and that vLLM uses for CUDA graphs and workspace. Measured on H200.
GROUP_BYTES = 768 * MIB
GRAPH_BYTES = 448 * MIB
MOMENT_BYTES = 4  # One of Adam's two fp32 moments.
MASTER_BYTES = 4  # An fp32 copy of 16-bit parameters; fp32 parameters have none.
FP32_BYTES = 4
# Memory of an optimizer step whose state is low-precision: fp32 scratch memory for a piece, and
# staged states if the state is in host memory (training/piecewise_adam.py, staging.py).
PIECE_ELEMENTS = 1 << 24
PIECE_BYTES, STAGED_BYTES = 22 * PIECE_ELEMENTS, 3 * 6 * PIECE_ELEMENTS


@dataclass(frozen=True)
class Memory:
    """Estimated peak memory of the fullest rank, in bytes.

    Args:
        train: Largest peak of training for any sample lengths.
        count_usual_train: Computes `usual_train` on demand, because packing samples is slow, and a
            search evaluates thousands of layouts without it.
        rollout: Peak of generation, including the KV cache.
        kv_cache: KV cache of `num_requests` longest requests, with recorded experts.
        least_requests: Number of requests that the cache must hold; others can wait.
        staging: Size of the reshard's staging buffers, if weights are sent as messages.
        saved: Size of a rank's part of a checkpoint.
        host_state: Size of a rank's optimizer state in host memory.
        start: Peak while the model is made trainable, without an engine.
    """

    train: int
    count_usual_train: Callable[[], int] = field(repr=False, compare=False)
    rollout: int
    kv_cache: int
    num_requests: int
    least_requests: int
    staging: int
    saved: int = 0
    replay: ReplayBytes | None = None
    likely: LikelyBytes | None = None
    host_state: int = 0
    start: int = 0

    @cached_property
    def usual_train(self) -> int:
        """Peak of training if samples have usual lengths."""
        return self.count_usual_train()

    @property
    def has_engine(self) -> bool:
        return self.kv_cache > 0

    @property
    def least(self) -> int:
        """Largest peak of any phase, with the smallest KV cache."""
        return max(self.start, self.train, self.rollout_with(self.least_requests))

    def rollout_with(self, num_requests: int) -> int:
        """Returns the peak of generation if the KV cache only holds `num_requests` requests."""
        return self.rollout - self.kv_cache + self.kv_cache * num_requests // self.num_requests


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks with models of the same roles; `fullest` have the most parameters."""

    ranks: tuple[int, ...]
    roles: list[str]
    memory: Memory
    fullest: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "fullest_ranks": list(self.fullest),
            "roles": self.roles,
            "train_peak_bytes": self.memory.train,
            "usual_train_peak_bytes": self.memory.usual_train,
            "rollout_peak_bytes": self.memory.rollout,
        }


@dataclass(frozen=True)
class RoleModel:
    """A model that a run uses.

    Args:
        head: Head that is assumed when parameters are counted; a critic counts as the policy.
        freeze: Parts that stay frozen although the model is trained.
        own: Family of only the weights that differ from the policy's frozen weights; where the
            policy is, the others need no memory. None if no weights are shared.
    """

    role: str
    family: Family
    shape: ModelShape
    is_trained: bool = False
    head: Head = "lm"
    freeze: tuple[str, ...] = ()
    own: Family | None = None

    @property
    def engine_shape(self) -> ModelShape:
        """Sizes of the model in an engine, which has no layer for multi-token prediction."""
        return replace(self.shape, has_mtp=False)

    @property
    def is_shared(self) -> bool:
        """Whether all weights are the policy's, as those of the reference without adapters."""
        return self.own is not None and not self.own.rows(self.shape)

    @property
    def adapter_params(self) -> int:
        return num_adapter_parameters(self.family, self.shape) if self.family.lora else 0

    @property
    def active_adapter_params(self) -> int:
        """Number of the adapters' parameters that each token is multiplied with."""
        return num_active_adapter_parameters(self.family, self.shape) if self.family.lora else 0

    @property
    def trained_family(self) -> Family:
        """The family with a weight table of only the trained parameters; for trained models."""
        return trained_family(self.family, self.shape, self.freeze, self.head)

    @property
    def trains_tower(self) -> bool:
        rows = self.trained_family.rows(self.shape) if self.is_trained else ()
        return any(row.megatron.startswith(PARAMETER) for row in rows)

    @property
    def backward(self) -> BackwardShares:
        return backward_shares(self.family, self.shape, self.freeze, self.head)


class Elements(NamedTuple):
    """Number of a model's elements on a rank: in total, and in experts alone."""

    num: int = 0
    experts: int = 0


@dataclass(frozen=True)
class HeldModel:
    """A model with the most parameters, and trained ones, on any rank, and its process groups."""

    model: RoleModel
    place: Place
    layout: TrainLayout
    held: Elements
    trained: Elements = Elements()

    @property
    def num_updated(self) -> int:
        """Number of parameters whose optimizer state (sharded over replicas) a rank holds."""
        layout, (num, experts) = self.layout, self.trained
        return (num - experts) // (layout.dp * layout.cp) + experts // layout.edp

    def state_bytes(self, config: Config, itemsize: int) -> int:
        """Returns the bytes of a rank's optimizer state, for parameters of `itemsize` bytes."""
        each = state_bytes(config, itemsize)
        if config.train.optimizer != "muon" or not self.model.is_trained:
            return each * self.num_updated
        model = self.model
        others = num_by_adamw(model.trained_family, model.shape, self.layout, model.head)
        return each * self.num_updated + MOMENT_BYTES * others

    def orthogonalization_bytes(self, config: Config) -> int:
        """Returns the memory that a step of Muon needs for the largest parameter."""
        if config.train.optimizer != "muon" or not self.model.is_trained:
            return 0
        model = self.model
        return scratch_bytes(model.trained_family, model.shape, self.layout, model.head)

    @property
    def saved(self) -> int:
        """Number of parameters in a rank's part of a checkpoint, which omits adapted weights."""
        if not self.model.is_trained:
            return 0
        return self.trained.num if self.model.family.lora else self.held.num


@dataclass(frozen=True)
class HeldEngine:
    """The bytes of an engine on one of `num_ranks` ranks, without those in the trainer's memory."""

    num_bytes: int
    num_ranks: int


@dataclass(frozen=True)
class Held:
    """Models and engine on a group of ranks that hold the same models.

    `peer_bytes` is peer memory for weights without the rank's own; `fullest` hold the most.
    """

    models: Sequence[HeldModel]
    engine: HeldEngine | None
    peer_bytes: int = 0
    fullest: tuple[int, ...] = ()

    @property
    def roles(self) -> list[str]:
        """Roles of the models; an engine appears as `rollout`, after the policy."""
        found = [held.model.role for held in self.models]
        if self.engine is not None:
            found.insert("policy" in found, "rollout")
        return found


def role_models(
    config: Config, models: RunModels, family: Family, shape: ModelShape
) -> list[RoleModel]:
    """Returns the models, the policy first. `family` is the policy's, without adapters."""
    freeze, lora = frozen_names(config.train.freeze, shape), lora_of(config.lora)
    base, family = family, adapted(family, lora)
    has_mtp = models.trains_policy and config.train.mtp_coef > 0
    trained = replace(shape, has_mtp=has_mtp)
    found = [RoleModel("policy", family, trained, models.trains_policy, freeze=freeze)]
    if models.has_reference:
        own = None if lora is None else only_parts(base, shape, lora.full)
        found.append(RoleModel("reference", base, shape, own=own))
    if models.has_critic:
        critic = RoleModel("critic", family, shape, is_trained=True, freeze=freeze)
        own = None if lora is None else critic.trained_family
        found.append(replace(critic, own=own))
    if models.has_teacher and (hf_config := read_teacher(config)) is not None:
        found.append(RoleModel("teacher", *read_model(None, hf_config)))
    for name, section in models.reward_models.items():
        served = read_model(section.family, read_model_config(section))
        found.append(RoleModel(REWARD + name, *served, head="value"))
    return found


def estimate_memory(
    config: Config, shape: ModelShape, world_size: int, held: Held, transport: str, on_gpu: bool
) -> Memory:
    """Estimates the memory of the fullest rank in each phase.

    Training needs memory for parameters, trained parameters' gradients, a rank's shard of the
    optimizer state unless it is in host memory, frozen models, activations, logits, and the weights
    of an engine that does not sleep. Generation needs parameters, the same optimizer state, the
    engine's own weights, and the KV cache. On GPUs, both include NCCL's groups and the engine's
    CUDA graphs, but not the CUDA context.
    """
    itemsize = itemsize_of(config, on_gpu)
    level = level_of(config.train)
    trained = itemsize * sum(one.trained.num for one in held.models)
    frozen = itemsize * sum(one.held.num for one in held.models) - trained
    saved = itemsize * sum(one.saved for one in held.models)
    gradients = gradient_bytes(config) * sum(one.trained.num for one in held.models)
    saved_states = sum(one.state_bytes(config, itemsize) for one in held.models)
    states = 0 if level.on_host else saved_states
    engine, kv_cache = ENGINES[config.rollout.engine], 0
    num_requests = _num_requests(config, held.engine.num_ranks if held.engine else world_size)
    replay = replay_bytes(config, shape, num_requests)
    if held.engine is not None:
        kv_cache = _kv_cache_bytes(config, shape, itemsize, num_requests, replay)
    engine_bytes = held.engine.num_bytes if held.engine else 0
    always = held.peer_bytes + frozen
    always += _gpu_bytes(config, world_size, held, transport) if on_gpu else 0
    training = always + trained + gradients + states
    training += replay.train if replay and "policy" in held.roles else 0
    likely = likely_bytes(config, shape.vocab_size)
    training += likely.train if likely and "policy" in held.roles else 0
    training += 0 if engine.sleeps else engine_bytes
    passes = partial(_activation_bytes, config, held.models, itemsize)
    step = PIECE_BYTES if level.is_low_precision else 0  # no passes run at the same time
    step += STAGED_BYTES if level.on_host else 0
    step += max((one.orthogonalization_bytes(config) for one in held.models), default=0)
    most = max(step, passes(lambda one: [largest_micro_batch(config, one.model.shape, one.layout)]))

    def usual_train() -> int:
        usual = passes(lambda one: usual_micro_batches(config, one.model.shape, one.layout))
        return training + min(most, max(step, usual))

    return Memory(
        train=training + most,
        count_usual_train=usual_train,
        rollout=always
        + (0 if config.train.release_weights_in_rollout else trained)
        + states
        + engine_bytes
        + (image_costs.engine_bytes(config, shape.vision, itemsize) if held.engine else 0)
        + kv_cache,
        kv_cache=kv_cache,
        num_requests=num_requests,
        least_requests=1 if engine.has_fixed_kv_cache else num_requests,
        staging=config.rollout.staging_mib * MIB,
        saved=saved + saved_states,
        replay=replay,
        likely=likely,
        host_state=saved_states - states,
        # Megatron allocates buffers for all weights and gradients before it frees the weights.
        start=always + 2 * trained + gradients,
    )


def state_bytes(config: Config, itemsize: int) -> int:
    """Returns the optimizer state's bytes per parameter, with Muon per parameter of a matrix."""
    found = level_of(config.train).state_bytes - (MASTER_BYTES if itemsize == FP32_BYTES else 0)
    return found - (MOMENT_BYTES if config.train.optimizer == "muon" else 0)


def gradient_bytes(config: Config) -> int:
    return 2 if config.train.gradient_dtype == "bfloat16" else FP32_BYTES


def state_copy_bytes(config: Config, saved: int, copied: int, num_hosts: int) -> int:
    """Returns the host memory of a rank's state copies, used to resume after a failure.

    Includes the copy in progress (`copied`), and GENERATIONS copies of its state (`saved`) and of
    the state of a rank on another host (checkpoint/memory_copies.py).
    """
    if not config.run.max_restarts or config.checkpoint.copy_every == 0:
        return 0
    num_files = GENERATIONS * (2 if num_hosts > 1 else 1)
    return copied + saved * num_files


def _kv_cache_bytes(
    config: Config, shape: ModelShape, itemsize: int, num_requests: int, replay: ReplayBytes | None
) -> int:
    tp = config.rollout.tp
    cached = 1 if config.rollout.kv_cache_dtype == "fp8" else itemsize
    longest, package = config.longest_request(), engine_package(config.rollout.engine)
    per_request = longest * shape.token_bytes(tp, cached) + shape.state_bytes(tp, itemsize)
    if shape.mixer is not None and package is not None and package.hybrid_request_bytes:
        per_request = package.hybrid_request_bytes(shape, longest, tp, cached, itemsize)
    return num_requests * per_request + (replay.rollout if replay else 0)


def _num_requests(config: Config, num_ranks: int) -> int:
    """Returns the number of requests for which a fixed KV cache has room; other caches grow."""
    most = config.rollout.max_batch
    if ENGINES[config.rollout.engine].has_fixed_kv_cache:
        return most
    return min(most, requests_under_way(config, num_ranks))


def _gpu_bytes(config: Config, world_size: int, held: Held, transport: str) -> int:
    sizes = [world_size]
    for layout in {one.place: one.layout for one in held.models}.values():
        sizes += [layout.tp, layout.pp, layout.cp, layout.dp]
        sizes += [layout.dp * layout.cp, layout.tp * layout.pp]
        if layout.ep * layout.etp > 1:
            sizes += [layout.ep, layout.etp, layout.ep * layout.etp, layout.edp]
    if held.engine is not None:
        sizes += 2 * [config.rollout.tp]  # torch's process group and vLLM's own communicator
        sizes += [config.rollout.ep]
    is_staged = transport == "packed" and world_size > 1
    num_groups = sum(size > 1 for size in sizes) + is_staged  # large messages use a separate group
    moves_weights = held.engine is not None or "policy" in held.roles
    staging = config.rollout.staging_mib * MIB if is_staged and moves_weights else 0
    captures = held.engine is not None and ENGINES[config.rollout.engine].captures_graphs
    return GROUP_BYTES * num_groups + (GRAPH_BYTES if captures else 0) + staging


def _activation_bytes(
    config: Config,
    models: Sequence[HeldModel],
    itemsize: int,
    sizes: Callable[[HeldModel], Iterable[MicroBatchSize]],
) -> int:
    with_passes = [one for one in models if one.model.is_trained] or models
    found = (_pass_bytes(config, one, itemsize, size) for one in with_passes for size in sizes(one))
    return max(found, default=0)


def _pass_bytes(config: Config, held: HeldModel, itemsize: int, micro: MicroBatchSize) -> int:
    """Returns the memory that one rank's passes over micro-batches of one size need.

    It is the sum of the activations stored for the backward pass and the largest of the temporary
    tensors: the head's logits, the gradients of a feed-forward layer's halves, those of copied
    keys, and what a recurrent module's backward pass computes again.

    A layer stores its input, the output of each norm, and the input of the feed-forward layer (4
    hidden sizes); queries, keys and values, their latents, and the output of attention; the
    feed-forward layer's halves and product; and copies of keys and values of shared prompts. Tensor
    and sequence parallelism shard all of these. A mixture of experts stores the feed-forward values
    for each of a token's experts, and the inputs and outputs that ranks exchange. A recurrent
    module's values replace attention's. Tokens count as evenly distributed over experts, and all
    layers as mixtures. In a frozen model, only one layer's values are in memory at a time. Without
    pipeline parallelism, layers below the first trained one store nothing.

    The last stage also stores a trained layer for multi-token prediction, never recomputed: a layer
    with attention, its two inputs before and after their norms joined (5 hidden sizes), and the
    output of its last norm.
    """
    model, layout = held.model, held.layout
    shape, parts = model.shape, layout.cp * layout.tp
    key_size = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    attention = shape.num_heads * (shape.head_dim + shape.value_dim)
    if (latent := shape.latent) is not None:
        attention += latent.query_rank + latent.cached_dim
    key_rows, scratch, of_mtp = micro.key_rows, 0, 0
    if shape.has_mtp:
        per_token = (4 + 5 + 1) * shape.hidden_size + attention + key_size + 3 * shape.ffn_size
        of_mtp = micro.positions * per_token * itemsize // parts
    if (mixer := shape.mixer) is not None:
        recurrent, share = mixer.stored_elements(shape.hidden_size), len(mixer.layers)
        key_rows = key_rows * (shape.num_layers - share) // shape.num_layers
        if config.train.recompute == "full":
            attention = max(attention, recurrent)
        else:  # the mean over all layers
            attention += (recurrent - attention) * share // shape.num_layers
        if model.is_trained:
            scratch = micro.positions * mixer.scratch_bytes // parts
    product, exchanged = shape.ffn_size, 0
    if (moe := shape.moe) is not None:
        product = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        exchanged = 2 * moe.experts_per_token * shape.hidden_size * layout.etp
    per_token = 4 * shape.hidden_size + attention + 3 * product + exchanged
    layers, stages = -(-shape.num_layers // layout.pp), layout.pp
    stored = layers
    if stages == 1:  # no backward pass reaches the layers below the first trained one
        stored = max(1, round(layers * model.backward.attention))
    whole = micro.positions * per_token + key_rows * key_size  # elements that one layer stores
    if not model.is_trained:
        kept, stages = whole, 1
    elif config.train.recompute == "full":  # each layer stores its input, one all activations
        kept = micro.positions * shape.hidden_size * layers + whole
    elif config.train.recompute == "selective":  # feed-forward products are recomputed
        kept = (whole - micro.positions * product) * stored
    else:
        kept = whole * stored
    if model.head == "lm":
        logits = micro.positions * shape.padded_vocab(layout.tp) // parts
        scratch = max(scratch, min(BYTES_PER_LOGIT * logits // HEAD_CHUNKS, MOST_HEAD_BYTES))
    if model.is_trained and shape.moe is None:
        scratch = max(scratch, micro.positions * 2 * product * itemsize // parts)
    if model.is_trained and micro.key_rows > micro.positions:
        # GatherKeys.backward holds gradients of copied keys and values, one of them in fp32.
        widest = shape.num_kv_heads * max(shape.head_dim, shape.value_dim)
        summed = FP32_BYTES * (micro.key_rows + micro.positions) * widest
        scratch = max(scratch, (itemsize * micro.key_rows * key_size + summed) // parts)
    images_kept, images_scratch = _image_bytes(held, itemsize, micro)
    layers_bytes = kept * itemsize * stages // parts + images_kept * stages + of_mtp + scratch
    return max(layers_bytes, images_scratch)


def _image_bytes(held: HeldModel, itemsize: int, micro: MicroBatchSize) -> tuple[int, int]:
    """Returns stored bytes of a micro-batch's images, and temporary ones before the layers.

    Features that are added after the first layers are stored for each position. Every rank of the
    first stage computes all images.
    """
    vision, layout = held.model.shape.vision, held.layout
    if vision is None:
        return 0, 0
    width = itemsize * held.model.shape.hidden_size
    features = width * micro.image_tokens * (1 + vision.deepstack_layers)
    added = width * micro.positions * vision.deepstack_layers // (layout.cp * layout.tp)
    kept = features + added
    if held.model.trains_tower:
        kept += image_costs.stored_bytes(vision, micro.image_tokens, itemsize)
    return kept, kept + image_costs.scratch_bytes(vision, micro.image_tokens, itemsize)


def fullest(layouts: Sequence[RankLayout]) -> Elements:
    """Returns the number of elements on the rank that holds the most elements."""
    different = {id(layout): layout for layout in layouts}.values()
    found = []
    for layout in different:
        elements = {name: prod(shape) for name, shape in layout.shapes.items()}
        experts = sum(num for name, num in elements.items() if EXPERTS in name)
        found.append(Elements(sum(elements.values()), experts))
    return max(found)


def layout_bytes(layout: RankLayout, itemsize: int) -> int:
    """Returns the bytes of a layout's tensors; `itemsize` is for weights without a fixed size."""
    sizes = element_sizes(layout)
    return sum(sizes.get(name, itemsize) * prod(size) for name, size in layout.shapes.items())


def itemsize_of(config: Config, on_gpu: bool) -> int:
    """Returns the number of bytes per parameter; 'auto' means float32 on CPU."""
    if config.model.dtype == "auto":
        return 2 if on_gpu else 4
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]
