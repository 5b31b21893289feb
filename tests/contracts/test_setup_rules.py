"""What a Trainer made from Python refuses before it builds its parts, as the command line does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_model

from hybridrl.config.load import load_config_dict
from hybridrl.config.placement import Machines
from hybridrl.errors import ConfigError
from hybridrl.loop.rollout_setup import report_copies
from hybridrl.loop.setup import check_rules
from hybridrl.models.weights import RankLayout, Region
from hybridrl.rollout.scripted import ScriptedEngine, uniform_script

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
        check_rules(config, Machines(1), trains=True)
    except ConfigError as error:
        found = [violation.name for violation in error.violations]
    else:
        found = []
    assert found == refused


@pytest.mark.parametrize("is_shareable", [True, False])
def test_parameters_that_lie_twice_in_memory_are_told(is_shareable: bool) -> None:
    box = ((0, 4), (0, 3))
    parts = {
        side: RankLayout(
            tuple(Region(hf, box, side + hf, box) for hf in ("a", "b")),
            {side + hf: (4, 3) for hf in ("a", "b")},
        )
        for side in ("trainer", "engine")
    }
    engine = ScriptedEngine(uniform_script(8), shapes={"a": (4, 3)})
    engine.shared = frozenset({"enginea"})  # type: ignore[attr-defined]
    engine.layout = lambda: parts["engine"]  # type: ignore[method-assign]
    world: Any = SimpleNamespace(gather_objects=lambda value: [0, value])
    shard: Any = SimpleNamespace(layout=parts["trainer"]) if is_shareable else None
    said: list[str] = []
    report_copies(world, shard, engine, said.append)
    assert len(said) == is_shareable
    assert not is_shareable or "up to 1 matrices" in said[0]
    said.clear()
    engine.shared = frozenset({"enginea", "engineb"})  # type: ignore[attr-defined]
    report_copies(world, shard, engine, said.append)
    assert said == []
