"""Qwen3.5 and 3.6, dense (0.8B to 27B): gated delta nets, with gated attention in every 4th layer.

Queries and keys of attention are normalized per head. Norms multiply by 1 + their weight, except
the norm inside the delta net. Positions of text are plain rotary positions, because text has the
same position in all three sections of `mrope_section`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_family, decoder_rows, decoder_shape, norm_row
from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import rope_parameters
from hybridrl.models.family import HfConfig, ModelShape, MoeShape, Row, RowKind
from hybridrl.models.mixers import DeltaShape
from hybridrl.models.mtp import mtp_rows

LINEAR, FULL = "linear_attention", "full_attention"
LOCAL, HF = "decoder.layers.{L}.self_attention.", "model.layers.{L}.linear_attn."
# transformers' Qwen3_5TextConfig
DEFAULTS = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
}
MROPE_KEYS = ("mrope_interleaved", "mrope_section")
# fmt: off
KEYS = frozenset({
    "attention_bias", "attn_output_gate", "full_attention_interval", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
})
# fmt: on


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Qwen3_5TextConfig."""
    require(hf_config, "mlp_only_layers", [], ([], ()))
    return hybrid_shape(hf_config)


def hybrid_shape(hf_config: HfConfig, moe: MoeShape | None = None) -> ModelShape:
    require(hf_config, "attention_bias", False, (False,))
    require(hf_config, "attn_output_gate", True, (True,))
    # Engines keep states in this type.
    require(hf_config, "mamba_ssm_dtype", "float32", ("float32",))
    kinds = layer_kinds(hf_config)
    sizes = decoder_shape(hf_config, qk_norm=True, kinds=(LINEAR, FULL), moe=moe)
    return replace(
        sizes,
        centered_norms=True,
        gated_attention=True,
        mixer=delta_shape(hf_config, kinds) if LINEAR in kinds else None,
    )


def layer_kinds(hf_config: HfConfig) -> list[str]:
    """Returns LINEAR or FULL for each layer."""
    num_layers, kinds = size(hf_config, "num_hidden_layers"), hf_config.get("layer_types")
    if kinds is None:
        every = size(hf_config, "full_attention_interval")
        return [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    is_list = isinstance(kinds, list | tuple) and all(kind in (LINEAR, FULL) for kind in kinds)
    if not is_list or len(kinds) != num_layers:
        raise refusal("layer_types", kinds, f"{num_layers} values {FULL} or {LINEAR}, or null")
    return list(kinds)


def delta_shape(hf_config: HfConfig, kinds: list[str]) -> DeltaShape:
    key_heads = size(hf_config, "linear_num_key_heads")
    value_heads = size(hf_config, "linear_num_value_heads")
    if value_heads % key_heads:
        allowed = f"a multiple of linear_num_key_heads = {key_heads}"
        raise refusal("linear_num_value_heads", value_heads, allowed)
    return DeltaShape(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=size(hf_config, "linear_key_head_dim"),
        value_dim=size(hf_config, "linear_value_head_dim"),
        kernel=size(hf_config, "linear_conv_kernel_dim"),
    )


def delta_rows(shape: ModelShape, is_grouped: bool = False) -> list[Row]:
    """Returns the weight rows of the gated delta nets.

    Args:
        is_grouped: Whether the checkpoint has two projections whose rows are grouped by key heads,
            as in Qwen3-Next, instead of one projection for each kind of output.
    """
    mixer = shape.mixer
    if not isinstance(mixer, DeltaShape):
        return []
    hidden, layers = shape.hidden_size, mixer.layers
    sections = (mixer.keys, mixer.keys, mixer.values)
    per_head = (mixer.value_heads,)

    def row(
        name: str, parts: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], kind: RowKind
    ) -> Row:
        return Row(f"{LOCAL}{name}", parts, shapes, kind, layers=layers)

    def grouped(name: str, group: tuple[int, ...]) -> Row:
        size = (mixer.key_heads * sum(group), hidden)
        own = row(f"linear_{name}.weight", (f"{HF}in_proj_{name}.weight",), (size,), "grouped")
        return replace(own, group=group)

    if is_grouped:
        per_key = mixer.value_heads // mixer.key_heads
        values = per_key * mixer.value_dim
        projections = [
            grouped("qkvz", (mixer.key_dim, mixer.key_dim, values, values)),
            grouped("ba", (per_key, per_key)),
        ]
    else:
        qkv = (f"{HF}in_proj_qkv.weight",) * 3
        projections = [
            row(
                "linear_qkvz.weight",
                (*qkv, f"{HF}in_proj_z.weight"),
                tuple((rows, hidden) for rows in (*sections, mixer.values)),
                "sections",
            ),
            row(
                "linear_ba.weight",
                (f"{HF}in_proj_b.weight", f"{HF}in_proj_a.weight"),
                ((mixer.value_heads, hidden),) * 2,
                "sections",
            ),
        ]
    return [
        *projections,
        row(
            "conv_weight",
            (f"{HF}conv1d.weight",) * 3,
            tuple((channels, 1, mixer.kernel) for channels in sections),
            "sections",
        ),
        row("A_log", (f"{HF}A_log",), (per_head,), "column"),
        row("dt_bias", (f"{HF}dt_bias",), (per_head,), "column"),
        replace(
            norm_row("self_attention.out_norm", "linear_attn.norm", mixer.value_dim), layers=layers
        ),
        row("linear_out.weight", (f"{HF}out_proj.weight",), ((hidden, mixer.values),), "row"),
    ]


def rows(shape: ModelShape) -> tuple[Row, ...]:
    own = (*decoder_rows(shape), *delta_rows(shape))
    if not shape.has_mtp:
        return own
    return (*own, *mtp_rows(shape, decoder_rows(replace(shape, mixer=None))))


def plain_positions(hf_config: HfConfig) -> dict[str, Any]:
    """Returns a config without the sections of multimodal positions, which text does not use."""
    rope, key = rope_parameters(hf_config)
    plain: Mapping[str, Any] = {name: rope[name] for name in rope if name not in MROPE_KEYS}
    return {**hf_config, **({key: plain} if rope else {})}


FAMILY = replace(
    decoder_family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        shape,
        KEYS,
        rows=rows,
        defaults=DEFAULTS,
        rotary_share=0.25,
        prepare=plain_positions,
    ),
    mtp_key="mtp_num_hidden_layers",
)
