"""Selects the modules of decoder layers: transformer-engine's if possible, otherwise torch's.

Also builds the layers' ModuleSpecs. transformer-engine's layers fuse a norm into the following
linear layer, attend over packed sequences with cuDNN, apply rotary positions with a fused kernel,
and add weight gradients to Megatron's fp32 buffers inside the matrix product. transformer-engine's
layers are used on CUDA in bf16 for families without their own `layer_spec`. Both kinds write the
same checkpoints, because Megatron saves a torch layer's norms under transformer-engine's names
(`sharded_state_dict_keys_map`).
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from hybridrl.config.own_code import imported
from hybridrl.errors import UserError
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.megatron.attention import PackedAttention
from hybridrl.models.megatron.clamped_experts import ClampedExperts, LeanClampedExperts
from hybridrl.models.megatron.delta_net import GatedAttention
from hybridrl.models.megatron.latent_attention import LatentAttention, LatentSubmodules
from hybridrl.models.megatron.norm import TorchNorm
from hybridrl.models.megatron.post_norm import norm_after
from hybridrl.models.megatron.router import Router
from hybridrl.models.megatron.router_replay import ReplayingLayer
from hybridrl.models.megatron.specs import module_of, submodules_of, with_module
from hybridrl.models.megatron.te_attention import transformer_engine_attention
from hybridrl.models.trainable import has_trained
from hybridrl.platform import Platform
from hybridrl.versions import TRANSFORMER_ENGINE

LayerKind = Literal["torch", "transformer_engine"]

# Arguments that differ between the kinds of layers; build.py sets the other arguments. Megatron's
# fused dropout is not used, because without dropout, and mostly without biases, there is nothing to
# fuse.
KEYWORDS: dict[LayerKind, dict[str, Any]] = {
    "torch": {"bias_activation_fusion": False, "apply_rope_fusion": False},
    "transformer_engine": {"bias_activation_fusion": True, "apply_rope_fusion": True},
}


@dataclass(frozen=True)
class Layers:
    """The selected library for a model's layers; the same on all ranks.

    Args:
        fuses_norms: Whether norms are parameters of the linear layers that follow them.
        said: Log line that names the chosen library and the reason.
    """

    kind: LayerKind
    fuses_norms: bool
    said: str


def choose_layers(
    wanted: Literal["auto", "torch", "transformer_engine"],
    family: Family,
    dtype: torch.dtype,
    platform: Platform,
    fp32_residual: bool,
    fp8: str = "none",
    torch_only: str = "",
) -> Layers:
    """Selects the library for the layers' modules on this host.

    Args:
        family: Family of the model; if it has its own `layer_spec`, transformer-engine is not used.
        fp32_residual: Whether the residual stream is fp32, which fused norms do not accept.

    Raises UserError if transformer-engine or FP8 is requested but cannot be used.
    """
    if wanted == "torch":
        reason = "as set by train.layers"
    else:
        fault = _transformer_engine_fault(family, dtype, platform, torch_only)
        if fault is None:
            return Layers("transformer_engine", not fp32_residual, "layers: transformer-engine")
        if wanted == "transformer_engine":
            raise UserError(
                "train.layers",
                wanted,
                "auto or torch here",
                f"Set train.layers=auto: {fault}. transformer-engine's layers need bfloat16, a GPU "
                f"such as H100, transformer-engine {TRANSFORMER_ENGINE.allowed}, and a family "
                "without its own layer_spec.",
            )
        reason = f"since {fault}"
    if fp8 != "none":
        remedy = f"Set train.fp8=none. This run uses torch's layers, {reason}."
        raise UserError("train.fp8", fp8, "none with torch's layers", remedy)
    return Layers("torch", False, f"layers: torch, {reason}")


def _transformer_engine_fault(
    family: Family, dtype: torch.dtype, platform: Platform, torch_only: str
) -> str | None:
    if family.layer_spec is not None:
        return f"family {family.name} has its own layer_spec"
    if torch_only:
        return f"{torch_only}, which is not verified with transformer-engine"
    if platform.is_cpu:
        return platform.transformer_engine_fault()
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}; cuDNN's attention needs bf16"
    return platform.transformer_engine_fault()


def layer_specs(
    kind: LayerKind, family: Family, config: TransformerConfig, recompute: str, shape: ModelShape
) -> tuple[ModuleSpec, ModuleSpec | None, type]:
    """Returns the specs of dense layers and of layers with experts (or None), and the final norm.
    All have attention; see `with_mixer`.

    Args:
        recompute: 'selective' recomputes activations of feed-forward layers and experts in the
            backward pass. For grouped experts, `config` makes Megatron do this.

    Raises UserError for 'selective' with a feed-forward layer that LeanMlp cannot replace.
    """
    layer, final_norm = _layer_spec(kind, family, config)
    if shape.torch_only:
        norm_after(layer, shape)
    if shape.gated_attention:
        attention = layer.submodules.self_attention
        layer.submodules.self_attention = with_module(attention, GatedAttention)
    with_experts, has_clamped = None, shape.activation == "clamped_swiglu"
    if config.num_moe_experts is not None:
        # A user's layer_spec is used for all layers; it can read the config itself.
        is_own = family.layer_spec is not None
        with_experts = layer if is_own else expert_layer_spec(kind, config, layer)
        if has_clamped:
            mixture = submodules_of(with_experts.submodules.mlp)
            experts = LeanClampedExperts if recompute == "selective" else ClampedExperts
            mixture.experts = with_module(mixture.experts, experts)
    if recompute == "selective":
        mlp = layer.submodules.mlp
        is_own = with_experts is not None and family.layer_spec is not None
        is_known = _is_swiglu(config) or has_clamped
        if module_of(mlp) is not MLP or is_own or not is_known:
            raise UserError(
                "train.recompute",
                "selective",
                f"none or full with family {family.name}, whose feed-forward layers are not "
                "all Megatron's MLP with SwiGLU",
                "Set train.recompute=full, or none.",
            )
        layer.submodules.mlp = lean_mlp(submodules_of(mlp))
        if with_experts is not None:
            parts = submodules_of(with_experts.submodules.mlp)
            parts.shared_experts = with_module(parts.shared_experts, LeanSharedExperts)
            if not config.moe_grouped_gemm and not has_clamped:
                parts.experts = with_module(parts.experts, LeanExperts)
    return layer, with_experts, final_norm


def _layer_spec(
    kind: LayerKind, family: Family, config: TransformerConfig
) -> tuple[ModuleSpec, type]:
    if family.layer_spec is not None:
        layer, final_norm = family.layer_spec(config)
        return copy.deepcopy(layer), final_norm  # several models may use a user's spec
    is_te = kind == "transformer_engine"
    layer, norm = (transformer_engine_layer_spec if is_te else torch_layer_spec)(config)
    if isinstance(config, MLATransformerConfig):
        _attend_over_latents(kind, layer, norm)
    return layer, norm


def with_mixer(layer: ModuleSpec, shape: ModelShape) -> ModuleSpec:
    """Returns a copy of a layer's spec with the model's recurrent module in place of attention."""
    assert shape.mixer is not None
    spec = copy.deepcopy(layer)
    module: type = imported(shape.mixer.module)
    spec.submodules.self_attention = ModuleSpec(module, params={"sizes": shape.mixer})
    _keep_name(spec, "input_layernorm.")
    return spec


def _attend_over_latents(kind: LayerKind, layer: ModuleSpec, norm: type) -> None:
    """Replaces a layer's attention by latent attention, with a separate norm before it."""
    pieces = LatentSubmodules()
    if kind == "transformer_engine":
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TENorm,
            TERowParallelLinear,
        )

        linears = TEColumnParallelLinear, TERowParallelLinear
        pieces = LatentSubmodules(transformer_engine_attention(), *linears, TENorm)
    parts = layer.submodules
    causal = {"attn_mask_type": AttnMaskType.causal}
    parts.self_attention = ModuleSpec(LatentAttention, params=causal, submodules=pieces)
    parts.input_layernorm = norm
    _keep_name(layer, "input_layernorm.")


