"""The memory part of `hybridrl plan`: what the fullest rank holds in each phase. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybridrl.config.algorithm import PolicyGradientConfig, PpoConfig
from hybridrl.config.schema import Config
from hybridrl.config.supervised import KtoConfig, PairLossConfig
from hybridrl.config.teacher import read_teacher
from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.models.weights import RankLayout, megatron_layout
from hybridrl.parallel.layout import TrainLayout

CPU_ENGINES = ("hf", "scripted")
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


def memory_peaks(
    config: Config,
    shape: ModelShape,
    layout: TrainLayout,
    sources: Sequence[RankLayout],
    targets: Sequence[RankLayout],
    shared: Sequence[int],
    transport: str,
) -> dict[str, int]:
    """Returns the estimated peak of the fullest rank in each phase, in bytes.

    Training holds parameters, fp32 gradients, the optimizer's share of a data-parallel rank, frozen
    models, activations and logits, and weights of an engine that does not sleep. Generation holds
    parameters, the optimizer's state unless it is offloaded, the engine's own weights and the KV
    cache. On GPUs both hold NCCL's groups and the engine's graphs; the CUDA context is not counted.
    """
    itemsize = itemsize_of(config)
    num_params = max(_num_elements(source) for source in sources)
    engine = max(
        itemsize * _num_elements(target) - alias
        for target, alias in zip(targets, shared, strict=True)
    )
    optimizer = ADAM_BYTES + (MASTER_BYTES if itemsize == 2 else 0)
    sharded = optimizer * num_params // (layout.dp * layout.cp)
    num_trained = 2 if isinstance(config.algorithm, PpoConfig) else 1
    frozen = itemsize * num_params if _has_reference(config) else 0
    frozen += _teacher_bytes(config, layout)
    weights = num_trained * num_params * itemsize + frozen
    gradients = num_trained * num_params * MAIN_GRAD_BYTES
    states = num_trained * sharded
    sleeps = config.rollout.engine == "vllm"
    kv_size = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * itemsize
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    kv_cache = config.rollout.max_batch * longest * kv_size // config.rollout.tp
    always = 0 if config.rollout.engine in CPU_ENGINES else _gpu_bytes(config, layout, transport)
    return {
        "train_peak_bytes": always
        + weights
        + gradients
        + states
        + _activation_bytes(config, shape, layout)
        + (0 if sleeps else engine),
        "rollout_peak_bytes": always
        + (frozen if config.train.release_weights_in_rollout else weights)
        + (0 if config.train.offload_optimizer else states)
        + engine
        + kv_cache,
        "staging_bytes": config.rollout.staging_mib * MIB,
    }


def _gpu_bytes(config: Config, layout: TrainLayout, transport: str) -> int:
    """Returns what libraries hold of a GPU in both phases: groups of ranks, staging, graphs."""
    sizes = [layout.world_size, layout.tp, layout.pp, layout.cp, layout.dp]
    sizes += [layout.dp * layout.cp, layout.tp * layout.pp]
    sizes += 2 * [config.rollout.tp]  # torch's group and vLLM's own communicator
    is_staged = transport == "packed" and layout.world_size > 1
    num_groups = sum(size > 1 for size in sizes) + is_staged  # blocks go over a group of their own
    staging = config.rollout.staging_mib * MIB if is_staged else 0
    return GROUP_BYTES * num_groups + GRAPH_BYTES + staging


def _activation_bytes(config: Config, shape: ModelShape, layout: TrainLayout) -> int:
    """Returns what one rank's forward passes keep for its backward passes, and the head's scratch.

    Of a layer: its input, what follows each norm, and the input of the feed-forward half (4 hidden
    sizes); queries, keys and values, and what attention gives; the feed-forward layer's two halves
    and their product. Tensor and sequence parallel cut all of it.
    """
    itemsize, tokens = itemsize_of(config), config.train.micro_batch_tokens // layout.cp
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


def _has_reference(config: Config) -> bool:
    return any(
        (isinstance(chosen, PolicyGradientConfig) and chosen.kl_coef > 0)
        or (isinstance(chosen, PairLossConfig) and chosen.reference)
        or isinstance(chosen, KtoConfig)
        for chosen in (config.algorithm, *(term.algorithm for term in config.terms().values()))
    )


def _teacher_bytes(config: Config, layout: TrainLayout) -> int:
    """Returns the weights of the teacher, if there is one, on the rank that holds most of them."""
    if (hf_config := read_teacher(config)) is None:
        return 0
    family = resolve_family(None, hf_config)
    shape, ranks = family.shape(hf_config), range(layout.world_size)
    parts = (_num_elements(megatron_layout(family, shape, layout, rank)) for rank in ranks)
    return itemsize_of(config) * max(parts)


def _num_elements(layout: RankLayout) -> int:
    return sum(prod(shape) for shape in layout.shapes.values())


def itemsize_of(config: Config) -> int:
    """Returns bytes of a parameter; 'auto' is float32 where the engine is one for CPU."""
    if config.model.dtype == "auto":
        return 4 if config.rollout.engine in CPU_ENGINES else 2
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]
