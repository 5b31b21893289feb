"""Rows of layers for multi-token prediction (MTP), and rules on training them. No torch.

Without training, MTP layers are only copied from the model's directory to exports
(hf/passed_over.py). With `train.mtp_coef`, the table of the policy contains them
(`ModelShape.has_mtp`), and checkpoints, optimizer states and exports follow. Engines and other
models never contain them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.errors import UserError
from hybridrl.models.family import Family, ModelShape, Row

MTP = "predictor."  # first part of the local names of all parameters
LAYER, HF_LAYER = "decoder.layers.{L}.", "model.layers.{L}."


def mtp_rows(shape: ModelShape, layer: Sequence[Row]) -> tuple[Row, ...]:
    """Returns the rows of an MTP layer with the names of Qwen3-Next and later models."""
    hidden = shape.hidden_size
    norms = {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "final_norm": "norm",
    }
    return (
        Row(f"{MTP}fc.weight", ("mtp.fc.weight",), ((hidden, 2 * hidden),), "replicated", "last"),
        *(
            Row(f"{MTP}{own}.weight", (f"mtp.{hf}.weight",), ((hidden,),), "replicated", "last")
            for own, hf in norms.items()
        ),
        *(
            replace(
                row,
                megatron=row.megatron.replace(LAYER, f"{MTP}layer."),
                parts=tuple(part.replace(HF_LAYER, "mtp.layers.0.") for part in row.parts),
                stage="last",
            )
            for row in layer
            if row.stage == "layer"
        ),
    )


def mtp_layer(shape: ModelShape) -> ModelShape:
    return replace(shape, num_layers=1, mixer=None, has_mtp=False)


def input_params(shape: ModelShape) -> int:
    """Returns the number of weights that join an embedding and a hidden state (`fc`)."""
    return 2 * shape.hidden_size**2


def mtp_rules(
    train: Any,
    has_policy: bool,
    is_adapted: bool,
    family: Family,
    shape: ModelShape,
    hf_config: Mapping[str, Any],
) -> Iterator[UserError]:
    """Yields the reasons why the model's MTP layer cannot be trained as `train.mtp_coef` says."""
    key, value, off = "train.mtp_coef", train.mtp_coef, "Set train.mtp_coef=0."
    if not value:
        return
    if not has_policy:
        yield UserError(key, value, "0 with an algorithm that does not train a policy", off)
        return
    if not family.mtp_key:
        allowed = f"0 with family {family.name}, whose MTP layers are kept but not trained"
        yield UserError(key, value, allowed, off)
        return
    num_layers = hf_config.get(family.mtp_key, 0)
    if num_layers != 1:
        allowed = f"0 with {family.mtp_key}={num_layers} in config.json; one layer can be trained"
        yield UserError(key, value, allowed, off)
    if is_adapted:
        yield UserError(key, value, "0 with lora.rank > 0, which freezes the layer", off)
    if train.cp > 1:
        allowed = "0 with train.cp > 1, because a position needs the next token"
        yield UserError(key, value, allowed, f"{off[:-1]}, or train.cp=1.")
    if train.pp > 1 and not shape.tied_embeddings:
        allowed = "0 with train.pp > 1 and untied embeddings, which the last stage does not hold"
        yield UserError(key, value, allowed, f"{off[:-1]}, or train.pp=1.")
    if train.share_prompts:
        allowed = "0 with train.share_prompts=true, because the token after a prompt differs"
        yield UserError(key, value, allowed, f"{off[:-1]}, or train.share_prompts=false.")