def _keep_name(layer: ModuleSpec, name: str) -> None:
    """Makes checkpoints store a separate norm under its own name."""
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        own: fused for own, fused in names.items() if own != name
    }


def _is_swiglu(config: TransformerConfig) -> bool:
    is_plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0
    is_silu = config.activation_func is torch.nn.functional.silu
    return bool(config.gated_linear_unit and is_silu and is_plain)


def torch_layer_spec(config: TransformerConfig, norm: type = TorchNorm) -> tuple[ModuleSpec, type]:
    """Returns a layer with Megatron's linear layers and packed attention, and the final norm.

    Args:
        norm: Class of the norms, called as `norm(config=..., hidden_size=..., eps=...)`.
    """
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    replaced = dataclasses.replace(
        attention,
        core_attention=PackedAttention,
        **({"q_layernorm": norm, "k_layernorm": norm} if config.qk_layernorm else {}),
    )
    layer.self_attention.submodules = replaced
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    return spec, norm


def transformer_engine_layer_spec(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """Returns transformer-engine's layer and the final norm.

    With an fp32 residual stream, the norms are separate torch norms, because transformer-engine's
    norms accept only inputs of their weights' data type (module/base.py, set_activation_dtype,
    2.11).
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    spec = copy.deepcopy(
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    )
    spec.submodules.self_attention.submodules.core_attention = transformer_engine_attention()
    if not config.fp32_residual_connection:
        return spec, TENorm
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchNorm
    layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear
    layer.sharded_state_dict_keys_map = get_gpt_layer_local_spec(
        normalization=config.normalization
    ).submodules.sharded_state_dict_keys_map
    return spec, TorchNorm


def expert_layer_spec(kind: LayerKind, config: TransformerConfig, dense: ModuleSpec) -> ModuleSpec:
    """Returns a copy of `dense` whose feed-forward layer is a mixture of experts.

    The norm before the mixture is a separate module, because the router also reads its output.
    """
    spec = copy.deepcopy(dense)
    layer = spec.submodules
    layer.mlp = get_moe_module_spec(
        use_te=kind == "transformer_engine",
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    parts = submodules_of(layer.mlp)
    parts.router = Router
    parts.shared_experts = with_module(parts.shared_experts, SharedExperts)
    if module_of(parts.experts) is TEGroupedMLP:
        parts.experts = with_module(parts.experts, GroupedExperts)
    spec.module = ReplayingLayer
    _keep_name(spec, "pre_mlp_layernorm.")
    if kind == "transformer_engine":
        use_grouped_gemm()
    if kind == "transformer_engine" and not config.fp32_residual_connection:
        from megatron.core.extensions.transformer_engine import TENorm

        layer.pre_mlp_layernorm = TENorm
    return spec


def use_grouped_gemm() -> None:
    """Makes transformer-engine compute all experts of a rank in one CUTLASS kernel on Hopper.

    Otherwise, transformer-engine launches one cuBLAS kernel per expert, so the host limits the
    speed with many small experts (benchmarks/results/train_moe_h200.json). transformer-engine reads
    the variable in every call. Weight gradients, which are accumulated in fp32, still use cuBLAS.
    If the user has set the variable, its value is kept.
    """
    os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")


def shares_prompts(
    wanted: bool | None, kind: LayerKind, is_cpu: bool, modules: Iterable[torch.nn.Module]
) -> bool:
    """Returns whether micro-batches store a prompt's tokens only once for all its samples.

    Args:
        wanted: `train.share_prompts`. If None, prompts are shared if this is possible and known to
            be faster. Sharing is not faster with torch's layers on a GPU, because their attention
            builds its mask on the host.

    Raises UserError if sharing is requested, but a user's attention class does not support it.
    """
    if wanted is None and not (is_cpu or kind == "transformer_engine"):
        return False
    parts = [part for module in modules for part in module.modules()]
    mixers = [m for part in parts if (m := getattr(part, "self_attention", None)) is not None]
    found = [a for part in parts if (a := getattr(part, "core_attention", None)) is not None]
    found += [mixer for mixer in mixers if getattr(mixer, "core_attention", None) is None]
    others = [type(a).__name__ for a in found if not getattr(a, "takes_shared_prompts", False)]
    if wanted and others:
        raise UserError(
            "train.share_prompts",
            "true",
            f"false with {others[0]}, which cannot continue a shared prompt",
            "Set train.share_prompts=false, or build layers with hybridrl's PackedAttention.",
        )
    return bool(wanted) or (wanted is None and bool(found) and not others)


def add_weight_gradients_in_place(module: torch.nn.Module) -> None:
    """Makes transformer-engine's linear layers add weight gradients to Megatron's `main_grad`.

    Megatron's own switch, `gradient_accumulation_fusion`, would also require apex for GPTModel's
    output layer (tensor_parallel/layers.py, 0.16.1).
    """
    for part in module.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True  # type: ignore[assignment]  # a plain attribute


def begin_gradients(chunks: Iterable[Any], recompute: str) -> None:
    """Makes gradients start at the first trained layer if a model's embeddings are frozen.

    A recomputed module computes gradients only if its input requires a gradient. With recompute
    'full', all layers are recomputed, so gradients start before the first layer.

    Args:
        chunks: Megatron's GPTModels, in which frozen parameters are already marked.
    """
    if recompute == "none":
        return
    for chunk in chunks:
        # Activations from another stage already require a gradient.
        if not chunk.pre_process or has_trained(chunk.embedding):
            continue
        trained = [layer for layer in chunk.decoder.layers if has_trained(layer)]
        if trained:
            entry = chunk.decoder if recompute == "full" else trained[0]
            entry.register_forward_pre_hook(_with_gradient, with_kwargs=True)


def _with_gradient(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    hidden = kwargs["hidden_states"]
    if torch.is_grad_enabled() and not hidden.requires_grad:
        kwargs = {**kwargs, "hidden_states": hidden.detach().requires_grad_()}
    return args, kwargs


def lean_mlp(submodules: MLPSubmodules) -> type:
    """Returns a class for ModuleSpecs that builds a LeanMlp from these linear layers."""

    class Lean:
        def __new__(  # type: ignore[misc]  # as TorchNorm
            cls, config: TransformerConfig, **_: object
        ) -> LeanMlp:
            return LeanMlp(config, submodules, ffn_hidden_size=config.ffn_hidden_size)

    return Lean


class LeanMlp(MLP):
    """Megatron's gated feed-forward layer that recomputes its activation in the backward pass.

    The activation's output is a third of what a layer stores for the backward pass; recomputing it
    costs only two memory reads and one write.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, and the bias that the caller must add to it."""
        widened, bias = self.linear_fc1(hidden_states)
        kept = CheckpointWithoutOutput(fp8=self.config.fp8)  # type: ignore[arg-type]
        activated = kept.checkpoint(self._activated, widened, bias, per_token_scale)
        output, output_bias = self.linear_fc2(activated)
        kept.discard_output_and_register_recompute(output)
        return output, output_bias

    def _activated(
        self, widened: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns activation(gate) * up, times the router's weights (T,) in experts."""
        if self.config.bias_activation_fusion:
            if scale is not None:
                return weighted_bias_swiglu_impl(widened, bias, scale[:, None])
            return bias_swiglu_impl(widened, bias)
        gate, up = (widened if bias is None else widened + bias).chunk(2, dim=-1)
        product = self.config.activation_func(gate) * up
        return product if scale is None else (product * scale[:, None]).to(product.dtype)


class SharedExperts(SharedExpertMLP):
    """Megatron's shared experts, whose gate is on the device from the start.

    Megatron (0.16.1) creates the gate's weight on the CPU, even if the model is on a GPU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.gate_weight is not None:
            self.gate_weight.data = self.gate_weight.data.to(torch.cuda.current_device())


class LeanSharedExperts(SharedExperts, LeanMlp):
    """Megatron's shared experts, which process every token, with LeanMlp's forward pass."""


class LeanExperts(SequentialMLP):
    """Megatron's experts that run one by one, each of which recomputes its activation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:  # SequentialMLP ignores its spec and builds MLPs
            expert.__class__ = LeanMlp


class GroupedExperts(TEGroupedMLP):
    """Megatron's experts with transformer-engine's grouped matrix products; accepts zero tokens.

    transformer-engine (2.11) crashes with a segmentation fault if no expert has a row. In that case
    the first expert computes a row of zeros, whose output is discarded and whose gradients are
    zero.
    """

    def forward(
        self, hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the experts' outputs, (T, D), and their bias.

        Args:
            hidden_states: (T, D), sorted by expert.
            tokens_per_expert: (E,), on the CPU.
            probs: (T,), the routing weight of each row.
        """
        if len(hidden_states):
            return super().forward(hidden_states, tokens_per_expert, probs)  # type: ignore[no-any-return]
        counts_E = tokens_per_expert.clone()
        counts_E[0] = 1
        pad = torch.nn.functional.pad
        row, weight = pad(hidden_states, (0, 0, 0, 1)), pad(probs, (0, 1))
        output, bias = super().forward(row, counts_E, weight)
        return output[:0], bias
