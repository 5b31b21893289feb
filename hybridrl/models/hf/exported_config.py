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

from hybridrl.models.hf.config_keys import end_tokens_of
from hybridrl.models.score_token import KEY, LAST, ScoreToken
from hybridrl.models.weights import Head

SPARE = ("pad", "reserved", "unused", "unk")
"""What the names of special tokens say that may stand for padding, the best first."""


def exported_config(
    hf_config: Mapping[str, Any],
    head: Head,
    side_files: Path | None,
    score_token: ScoreToken = LAST,
) -> dict[str, Any]:
    """Returns the content of an exported model's config.json.

    A model with a value head is named as transformers' sequence classifier with 1 label, which
    scores the last token that is no padding. So its padding token must not be an end token, as it
    is in many tokenizers: transformers would read the score before the end. Another special token
    takes its place then, in the tokenizer's files too (directory.py). Where there is none,
    no padding token is named, and transformers scores one text at a time only.

    Args:
        hf_config: of the model that it was made of.
        head: of the exported model.
        side_files: folder with tokenizer files, if any.
        score_token: Token of a text at which the score of a value head is read.
    """
    model_type = hf_config.get("model_type")
    if head == "lm":
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        known = {} if named is None else {"architectures": [named]}
        return {**known, **{k: v for k, v in hf_config.items() if k not in known or v}}
    made = {key: value for key, value in hf_config.items() if key != "architectures"}
    made["num_labels"] = 1
    made[KEY] = score_token
    # Of a type that transformers has no classifier for, a name would be of a class that is not.
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if named is not None:
        made["architectures"] = [named]
    made["pad_token_id"] = _padding_token(hf_config, side_files)
    return made


def _padding_token(hf_config: Mapping[str, Any], folder: Path | None) -> int | None:
    """Returns the number of a token that may stand for padding: that of the config, that of the
    tokenizer, or a spare special token, if it ends no text; None if there is none.
    """
    told = _read(folder, "tokenizer_config.json")
    added = {
        _text(one): one["id"]
        for one in _read(folder, "tokenizer.json").get("added_tokens") or []
        if isinstance(one.get("id"), int)
    }
    ends = {*end_tokens_of(hf_config), *end_tokens_of(_read(folder, "generation_config.json"))}
    ends.add(added.get(_text(told.get("eos_token"))))
    spare = [
        number
        for word in SPARE
        for text, number in added.items()
        if text is not None and word in text.lower()
    ]
    size = hf_config.get("vocab_size")
    candidates = [hf_config.get("pad_token_id"), added.get(_text(told.get("pad_token"))), *spare]
    for number in candidates:
        if number is not None and number not in ends and (size is None or 0 <= number < size):
            return int(number)
    return None


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    """Returns the content of a JSON file; nothing if there is none."""
    if folder is None:
        return {}
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str | None:
    """Returns the text of a token that a tokenizer's file names, plainly or with its traits."""
    return token.get("content") if isinstance(token, dict) else token
