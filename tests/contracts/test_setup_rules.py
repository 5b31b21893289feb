"""What a Trainer made from Python refuses before it builds its parts, as the command line does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from hybridrl.config.load import load_config_dict
from hybridrl.config.placement import Machines
from hybridrl.errors import ConfigError
from hybridrl.loop.setup import check_rules

REFUSED = ["train.moe.bias_update_rate"]


@pytest.mark.parametrize(
    ("name", "refused"), [("qwen3_moe", REFUSED), ("qwen3", REFUSED), ("deepseek_v3", [])]
)
def test_bias_update_is_refused_where_routers_have_no_bias(
    name: str, refused: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "config.json"
    folder.write_text(json.dumps(tiny_model(name).config.to_dict()))
    content: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"init": str(folder)},
        "algorithm": {"name": "grpo"},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 16},
        "steps": {"samples_per_prompt": 8},
        "train": {"moe": {"bias_update_rate": 0.001}},
    }
    config = load_config_dict(content, [])
    try:
        check_rules(config, Machines(1))
    except ConfigError as error:
        found = [violation.name for violation in error.violations]
    else:
        found = []
    assert found == refused
