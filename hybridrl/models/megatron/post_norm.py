"""Norms after attention and feed-forward layers, and norms over all heads together (OLMo 2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from hybridrl.models.family import ModelShape
from hybridrl.models.megatron.norm import TorchNorm, rms_norm
from hybridrl.models.megatron.rotary_positions import angles_of_layer
from hybridrl.models.megatron.specs import with_module


class NormedAttention(SelfAttention):
    """Self-attention with a norm on its output."""

    # Whether the layer uses local rotary angles; None if the model has only one kind of angles.
    is_local: bool | None = None

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.post_layernorm = PostNorm(config)

    def choose_angles(self) -> None:
        """Selects local rotary angles if this layer has a window, otherwise global angles."""
        window, skipped = self.config.window_size, self.config.window_attn_skip_freq
        self.is_local = is_layer_window_attention(window, skipped, self.layer_number)

    def forward(self, *args: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        if self.is_local is not None:
            both = keywords["rotary_pos_emb"]
            keywords["rotary_pos_emb"] = angles_of_layer(both, self.is_local)
        return self.post_layernorm(*super().forward(*args, **keywords)), None


class NormedMlp(MLP):
    """Feed-forward layer with a norm on its output."""

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.post_layernorm = PostNorm(config)

    def forward(self, *args: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        return self.post_layernorm(*super().forward(*args, **keywords)), None


class PostNorm(MegatronModule):
    """RMSNorm on a layer's output; a MegatronModule, as Megatron's checkpoints require."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        norm: Any = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.weight: torch.nn.Parameter = norm.weight

    def forward(self, output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        whole = output if bias is None else output + bias
        eps, is_centered = self.config.layernorm_epsilon, self.config.layernorm_zero_centered_gamma
        return rms_norm(whole, self.weight, eps, is_centered)


class WholeNorm(MegatronModule):
    """RMSNorm over all heads of a projection; each tensor-parallel rank holds some of the heads.

    Args:
        num_heads: Total number of heads over all tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, num_heads: int, head_dim: int, eps: float
    ) -> None:
        super().__init__(config=config)
        self.size, self.eps = num_heads * head_dim, eps
        width = self.size // config.tensor_model_parallel_size
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(width, dtype=config.params_dtype, device=device)
        )
        # Megatron's marks of a sharded parameter: the gradient norm includes every rank's shard.
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim, self.weight.partition_stride = 0, 1  # type: ignore[attr-defined]

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalizes this rank's heads, (..., heads, head size)."""
        wide = heads.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        # Every rank's loss depends on this sum, so its gradient must also be summed over the ranks.
        squares = reduce_from_tensor_model_parallel_region(squares)
        squares = copy_to_tensor_model_parallel_region(squares)
        normed = self.weight * (wide * torch.rsqrt(squares / self.size + self.eps))
        return normed.to(heads.dtype).view(heads.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )
        return found


class _WholeNormOf:
    """Class for ModuleSpecs that builds a WholeNorm for queries."""

    def __new__(  # type: ignore[misc]  # as TorchNorm
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> WholeNorm:
        return WholeNorm(config, cls.num_heads(config), hidden_size, eps)

    @staticmethod
    def num_heads(config: TransformerConfig) -> int:
        return int(config.num_attention_heads)


class _WholeNormOfKeys(_WholeNormOf):
    @staticmethod
    def num_heads(config: TransformerConfig) -> int:
        return int(config.num_query_groups or config.num_attention_heads)


def norm_after(spec: ModuleSpec, shape: ModelShape) -> None:
    """Changes a torch layer's ModuleSpec to use the norms that `shape` describes."""
    layer = spec.submodules
    if shape.norms_after == "only":
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if shape.norms_after != "no":
        layer.self_attention = with_module(layer.self_attention, NormedAttention)
        layer.mlp = with_module(layer.mlp, NormedMlp)
    if not shape.whole_qk_norm:
        return
    layer.self_attention.submodules = dataclasses.replace(
        layer.self_attention.submodules, q_layernorm=_WholeNormOf, k_layernorm=_WholeNormOfKeys
    )
