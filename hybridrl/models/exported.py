"""What the config.json of an exported model says beyond the one that it was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from hybridrl.models.weights import Head


def exported_config(
    hf_config: Mapping[str, Any], head: Head, side_files: Path | None
) -> dict[str, Any]:
    """Returns the content of an exported model's config.json.

    A model with a value head is named as transformers' sequence classifier with 1 label, which
    scores the last token that is no padding. So it gets the tokenizer's padding token too, if the
    config names none: without one transformers scores one sequence at a time only.

    Args:
        hf_config: of the model that it was made of.
        head: of the exported model.
        side_files: folder with tokenizer files, if any.
    """
    model_type = hf_config.get("model_type")
    if head == "lm":
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        known = {} if named is None else {"architectures": [named]}
        return {**known, **{k: v for k, v in hf_config.items() if k not in known or v}}
    made = {key: value for key, value in hf_config.items() if key != "architectures"}
    made["num_labels"] = 1
    # Of a type that transformers has no classifier for, a name would be of a class that is not.
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if named is not None:
        made["architectures"] = [named]
    if made.get("pad_token_id") is None and side_files is not None:
        made["pad_token_id"] = _padding_token(side_files)
    return made


def _padding_token(folder: Path) -> int | None:
    """Returns the number of the padding token that tokenizer files name; None: they name none."""
    try:
        told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    named = told.get("pad_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = content.get("added_tokens") or []
    return next((int(one["id"]) for one in added if text and one["content"] == text), None)
