"""Recipes of examples/recipes: they fit, and their headers say what the planner says."""

from __future__ import annotations

import json
import runpy
from math import prod
from pathlib import Path

import pytest

from hybridrl.config.layout import CHOSEN_KEYS
from hybridrl.config.load import load_config
from hybridrl.models.family import read_model
from hybridrl.models.weights import hf_shapes

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "scripts" / "recipes.py"))
FOLDER = ROOT / "examples" / "recipes"
RECIPES = [(model, size) for model, (_, sizes) in SCRIPT["NAMES"].items() for size in sizes]
# Numbers of parameters of the published weights, the input embedding once where it is shared;
# those of DeepSeek-V3 and GLM without the layer that predicts a further token.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "moonlight-16b-a3b": 15_960_110_208,
    "qwen2-57b-a14b": 57_408_658_944,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.7": 352_797_829_024,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name sizes of models from there


def recipe(model: str, size: int) -> Path:
    return FOLDER / f"{model}_{size}gpu.yaml"


@pytest.mark.parametrize("model", PARAMETERS)
def test_models_have_as_many_parameters_as_those_published(model: str) -> None:
    content = json.loads((FOLDER / "models" / model / "config.json").read_text())
    shapes = hf_shapes(*read_model(None, content))
    assert sum(prod(shape) for shape in shapes.values()) == PARAMETERS[model]


@pytest.mark.parametrize(("model", "size"), RECIPES)
def test_layout_of_a_recipe_is_written_and_one_that_the_search_takes(model: str, size: int) -> None:
    """Every key of the layout is written, so the search judges that layout alone."""
    config = load_config(recipe(model, size), [])
    for key in CHOSEN_KEYS:
        section, _, name = key.partition(".")
        assert name in getattr(config, section).model_fields_set
    assert SCRIPT["best"](config, size) is not None


def judge(model: str, size: int) -> None:
    """`planned` raises where a recipe breaks a rule or does not fit."""
    found = SCRIPT["planned"](load_config(recipe(model, size), []), size)
    assert recipe(model, size).read_text().startswith(SCRIPT["header"](model, size, found))


@pytest.mark.parametrize(("model", "size"), [one for one in RECIPES if one[1] == 8])
def test_header_of_a_recipe_for_a_node_says_what_plan_says(model: str, size: int) -> None:
    judge(model, size)


@pytest.mark.full
@pytest.mark.parametrize(("model", "size"), [one for one in RECIPES if one[1] != 8])
def test_header_of_a_recipe_says_what_plan_says(model: str, size: int) -> None:
    judge(model, size)


def test_page_lists_the_recipes() -> None:
    assert SCRIPT["PAGE"].read_text(encoding="utf-8") == SCRIPT["page"]()
