"""The memory part of `hybridrl plan`: what the fullest rank holds in each phase. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hybridrl.config.engines import ENGINES
from hybridrl.config.roles import RunModels
from hybridrl.config.schema import Config
from hybridrl.config.source import read_model_config
from hybridrl.config.teacher import read_teacher
from hybridrl.models.family import ModelShape, read_model
from hybridrl.models.weights import RankLayout, megatron_layouts
from hybridrl.parallel.layout import TrainLayout

MIB = 2**20
# Of the head's logits, fp32 and their gradients in 16 bit, a chunk is held (token_logprobs.py).
BYTES_PER_LOGIT = 6
HEAD_CHUNKS = 8
MOST_HEAD_BYTES = 1 << 30
# Of a GPU, measured on H200: what NCCL takes for each group of ranks that it has connected (3
# groups of 4 ranks: 1.9 to 2.8 GiB), and vLLM for CUDA graphs and workspace.
GROUP_BYTES = 768 * MIB
GRAPH_BYTES = 448 * MIB
ADAM_BYTES = 8  # two fp32 moments
MASTER_BYTES = 4  # fp32 copy of 16-bit parameters
MAIN_GRAD_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """The estimated peaks of the fullest rank, in bytes.

    Args:
        train: in training.
        rollout: in generation, the KV cache with it.
        kv_cache: with room for all requests that are decoded together.
        num_requests: how many those are, each as long as it may be.
        least_requests: for how many the cache must have room; others would wait.
        staging: of the reshard, where weights travel as messages.
    """

    train: int
    rollout: int
    kv_cache: int
    num_requests: int
    least_requests: int
    staging: int

    def rollout_with(self, num_requests: int) -> int:
        """Returns the peak of generation with a KV cache for some of the requests."""
        return self.rollout - self.kv_cache + self.kv_cache * num_requests // self.num_requests


def estimate_memory(
    config: Config,
    models: RunModels,
    shape: ModelShape,
    layout: TrainLayout,
    num_params: int,
    engine_bytes: int,
    transport: str,
    on_gpu: bool,
) -> Memory:
    """Estimates what the fullest rank holds in each phase.

    Training holds parameters, fp32 gradients, the optimizer's share of a data-parallel rank, frozen
    models, activations and logits, and weights of an engine that does not sleep. Generation holds
    parameters, the optimizer's state unless it is offloaded, the engine's own weights and the KV
    cache. On GPUs both hold NCCL's groups and the engine's graphs; the CUDA context is not counted.

    Args:
        config, models, shape, layout: of the run.
        num_params: parameters of the rank that holds most.
        engine_bytes: of engine weights that are not the trainer's own memory, on the fullest rank.
        transport: how weights travel.
        on_gpu: whether ranks hold this on GPUs.
    """
    itemsize = itemsize_of(config, on_gpu)
    optimizer = ADAM_BYTES + (MASTER_BYTES if itemsize == 2 else 0)
    sharded = optimizer * num_params // (layout.dp * layout.cp)
    frozen = models.num_frozen_copies * num_params * itemsize
    frozen += itemsize * _other_params(config, models, layout)
    weights = models.num_trained * num_params * itemsize + frozen
    gradients = models.num_trained * num_params * MAIN_GRAD_BYTES
    states = models.num_trained * sharded
    engine = ENGINES[config.rollout.engine]
    num_requests = _num_requests(config, layout)
    heads = max(1, shape.num_kv_heads // config.rollout.tp)  # repeated where ranks are more
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    kv_cache = num_requests * longest * 2 * heads * shape.head_dim * shape.num_layers * itemsize
    always = _gpu_bytes(config, layout, transport) if on_gpu else 0
    return Memory(
        train=always
        + weights
        + gradients
        + states
        + _activation_bytes(config, shape, layout, itemsize)
        + (0 if engine.sleeps else engine_bytes),
        rollout=always
        + (frozen if config.train.release_weights_in_rollout else weights)
        + (0 if config.train.offload_optimizer else states)
        + engine_bytes
        + kv_cache,
        kv_cache=kv_cache,
        num_requests=num_requests,
        least_requests=1 if engine.has_fixed_kv_cache else num_requests,
        staging=config.rollout.staging_mib * MIB,
    )


def _num_requests(config: Config, layout: TrainLayout) -> int:
    """Returns how many requests the KV cache is for: a fixed one is made for all that may be
    decoded together, another grows with those that there are.
    """
    most = config.rollout.max_batch
    if ENGINES[config.rollout.engine].has_fixed_kv_cache:
        return most
    samples = config.steps.prompts_per_step * config.steps.samples_per_prompt
    return min(most, -(-samples // layout.world_size))


def _gpu_bytes(config: Config, layout: TrainLayout, transport: str) -> int:
    """Returns what libraries hold of a GPU in both phases: groups of ranks, staging, graphs."""
    sizes = [layout.world_size, layout.tp, layout.pp, layout.cp, layout.dp]
    sizes += [layout.dp * layout.cp, layout.tp * layout.pp]
    sizes += 2 * [config.rollout.tp]  # torch's group and vLLM's own communicator
    is_staged = transport == "packed" and layout.world_size > 1
    num_groups = sum(size > 1 for size in sizes) + is_staged  # blocks go over a group of their own
    staging = config.rollout.staging_mib * MIB if is_staged else 0
    graphs = GRAPH_BYTES if ENGINES[config.rollout.engine].captures_graphs else 0
    return GROUP_BYTES * num_groups + graphs + staging


def _activation_bytes(config: Config, shape: ModelShape, layout: TrainLayout, itemsize: int) -> int:
    """Returns what one rank's forward passes keep for its backward passes, and the head's scratch.

    Of a layer: its input, what follows each norm, and the input of the feed-forward half (4 hidden
    sizes); queries, keys and values, and what attention gives; the feed-forward layer's two halves
    and their product. Tensor and sequence parallel cut all of it.
    """
    tokens = config.train.micro_batch_tokens // layout.cp
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    per_token = 4 * shape.hidden_size + attention + 3 * shape.ffn_size
    layers = shape.num_layers // layout.pp
    if config.train.recompute == "full":  # each layer keeps its input; one layer at a time is whole
        kept = shape.hidden_size * layers + per_token
    elif config.train.recompute == "selective":  # not the product
        kept = (per_token - shape.ffn_size) * layers
    else:
        kept = per_token * layers
    logits = tokens * shape.padded_vocab(layout.tp) // layout.tp
    scratch = min(BYTES_PER_LOGIT * logits // HEAD_CHUNKS, MOST_HEAD_BYTES)
    return tokens * kept * itemsize * layout.pp // layout.tp + scratch


def _other_params(config: Config, models: RunModels, layout: TrainLayout) -> int:
    """Returns the parameters of frozen models of other shapes, the teacher and reward models, on
    the ranks that hold most of them.
    """
    parts = []
    if models.has_teacher and (hf_config := read_teacher(config)) is not None:
        parts.append(megatron_layouts(*read_model(None, hf_config), layout))
    for section in models.reward_models.values():
        family = read_model(section.family, read_model_config(section))
        parts.append(megatron_layouts(*family, layout, "value"))
    return sum(map(most_elements, parts))


def most_elements(layouts: Sequence[RankLayout]) -> int:
    """Returns the elements of the rank that holds most."""
    different = {id(layout): layout for layout in layouts}.values()
    return max(sum(prod(shape) for shape in layout.shapes.values()) for layout in different)


def itemsize_of(config: Config, on_gpu: bool) -> int:
    """Returns bytes of a parameter; 'auto' is float32 on CPU."""
    if config.model.dtype == "auto":
        return 2 if on_gpu else 4
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]
