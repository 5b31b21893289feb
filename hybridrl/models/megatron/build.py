"""Builds Megatron models; the only module that does.

A family provides the model's arguments. This module adds the arguments that depend on layout and
host, selects the ModuleSpecs, and builds this rank's chunks. Megatron's initial weights are never
used: weights are loaded through the weight table, from an HF directory (hf/shards.py) or from a
seed (init.py), so they do not depend on the layout.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hybridrl.models.family import Family, ModelShape, Scales
from hybridrl.models.inputs import ExtraInputs
from hybridrl.models.megatron.attention import set_soft_cap
from hybridrl.models.megatron.clamped_experts import quick_gelu
from hybridrl.models.megatron.dispatch import gather_tokens
from hybridrl.models.megatron.heads import LanguageModel, ValueModel
from hybridrl.models.megatron.image_inputs import add_deepstack
from hybridrl.models.megatron.layers import KEYWORDS, LayerKind, layer_specs, with_mixer
from hybridrl.models.megatron.mtp import NextTokenLayer
from hybridrl.models.megatron.norm import narrowing, scaled_add, wide_residual_add
from hybridrl.models.megatron.rotary_positions import set_rotary
from hybridrl.models.vision.tower import build_tower
from hybridrl.models.weights import EXPERTS, Head
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.schedule import finalize_summed_gradients
from hybridrl.platform import Platform

ROUTER_BIAS = ".mlp.router.expert_bias"

Recompute = Literal["none", "selective", "full"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "clamped_swiglu": quick_gelu,  # of the gate, which clamped_experts.py clamps first
}

FIXED_KEYWORDS: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Megatron marks parameters as tensor-parallel when it initializes them; the gradient norm
    # relies on these marks.
    "perform_initialization": True,
    # Micro-batches of packed sequences differ in length, and Megatron then requires the all-to-all
    # dispatcher. dispatch.py replaces it for ranks that share a micro-batch.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    # The loss is already divided by the global denominator, so gradients are only summed.
    "calculate_per_token_loss": True,
    "finalize_model_grads_func": finalize_summed_gradients,
    # These fusions need apex; layers.py sets the fusions of transformer-engine.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
}

# Beginnings of notices that users can do nothing about, by the loggers of Megatron-Core 0.19 that
# print them whenever a model is built. Without a logging configuration they would appear on stderr
# before the message about a user's mistake. The notice about the MLP type concerns models with
# norms after their layers (post_norm.py): Megatron passes no process group to this type, which then
# uses the tensor-parallel group, as `MLP` does.
NOTICES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param",
    "megatron.core.transformer.transformer_layer": "Unknown MLP type",
}

FP8_KEYWORDS: dict[str, dict[str, Any]] = {
    # E4M3 everywhere, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2). Blocks are 128 x 128
    # elements of weights, and 128 elements of activations and gradients. Scales are powers of two,
    # which is transformer-engine's default.
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    # Forward E4M3, backward E5M2, with each tensor scaled by its largest element.
    "hybrid": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
}
for _keywords in FP8_KEYWORDS.values():
    # Weights are quantized for each micro-batch. A cache would keep 2 bytes per weight during the
    # rollout, too.
    _keywords["disable_parameter_transpose_cache"] = True


def transformer_config(
    family: Family,
    hf_config: Mapping[str, Any],
    layout: TrainLayout,
    dtype: torch.dtype,
    platform: Platform,
    recompute: Recompute = "none",
    fp32_residual: bool = False,
    layers: LayerKind = "torch",
    fp8: Literal["none", "blockwise", "hybrid"] = "none",
) -> TransformerConfig:
    """Builds Megatron's configuration from the family's arguments, the layout and the host.

    Args:
        layout: Parallel sizes. Sequence parallelism is on if tp > 1, because it saves memory
            without sending more bytes.
        recompute: 'full' stores only layer inputs and recomputes everything else in the backward
            pass. 'selective' is implemented by the layers' modules (`layer_specs`), except for
            grouped experts.
        fp32_residual: Whether the residual stream is fp32, in layers and between pipeline stages.
        fp8: Format of matrix products; parameters remain in `dtype`. See FP8_KEYWORDS.
    """
    shape = family.shape(hf_config)
    has_experts = shape.moe is not None
    keywords: dict[str, Any] = {
        **FIXED_KEYWORDS,
        "activation_func": ACTIVATIONS[shape.activation],
        "layernorm_zero_centered_gamma": shape.centered_norms,
        "attention_output_gate": shape.gated_attention,
        **_mixer_keywords(shape),
        **KEYWORDS[layers],
        **(_expert_keywords(layout, layers) if has_experts else {}),
        **_layout_keywords(layout, shape.num_layers, platform),
        "params_dtype": dtype,
        "pipeline_dtype": torch.float32 if fp32_residual else dtype,
        "fp32_residual_connection": fp32_residual,
        "bf16": dtype == torch.bfloat16,
    }
    if fp8 != "none":
        keywords |= FP8_KEYWORDS[fp8]
    if recompute == "full":
        keywords |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif recompute == "selective" and has_experts and layers == "transformer_engine":
        # Megatron rejects this for experts that run one by one; such experts use LeanMlp, like
        # dense layers.
        keywords |= {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    keywords |= family.transformer_config(hf_config)
    is_latent = "kv_lora_rank" in keywords
    return (MLATransformerConfig if is_latent else TransformerConfig)(**keywords)


def _mixer_keywords(shape: ModelShape) -> dict[str, Any]:
    if shape.mixer is None:
        return {}
    # Checkpoints then store each layer separately, because layers have different parameters.
    is_recurrent = [int(layer in shape.mixer.layers) for layer in range(shape.num_layers)]
    return {"linear_attention_freq": is_recurrent}


def _expert_keywords(layout: TrainLayout, layers: LayerKind) -> dict[str, Any]:
    return {
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # transformer-engine computes a rank's experts together, Megatron one by one.
        "moe_grouped_gemm": layers == "transformer_engine",
        # A single kernel sorts tokens by expert, instead of torch's gathers, scatters and copies.
        # An update takes 889 ms instead of 1,139 ms (benchmarks/results/train_moe_h100.json).
        "moe_permute_fusion": layers == "transformer_engine",
        "moe_expert_capacity_factor": None,  # no token is dropped
    }


def _layout_keywords(layout: TrainLayout, num_layers: int, platform: Platform) -> dict[str, Any]:
    interleaved = layout.vpp > 1
    chunks = [["decoder"] * size for size in layout.chunk_sizes(num_layers)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        # Megatron distributes the layers itself if all chunks have equally many layers.
        "pipeline_model_parallel_layout": chunks if num_layers % len(chunks) else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.tp > 1,
        # With two stages, the previous rank is also the next rank, so batched sends of the
        # interleaved schedule could be mismatched.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # True would synchronize the device after each exchange, for old versions of PyTorch.
        "batch_p2p_sync": False,
        # gloo reads a tensor after isend has returned, so it must not be freed early.
        "deallocate_pipeline_outputs": not platform.is_cpu,
    }


def build_chunks(
    family: Family,
    hf_config: Mapping[str, Any],
    config: TransformerConfig,
    head: Head = "lm",
    layers: LayerKind = "torch",
    recompute: Recompute = "none",
    extra_inputs: ExtraInputs | None = None,
    has_mtp: bool = False,
) -> list[torch.nn.Module]:
    """Builds this rank's model chunks, one per virtual pipeline stage, without loading weights.

    Args:
        config: Configuration from `transformer_config`. Megatron's process groups must exist.
        head: 'lm' computes log-probabilities of target tokens, 'value' computes one value per
            token.
        recompute: 'selective' recomputes the output of the feed-forward layers' activations.
        has_mtp: Whether the last stage has the layer for multi-token prediction.
    """
    shape = family.shape(hf_config)
    num_chunks = config.virtual_pipeline_model_parallel_size
    spec = layer_specs(layers, family, config, recompute, shape)
    family_keywords = family.model_keywords(hf_config)
    rotary = family_keywords.pop("rotary", None)  # if None, Megatron computes the frequencies
    scales = family_keywords.pop("scales", Scales())
    if scales.is_rounded:
        rounded = float(torch.tensor(scales.embedding).to(config.params_dtype))
        scales = replace(scales, embedding=rounded)
    _hide_notices()
    chunks: list[torch.nn.Module] = []
    for vp_stage in range(num_chunks) if num_chunks else [None]:
        keywords = {
            "config": config,
            "transformer_layer_spec": _block_spec(config, shape, scales, *spec, vp_stage),
            "vocab_size": shape.padded_vocab(config.tensor_model_parallel_size),
            "max_sequence_length": int(hf_config.get("max_position_embeddings", 1 << 20)),
            "pre_process": parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            "post_process": parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            "position_embedding_type": "rope",
            "scatter_embedding_sequence_parallel": (
                extra_inputs is None or not extra_inputs.changes_embeddings
            ),
            "vp_stage": vp_stage,
            **family_keywords,
        }
        if head == "value":
            chunks.append(ValueModel(share_embeddings_and_output_weights=False, **keywords))
        else:
            chunks.append(
                LanguageModel(
                    num_tokens=shape.vocab_size,
                    logits_cap=shape.logits_cap,
                    share_embeddings_and_output_weights=shape.tied_embeddings,
                    **keywords,
                )
            )
        if has_mtp and keywords["post_process"]:
            dense, _, final_norm = spec
            chunks[-1].predictor = NextTokenLayer(config, dense, final_norm, vp_stage)
        if family_keywords.get("position_embedding_type") == "mrope":
            # Angles cover the whole micro-batch; packed attention selects this rank's part.
            chunks[-1].rotary_pos_emb.cp_group = None  # type: ignore[union-attr]  # Megatron's
        if rotary is not None:
            set_rotary(chunks[-1], rotary)
        chunks[-1].scales = scales  # type: ignore[assignment]  # a plain attribute
        chunks[-1].extra_inputs = extra_inputs  # type: ignore[assignment]  # the same
        if shape.attention_cap:
            set_soft_cap(chunks[-1], shape.attention_cap)
        if shape.vision is not None and keywords["pre_process"]:
            device = next(chunks[-1].parameters()).device
            chunks[-1].vision = tower = build_tower(shape.vision, config.params_dtype, device)
            for parameter in tower.parameters():  # otherwise its copies could drift apart
                parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
            add_deepstack(chunks[-1].decoder.layers, shape.vision)  # type: ignore[union-attr, arg-type]  # Megatron's
    _mark_gradients(chunks, config, shape)
    gather_tokens(chunks, shape)
    return chunks


def _mark_gradients(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, shape: ModelShape
) -> None:
    """Marks gradients that Megatron must not reduce over its default ranks.

    Expert gradients must be summed over the experts' data-parallel ranks. Megatron (0.16.1,
    tensor_parallel/layers.py) marks expert parameters only if ep > 1. Otherwise it sums their
    gradients over all data-parallel ranks, which is wrong if etp differs from tp. With
    `qk_layernorm`, it sums the gradients of query and key norms over the tensor-parallel ranks
    (finalize_model_grads.py), which is wrong if the norm is sharded over these ranks. It marks the
    bias of an expert's second projection like the bias of a dense layer, whose gradient must be
    summed over tensor-parallel ranks and counted once in the gradient norm; but these ranks hold
    different experts, or are replicas of the experts' data parallelism.
    """
    if shape.whole_qk_norm:
        config.qk_layernorm = False
    for name, parameter in named_parameters(chunks).items():
        if EXPERTS in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's attribute
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _block_spec(
    config: TransformerConfig,
    shape: ModelShape,
    scales: Scales,
    dense: ModuleSpec,
    with_experts: ModuleSpec | None,
    final_norm: type,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    if config.fp32_residual_connection:
        dense = _with_wide_residual(dense)
        with_experts = with_experts and _with_wide_residual(with_experts)
        final_norm = narrowing(final_norm)
    if scales.residual != 1:
        dense = _with_scaled_residual(dense, scales.residual)
        with_experts = with_experts and _with_scaled_residual(with_experts, scales.residual)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = [dense] * count
    if with_experts is not None:
        kinds = config.moe_layer_freq[first : first + count]  # type: ignore[index]  # a list
        layers = [with_experts if has_experts else dense for has_experts in kinds]
    if shape.mixer is not None:
        layers = [
            with_mixer(layer, shape) if number in shape.mixer.layers else layer
            for number, layer in enumerate(layers, first)
        ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm)


def _with_wide_residual(layer: ModuleSpec) -> ModuleSpec:
    layer = copy.deepcopy(layer)
    parts = layer.submodules
    parts.input_layernorm = narrowing(parts.input_layernorm)
    parts.pre_mlp_layernorm = narrowing(parts.pre_mlp_layernorm)
    parts.self_attn_bda = parts.mlp_bda = wide_residual_add
    return layer


def _with_scaled_residual(layer: ModuleSpec, scale: float) -> ModuleSpec:
    layer = copy.deepcopy(layer)
    parts = layer.submodules
    parts.self_attn_bda = parts.mlp_bda = scaled_add(scale, parts.mlp_bda)
    return layer


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Returns this rank's parameters and weight buffers by local name, CHUNK/PARAMETER."""
    found = {name: parameter.data for name, parameter in named_parameters(chunks).items()}
    return found | weight_buffers(chunks)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{index}/{name}": parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def weight_buffers(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Returns the fp32 router biases, which have no gradient, by local name."""
    return {
        f"{index}/{name}": buffer
        for index, chunk in enumerate(chunks)
        for name, buffer in chunk.named_buffers()
        if name.endswith(ROUTER_BIAS)
    }


def _hide_notices() -> None:
    for name in NOTICES:  # adding the filter again changes nothing
        logging.getLogger(name).addFilter(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NOTICES[record.name])
