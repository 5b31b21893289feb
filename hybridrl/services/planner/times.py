"""Predicts how long a step's phases take, from the model, layout, cluster and sample lengths.

No torch. Divides what a rank computes, copies and sends by the cluster's rates. The constants below
correct these estimates. They were fitted to steps and passes on H200 (step, step_h200_lag, layouts,
layouts_moe, train, train_moe and rollout in benchmarks/results/*_h200.json, and the mixture of
experts in step_4gpu_h200.json; tests/unit/test_plan_times.py lists the error of each prediction).
Predictions for other GPUs differ only in the rates. They were compared with steps on H100; other
GPUs and transfers between nodes were not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

from hybridrl.config.rules_optimizer import OptimizerLevel, level_of
from hybridrl.config.schema import Config
from hybridrl.hybrid_engine.planning.nodes import transfer_ms
from hybridrl.metrics.flops import matmul_params, recurrent_flops
from hybridrl.models.adapters.rows import num_active_adapter_parameters
from hybridrl.models.family import ModelShape
from hybridrl.models.mtp import input_params, mtp_layer
from hybridrl.models.trainable import ALL, BackwardShares
from hybridrl.models.vision.decoding import NUM_DECODERS
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.model_rules import held_family
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.hardware import Assumptions
from hybridrl.services.planner.image_costs import (
    TowerWork,
    image_tokens,
    image_work,
    response_image_tokens,
)
from hybridrl.services.planner.micro_batch_sizes import Lengths, shares_prompts
from hybridrl.services.planner.muon_costs import orthogonalization_flops
from hybridrl.services.planner.phase_memory import FP32_BYTES, RoleModel, itemsize_of
from hybridrl.training.batches.prompt_sharing import KEY_ROWS_OF_BUDGET

# Number of elements (2 bytes each) that a forward pass reads and writes outside matrix products,
# per token and layer: as multiples of the hidden size, and of the size of the feed-forward product.
# EXPERT_COPIES counts copies to an expert and back, per token and expert, as a multiple of the
# hidden size.
HIDDEN_COPIES, PRODUCT_COPIES, EXPERT_COPIES = 20, 6, 6
LOGIT_BYTES = 8  # Per logit: fp32 logits are written and read in chunks.
# Bytes per gathered token and expert: an fp32 weight, and a flag (dispatch.py).
ROUTER_BYTES = 4 + 1
# A micro-batch's products take as long as at full rate with LOST_TOKENS more tokens.
LOST_TOKENS = 850.0
# Rate of the experts' grouped matrix products, as a share of the rate of large matrix products.
EXPERTS_SHARE = 0.6
# Share of the matrix rate that recurrent modules reach with our kernels, including elementwise
# operations. Fitted to Qwen3.5-4B on one H200 (step_qwen35_h200.json).
RECURRENT_SHARE = 0.016
# Cost of a backward pass relative to a forward pass, for dense models and for mixtures of experts.
BACKWARD, BACKWARD_EXPERTS = 2.1, 2.2
# Rate of collectives in tensor-parallel layers and in experts, as a share of the link's rate: for
# two ranks, for more ranks in one node, and between nodes (not measured).
PAIR_SHARE, COLLECTIVE_SHARE, FAR_SHARE = 0.68, 0.95, 0.72
# Extra host time to recompute a layer, in addition to the host time of a forward pass, because
# activation checkpoints save and restore the random state.
HOST_AGAIN_S = 3.5e-3
# Host time to launch a layer's kernels in a forward and in a backward pass, in seconds, for layers
# without and with experts.
HOST_FORWARD_S, HOST_BACKWARD_S = 2.2e-3, 3.4e-3
HOST_FORWARD_EXPERTS_S, HOST_BACKWARD_EXPERTS_S = 4.9e-3, 10.8e-3
SMOOTH = 4  # Exponent of the norm that combines host time and GPU time.
# Fixed time per update and per pass, in seconds, to prepare batches and losses.
UPDATE_S, PASS_S = 0.03, 0.015
# Bytes read and written per parameter to add a micro-batch's gradient to the fp32 sum.
GRADIENT_TRAFFIC = 2 * 4
# Bytes that an Adam step reads and writes per parameter. On the device: gradient, moments, master
# and weight. With low precision: 27 elementwise operations in fp32 (training/piecewise_adam.py).
ADAM_TRAFFIC = 4 + 2 * (4 + 8) + 2
PIECEWISE_TRAFFIC = 228
# GIVING_BACK_S is the extra time of a step, in seconds, if training and engine do not fit on a GPU
# together, so that each must free its memory for the other. On H200, this time was 0.25 to 0.65 s
# for a 7B model without lent memory, and 0.2 s for a 1.5B model with lent memory. ROOM_SHARE is the
# share of GPU memory into which training and engine must fit (headroom.py). MEMORY_DOUBT is the
# error of the predicted share: a 7B model kept both phases' memory at predicted shares of 0.87 and
# 0.89, a 1.5B model freed it at 0.90, and a mixture of experts kept it at 0.92.
GIVING_BACK_S, ROOM_SHARE, MEMORY_DOUBT = 0.3, 0.9, 0.025
# Fixed times in an engine step, in seconds: launches and sampling on the GPU; a layer's kernels;
# host work per request, which overlaps with the GPU; an all-reduce of few tokens.
ENGINE_STEP_S, LAYER_STEP_S = 1.2e-3, 25e-6
REQUEST_S, ALL_REDUCE_S = 17e-6, 15e-6
# Extra time per layer for adapters on all linear layers. Measured with vLLM 0.26, one adapter, 7B,
# rank 32, H200: 512 tokens of 128 requests take 4.21 s with adapters and 3.47 s without.
ADAPTERS_STEP_S = (4.21 - 3.47) / 512 / 28
# Extra time per layer with a recurrent module, besides reading and writing its states. Fitted to
# the same steps of Qwen3.5-4B: 512 tokens of 64 requests took 4.59 s with vLLM 0.26.
RECURRENT_STEP_S = 125e-6
# Extra time per layer for FP8 weights: activations are quantized before each product, and vLLM's
# FP8 kernels reach less of the memory's rate than bf16 ones. Measured with vLLM 0.26 (CUTLASS), 7B,
# one H200: 7.2 ms with FP8 weights and 6.7 ms with bf16 for 64 requests of 1.5k to 2k tokens.
FP8_STEP_S = 84e-6
PREFILL_SHARE, DECODE_SHARE = 0.5, 0.9  # Shares of the rate of matrix products.
# Rate of a vision tower's products and attention, as a share of the rate of large matrix products,
# host time to launch a block's kernels in a forward pass, and time that a micro-batch loses because
# the host waits for the device before the tower. Fitted to a run of Qwen3-VL-4B on one H200. Four
# later runs (step_images_h200.json, step_images_2gpu_h200.json) took 0.94 to 1.08 of the predicted
# time.
TOWER_SHARE, HOST_TOWER_S, TOWER_WAIT_S = 0.5, 0.6e-3, 0.026
# Host time to decode, resize and normalize an image, per token (1,024 pixels): PNG files of 1024 x
# 1024 pixels on one core, from 25 to 50 ms. Threads do it while the engine generates.
IMAGE_TOKEN_S = 30e-6
STEP_S = 0.06  # Time for rewards and advantages, in seconds.


@dataclass(frozen=True)
class Times:
    """Durations of a step's phases, in seconds; `scoring` is forward passes without updates."""

    generation: float
    scoring: float
    update: float
    reshard: float
    rest: float = STEP_S

    @property
    def step(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class Packs:
    """Micro-batches that one data-parallel replica computes in one update.

    A shared prompt's tokens count once per micro-batch. `pairs` are tokens that attend to another,
    `head_tokens` those for which the head is computed.
    """

    num_micro: int
    tokens: float
    pairs: float
    head_tokens: float
    tower: TowerWork = TowerWork()


def packs(
    config: Config, shape: ModelShape, lengths: Lengths, dp: int, cp: int, budget: int
) -> Packs:
    """Returns how an update's samples are packed if all samples have the usual length."""
    steps, per_prompt = config.steps, config.steps.samples_per_prompt
    updates = steps.updates_per_step
    samples = max(1, ceil(steps.prompts_per_step * per_prompt / updates / dp))
    prompt, response = lengths.prompt, lengths.response
    group = min(per_prompt, samples) if shares_prompts(config, shape) else 1
    # Attention may copy the prompt's keys for each sample of a unit (prompt_sharing.py).
    by_rows = KEY_ROWS_OF_BUDGET * budget // cp // (prompt + response)
    pieces = ceil(group / max(1, min((budget - prompt) // (response + 1), by_rows)))
    each = ceil(group / pieces)  # samples per unit; each but the first repeats the last token
    unit = prompt + each * response + each - 1
    num_units = ceil(samples / group) * pieces
    num_micro = ceil(num_units / max(1, budget // unit))
    pairs = num_units * prompt**2 / 2 + samples * response * (prompt + response / 2)
    tokens = num_units * prompt + samples * response
    # A micro-batch computes an image once for all its samples. Balancing by length distributes the
    # units of a prompt over the micro-batches of all replicas as if at random.
    num_prompts = ceil(samples * dp / per_prompt)
    missed = (1 - 1 / (num_micro * dp)) ** (num_units * dp / num_prompts)
    tower = image_work(config, shape.vision, num_micro * num_prompts * (1 - missed), samples)
    return Packs(num_micro, tokens, pairs, samples * response, tower)


def _beside(gpu_s: float, host_s: float) -> float:
    """Returns the time of GPU work and its host launches, slightly more than the longer time."""
    return float((gpu_s**SMOOTH + host_s**SMOOTH) ** (1 / SMOOTH))


def giving_back_s(share: float) -> float:
    """Returns the extra seconds per step if both phases together need `share` of a GPU's memory."""
    chance = (share - ROOM_SHARE) / (2 * MEMORY_DOUBT) + 0.5
    return GIVING_BACK_S * min(1.0, max(0.0, chance))


def adam_s(level: OptimizerLevel, num_updated: int, assumed: Assumptions) -> float:
    """Returns the time of an Adam step; host state is copied while pieces are updated."""
    traffic = PIECEWISE_TRAFFIC if level.is_low_precision else ADAM_TRAFFIC
    on_device = num_updated * traffic / (assumed.values["memory_gb_per_s"].value * 1e9)
    if not level.on_host:
        return on_device
    copied = num_updated * level.state_bytes / (assumed.values["host_gb_per_s"].value * 1e9)
    return max(on_device, copied)


@dataclass(frozen=True)
class PassTimes:
    """Predicts passes over micro-batches; `adapter_params` is the number of them per token."""

    shape: ModelShape
    layout: TrainLayout
    assumed: Assumptions
    head_size: int
    adapter_params: int = 0

    def forward_s(self, found: Packs) -> float:
        return PASS_S + self._passes_s(found, 1.0, self._host_s()[0])

    def update_s(
        self,
        found: Packs,
        recompute: str,
        num_trained: int,
        shares: BackwardShares = ALL,
        trains_tower: bool = False,
    ) -> float:
        """Returns the time of passes over all micro-batches, with the needed backward `shares`."""
        forward, backward = self._host_s()
        of_backward = BACKWARD if self.shape.moe is None else BACKWARD_EXPERTS
        factor = 1 + of_backward * (shares.flow + shares.weights) / 2
        if recompute == "full":
            factor, backward = factor + 1, backward + forward + HOST_AGAIN_S
        elif recompute == "selective":
            factor += 0.03
        added_s = found.num_micro * num_trained * GRADIENT_TRAFFIC / self._memory_rate
        of_tower = 1 + BACKWARD if trains_tower else 1.0
        passes_s = self._passes_s(found, factor, forward + backward, of_tower)
        return PASS_S + passes_s + added_s + (self._mtp_s(found) if self.shape.has_mtp else 0.0)

    def optimizer_s(self, level: OptimizerLevel, num_trained: int, num_updated: int) -> float:
        """Returns the time of gradient reduction, optimizer step and parameter gather."""
        replicas = self.layout.dp * self.layout.cp
        moved = num_trained * (4 + 2) * (replicas - 1) / replicas
        moved_s = moved / self._rate(self.layout.tp * replicas)
        return UPDATE_S + adam_s(level, num_updated, self.assumed) + moved_s

    def muon_s(self, model: RoleModel, num_trained: int) -> float:
        """Returns the time to gather and orthogonalize the updates of matrices."""
        replicas = self.layout.dp * self.layout.cp
        gathered = num_trained * FP32_BYTES * (replicas - 1) / replicas
        gathered_s = gathered / self._rate(self.layout.tp * replicas)
        flops = orthogonalization_flops(model.trained_family, model.shape, self.layout, model.head)
        return gathered_s + flops / self._matrix_rate

    def _passes_s(self, found: Packs, factor: float, host_s: float, of_tower: float = 1.0) -> float:
        """Takes costs in forward passes (`factor`, `of_tower`) and a layer's host
        time (`host_s`).
        """
        layout, stages = self.layout, self.layout.pp
        layers, head = self._layers_s(found), self._head_s(found)
        largest = ceil(self.shape.num_layers / stages) / self.shape.num_layers  # stage's share
        per_micro = (layers * largest + head) * factor + of_tower * self._tower_s(found.tower)
        per_micro /= found.num_micro
        host = host_s * self.shape.num_layers * largest
        if (vision := self.shape.vision) is not None:
            host += of_tower * HOST_TOWER_S * vision.num_layers
        each = _beside(per_micro, host)
        if found.tower.flops:
            each += TOWER_WAIT_S
        if self.shape.moe is not None and stages > 1:
            # Empirical: five measured steps with two stages of 3 layers took this much longer, most
            # of them on slow hosts. It is not known which cause dominates: in each layer with
            # experts a host waits for its device, and stages wait for each other. More stages were
            # not measured.
            each += self._host_s()[0] * self.shape.num_layers * largest
        return each * (found.num_micro + (stages - 1) / layout.vpp)

    def _mtp_s(self, found: Packs) -> float:
        """Returns the time of the layer for multi-token prediction, which is never recomputed and
        whose head has no weight gradient. Not measured.
        """
        layer = replace(self, shape=mtp_layer(self.shape))
        joined = 2.0 * input_params(self.shape) * found.tokens
        joined_s = joined / self._matrix_rate / (self.layout.tp * self.layout.cp)
        gpu_s = (1 + BACKWARD) * (layer._layers_s(found) + joined_s)
        gpu_s += (1 + BACKWARD / 2) * self._head_s(found)
        host_s = found.num_micro * (HOST_FORWARD_S + HOST_BACKWARD_S)
        return _beside(gpu_s, host_s)

    def _tower_s(self, work: TowerWork) -> float:
        """Returns the tower's time; every rank of the first stage computes all images."""
        return work.flops / (TOWER_SHARE * self._matrix_rate) + work.traffic / self._memory_rate

    def _layers_s(self, found: Packs) -> float:
        shape, layout = self.shape, self.layout
        cut, tokens = layout.tp * layout.cp, found.tokens
        flops = 2.0 * (matmul_params(shape) + self.adapter_params) * tokens
        of_experts, product, copies = 0.0, shape.ffn_size, 0.0
        if (moe := shape.moe) is not None:
            product = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
            mixed = shape.num_layers - len(moe.dense_layers)
            width = moe.experts_per_token * moe.expert_ffn_size
            of_experts = 2.0 * mixed * 3 * shape.hidden_size * width * tokens
            copies = EXPERT_COPIES * moe.experts_per_token * shape.hidden_size
        per_head = shape.head_dim + shape.value_dim
        flops += shape.num_attention_layers * 2.0 * shape.num_heads * per_head * found.pairs
        flops += recurrent_flops(shape) * tokens / RECURRENT_SHARE
        elements = HIDDEN_COPIES * shape.hidden_size + PRODUCT_COPIES * product + copies
        traffic = 2.0 * elements * shape.num_layers * tokens
        matrix_s = (flops - of_experts + of_experts / EXPERTS_SHARE) / self._matrix_rate
        matrix_s *= 1 + LOST_TOKENS * found.num_micro * layout.cp / tokens
        return (matrix_s + traffic / self._memory_rate) / cut + self._sent_s(found)

    def _sent_s(self, found: Packs) -> float:
        shape, layout = self.shape, self.layout
        tokens, total = found.tokens / layout.cp, 0.0
        if layout.tp > 1:  # all tokens are gathered twice and scattered twice
            sent = 4 * 2.0 * tokens * shape.hidden_size * (layout.tp - 1) / layout.tp
            total += sent / self._collective_rate(layout.tp)
        # Half of the time in which keys and values go around a ring overlaps with attention.
        if layout.cp > 1:
            size = shape.num_kv_heads * (shape.head_dim + shape.value_dim) / layout.tp
            sent = 2.0 * tokens * size * (layout.cp - 1)
            total += 0.5 * sent / self._rate(layout.tp * layout.cp)
        if shape.moe is not None and layout.ep * layout.etp > 1:
            parts, each = layout.ep * layout.etp, shape.moe.experts_per_token
            copies, of_router = each * layout.etp / parts, 0
            if layout.gathers_tokens(each):
                copies, of_router = 1.0, ROUTER_BYTES * shape.moe.num_experts
            of_token = 2 * 2 * copies * shape.hidden_size + of_router  # to host memory and back
            sent = tokens / layout.tp * of_token * (parts - 1)
            total += sent / self._collective_rate(parts)
        return total * shape.num_layers

    def _head_s(self, found: Packs) -> float:
        logits, cut = self.head_size * found.head_tokens, self.layout.tp * self.layout.cp
        flops, traffic = 2.0 * self.shape.hidden_size * logits, LOGIT_BYTES * logits
        return (flops / self._matrix_rate + traffic / self._memory_rate) / cut

    def _host_s(self) -> tuple[float, float]:
        if self.shape.moe is None:
            return HOST_FORWARD_S, HOST_BACKWARD_S
        return HOST_FORWARD_EXPERTS_S, HOST_BACKWARD_EXPERTS_S

    def _rate(self, group: int) -> float:
        cluster = self.assumed.cluster
        is_near = group <= cluster.gpus_per_node
        return cluster.link_rate if is_near else cluster.node_rate / cluster.gpus_per_node

    def _collective_rate(self, group: int) -> float:
        if group > self.assumed.cluster.gpus_per_node:
            return FAR_SHARE * self._rate(group)
        return (PAIR_SHARE if group == 2 else COLLECTIVE_SHARE) * self._rate(group)

    @property
    def _matrix_rate(self) -> float:
        return self.assumed.values["matrix_tflops"].value * 1e12

    @property
    def _memory_rate(self) -> float:
        return self.assumed.values["memory_gb_per_s"].value * 1e9


def generation_s(
    config: Config,
    shape: ModelShape,
    lengths: Lengths,
    assumed: Assumptions,
    num_ranks: int,
    engine_bytes: int,
    max_requests: int | None = None,
    adapter_params: int = 0,
) -> float:
    """Predicts the time of generation, in which each decoding step reads weights and cache once.

    `engine_bytes` are a rank's engine weights, `max_requests` a replica's concurrent ones.
    """
    tp, steps = config.rollout.tp, config.steps
    replicas = max(1, num_ranks // tp)
    requests = ceil(steps.prompts_per_step * steps.samples_per_prompt / replicas)
    together = max(1, min(requests, max_requests or config.rollout.max_batch))
    num_steps = max(lengths.longest, ceil(requests / together * lengths.response))
    if requests > together:  # the last requests are decoded together with few others
        num_steps = max(num_steps, ceil(requests / together) * lengths.response)
    memory = assumed.values["memory_gb_per_s"].value * 1e9
    matrix = assumed.values["matrix_tflops"].value * 1e12
    cached = 1.0 * shape.token_bytes(tp, 1 if config.rollout.kv_cache_dtype == "fp8" else 2)
    usual = lengths.prompt + lengths.response / 2
    # This sums over the tokens of all requests, so steps with fewer requests cost less.
    states = 2.0 * shape.state_bytes(tp, 2)  # read and written
    cache_s = requests * lengths.response * (usual * cached + states) / memory
    params = matmul_params(shape) + adapter_params
    compute = 2.0 * (params + shape.hidden_size * shape.vocab_size)
    compute_s = requests * lengths.response * compute / tp / (DECODE_SHARE * matrix)
    cluster, reduced_s = assumed.cluster, 0.0
    step_s = ENGINE_STEP_S + LAYER_STEP_S * shape.num_layers
    if shape.mixer is not None:
        step_s += RECURRENT_STEP_S * len(shape.mixer.layers)
    if adapter_params:
        step_s += ADAPTERS_STEP_S * shape.num_layers
    if config.rollout.quantization == "fp8":
        step_s += FP8_STEP_S * shape.num_layers
    if tp > 1:  # each layer all-reduces a token's hidden state twice
        is_far, rate = tp > cluster.gpus_per_node, cluster.link_rate
        rate = cluster.node_rate / cluster.gpus_per_node if is_far else rate
        sent = 2 * shape.num_layers * 2 * 2.0 * shape.hidden_size * (tp - 1) / tp
        reduced_s = requests * lengths.response * sent / rate
        least_s = ALL_REDUCE_S + (2e-6 * cluster.latency_us if is_far else 0.0)
        step_s += 2 * shape.num_layers * least_s
    num_prompts = ceil(steps.prompts_per_step / replicas)
    prefill_s = 2.0 * params * num_prompts * lengths.prompt / tp / (PREFILL_SHARE * matrix)
    images_s = 0.0
    if (vision := shape.vision) is not None:  # the images of each prompt are computed once
        work = image_work(config, vision, num_prompts, requests)
        prefill_s += work.flops / tp / (TOWER_SHARE * matrix) + work.traffic / tp / memory
        images = num_prompts * image_tokens(config, vision)
        images += requests * response_image_tokens(config, vision)
        images_s = images * IMAGE_TOKEN_S / NUM_DECODERS
    # A decoding step reads only its tokens' rows of an embedding that is no output layer.
    itemsize = itemsize_of(config, on_gpu=True)
    unread = 0 if shape.tied_embeddings else itemsize * shape.vocab_size * shape.hidden_size // tp
    weights_s = num_steps * (engine_bytes - unread) / memory
    gpu_s = max(weights_s, compute_s) + cache_s + reduced_s + num_steps * step_s
    # The host prepares each step while the GPU computes the previous one.
    decode_s = _beside(gpu_s, requests * lengths.response * REQUEST_S)
    return _beside(decode_s + prefill_s, images_s)


def step_times(
    config: Config,
    models: Sequence[RoleModel],
    layout: TrainLayout,
    assumed: Assumptions,
    held: tuple[int, int],
    engine_bytes: int,
    synced_bytes: int,
    crossing_bytes: int,
    max_requests: int | None = None,
) -> Times:
    """Predicts the phases of a step in which all models share all ranks.

    Args:
        held: Policy parameters that the fullest rank trains, and those whose state it holds.
        engine_bytes, synced_bytes: Engine weights on a rank, and those that each sync writes.
        crossing_bytes: Synced bytes that the rank receives from other ranks.
        max_requests: Number of requests that a replica decodes concurrently.
    """
    lengths, train, steps = Lengths.of(config), config.train, config.steps
    shape = models[0].shape
    found = packs(config, shape, lengths, layout.dp, layout.cp, train.micro_batch_tokens)
    updates, scoring, update = steps.updates_per_step, 0.0, 0.0
    has_rollouts = _has_rollouts(config)
    for model in models:
        outputs = model.shape.vocab_size if model.head == "lm" else 1
        passes = PassTimes(model.shape, layout, assumed, outputs, model.active_adapter_params)
        if not model.is_trained:
            scoring += updates * passes.forward_s(found)
            continue
        if has_rollouts and (updates > 1 or model.role == "critic"):
            scoring += updates * passes.forward_s(found)
        update_s = passes.update_s(
            found, train.recompute, held[0], model.backward, model.trains_tower
        )
        step_s = passes.optimizer_s(level_of(train), *held)
        if train.optimizer == "muon":
            step_s += passes.muon_s(model, held[0])
        update += updates * (update_s + step_s)
    generation = reshard = 0.0
    if has_rollouts:
        sent = held_family(config.rollout.engine, models[0].family, shape)
        adapters = num_active_adapter_parameters(sent, shape) if sent.lora else 0
        generation = generation_s(
            config, shape, lengths, assumed, layout.world_size, engine_bytes, max_requests, adapters
        )
        reshard = _reshard_s(assumed, synced_bytes, crossing_bytes)
    return Times(generation, scoring, update, reshard)


def engine_note(config: Config) -> str | None:
    """Returns a note if no constants were fitted to this engine or to runs with adapters."""
    engine, notes = config.rollout.engine, []
    if not ENGINES[engine].has_fitted_times and _has_rollouts(config):
        fitted = " and ".join(name for name, traits in ENGINES.items() if traits.has_fitted_times)
        notes.append(
            f"generation is predicted as for {fitted}; no constants were fitted to {engine}"
        )
    if config.lora.is_on:
        notes.append("no constants were fitted to training with adapters")
    return "; ".join(notes) or None


def _has_rollouts(config: Config) -> bool:
    return config.algorithm.needs is None or config.algorithm.needs.rollouts


def _reshard_s(assumed: Assumptions, synced_bytes: int, crossing_bytes: int) -> float:
    cluster = assumed.cluster
    if cluster.nodes == 1:
        local = synced_bytes - crossing_bytes
        return transfer_ms("packed", crossing_bytes, local, cluster.link_gb_per_s) / 1e3
    rate = cluster.node_rate / cluster.gpus_per_node
    return transfer_ms("packed", 0, synced_bytes) / 1e3 + crossing_bytes / rate
