"""Models with images: one process against transformers, layouts against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_images import FAMILIES, save_processor
from tiny_models import save_tiny_models

WORKER = str(Path(__file__).with_name("images_worker.py"))
ORDER = "tp-cp-ep-dp-pp"


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(one, marks=pytest.mark.full) for one in FAMILIES[1:])],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_tiny_models(root, (request.param,))
    folder = root / request.param
    save_processor(folder)
    run_ranks(1, WORKER, ["reference", str(folder)], timeout_s=200)
    return folder


def supported(model: Path, layouts: list[str]) -> list[str]:
    """Returns layouts that divide experts too, if there are any, and split no recurrence."""
    if model.name.startswith("qwen3_5"):
        layouts = [one for one in layouts if one.split(",")[2] == "1"]
    if not model.name.endswith("_moe"):
        return layouts
    return [f"{one},ep=2" if not one.startswith("1,2") else one for one in layouts]


@pytest.mark.dist
def test_images_have_the_gradients_of_one_process(model: Path, is_full: bool) -> None:
    layouts, towers = [f"2,1,1,1,{ORDER},full", f"1,2,1,1,{ORDER}", f"1,1,2,1,{ORDER}"], "trained"
    if is_full:
        layouts += [f"2,1,1,1,{ORDER}", f"1,2,1,1,{ORDER},full", f"1,1,1,1,{ORDER}"]
        towers = "trained,frozen"
    layouts = supported(model, layouts)
    run_ranks(2, WORKER, ["compare", str(model), towers, *layouts], timeout_s=300)


@pytest.mark.full
@pytest.mark.dist
def test_images_on_four_ranks(model: Path) -> None:
    layouts = [f"2,2,1,1,{ORDER}", f"2,1,1,1,{ORDER}", f"2,1,2,1,{ORDER}"]
    layouts = supported(model, layouts)
    run_ranks(4, WORKER, ["compare", str(model), "trained,frozen", *layouts], timeout_s=300)
