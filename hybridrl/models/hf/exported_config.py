"""Creates the config.json of an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from hybridrl.config.wrapped_models import has_images, without_wrapper, wrapped
from hybridrl.models.hf.config_keys import QUANTIZATION, end_tokens_of
from hybridrl.models.score_token import KEY, LAST, ScoreToken
from hybridrl.models.weights import Head

SPARE = ("pad", "reserved", "unused", "unk")
"""Words in the names of special tokens that can serve as padding token, best first."""


def exported_config(
    hf_config: Mapping[str, Any],
    head: Head,
    side_files: Path | None,
    score_token: ScoreToken = LAST,
    is_wrapped: bool = False,
) -> dict[str, Any]:
    """Returns the config.json of an exported model.

    transformers loads a model with a value head as a sequence classifier with 1 label, which scores
    the last token that is not padding. In many tokenizers, the padding token is also an end token;
    transformers would then read the score before the end token. Therefore another special token
    becomes the padding token, here and in the tokenizer's files (directory.py). If there is no
    unused special token, no padding token is set, and transformers can score only one text at a
    time.

    Exported weights are never quantized, so `quantization_config` is left out.

    Args:
        is_wrapped: Whether the export contains the other parts of a multimodal model.
    """
    if is_wrapped or has_images(hf_config):
        return wrapped(hf_config)
    plain = without_wrapper(hf_config)
    hf_config = {key: value for key, value in plain.items() if key != QUANTIZATION}
    model_type = hf_config.get("model_type")
    if head == "lm":
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        known = {} if named is None else {"architectures": [named]}
        return {**known, **{k: v for k, v in hf_config.items() if k not in known or v}}
    exported = {key: value for key, value in hf_config.items() if key != "architectures"}
    exported["num_labels"] = 1
    exported[KEY] = score_token
    # transformers has sequence classifiers only for some model types.
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if named is not None:
        exported["architectures"] = [named]
    exported["pad_token_id"] = _padding_token(hf_config, side_files)
    return exported


def _padding_token(hf_config: Mapping[str, Any], folder: Path | None) -> int | None:
    """Returns the config's or tokenizer's padding token, or an unused one; no end token."""
    tokenizer = _read(folder, "tokenizer_config.json")
    added = {
        _text(one): one["id"]
        for one in _read(folder, "tokenizer.json").get("added_tokens") or []
        if isinstance(one.get("id"), int)
    }
    ends = {*end_tokens_of(hf_config), *end_tokens_of(_read(folder, "generation_config.json"))}
    ends.add(added.get(_text(tokenizer.get("eos_token"))))
    spare = [
        number
        for word in SPARE
        for text, number in added.items()
        if text is not None and word in text.lower()
    ]
    size = hf_config.get("vocab_size")
    padding = added.get(_text(tokenizer.get("pad_token")))
    candidates = [hf_config.get("pad_token_id"), padding, *spare]
    for number in candidates:
        if number is not None and number not in ends and (size is None or 0 <= number < size):
            return int(number)
    return None


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    if folder is None:
        return {}
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str | None:
    """Returns a token's text; tokenizer files store it as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token
