"""Determines the token at which a reward model's score is read. No torch.

By default this is the last token, possibly the end token, as in transformers' sequence classifiers.
Older versions of hybridrl read the score one token earlier, at the hidden state from which the last
token was sampled. Checkpoints and exports from those versions are recognized, and keep that
position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from hybridrl.config.files import plain
from hybridrl.errors import ModelError
from hybridrl.models.hf.config_keys import end_tokens_of

ScoreToken = Literal["last", "before_last"]
LAST: Final = "last"
BEFORE_LAST: Final = "before_last"
KEY = "hybridrl_score_token"  # key in config.json that other programs ignore


def score_token(hf_config: Mapping[str, Any]) -> ScoreToken:
    """Returns the token at which this model's score is read; ModelError for an invalid value."""
    value = hf_config.get(KEY)
    if value is None:
        return BEFORE_LAST if is_old_export(hf_config) else LAST
    if value not in (LAST, BEFORE_LAST):
        raise ModelError(
            f"config.json: {KEY}",
            plain(value),
            f"{LAST} or {BEFORE_LAST}",
            f"Remove the key if hybridrl did not export the model. The score is then read at the "
            f"{LAST} token.",
        )
    return LAST if value == LAST else BEFORE_LAST


def is_old_export(hf_config: Mapping[str, Any]) -> bool:
    """Whether the model was exported by a hybridrl version that did not name the score token.

    Old exports contain `num_labels` in config.json; transformers writes `id2label` instead.
    """
    return KEY not in hf_config and "num_labels" in hf_config and "id2label" not in hf_config


def padding_token(hf_config: Mapping[str, Any]) -> int | None:
    """Returns the padding token, or None if config.json does not name it.

    transformers skips padding at the end of a text, and reads the score at the last token before
    it.
    """
    value = hf_config.get("pad_token_id")
    return value if isinstance(value, int) and value >= 0 else None


def score_notices(hf_config: Mapping[str, Any], path: str) -> list[str]:
    if is_old_export(hf_config):
        return [
            f"{path} looks like a reward model that an older hybridrl exported: its score is "
            f"read at the token before the last one, as in its training. Add "
            f'"{KEY}": "{BEFORE_LAST}" to its config.json to confirm this, or "{LAST}" to read at '
            "the last token, as transformers does"
        ]
    pad = padding_token(hf_config)
    if score_token(hf_config) == LAST and pad is not None and pad in end_tokens_of(hf_config):
        return [
            f"{path}: pad_token_id {pad} is the end token too, so the score is read before the end "
            "token, as in transformers"
        ]
    return []
