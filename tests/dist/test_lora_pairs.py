"""LoRA adapters from every training layout into every engine; the checks: lora_pairs_worker.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import make_reference
from launch import run_ranks
from lora_pairs_worker import MODEL
from lora_worker import peft_folder
from packaged import PACKAGED

from hybridrl.models.adapters.rows import target_names
from hybridrl.models.family import resolve_family

WORKER = str(Path(__file__).with_name("lora_pairs_worker.py"))
ENGINES = [*PACKAGED, "hf"]
# Sizes of tp, pp and cp by the number of ranks; the rest is data-parallel.
LAYOUTS = {
    1: ["1,1,1"],
    2: ["2,1,1", "1,2,1", "1,1,2", "1,1,1"],
    4: ["2,2,1", "2,1,2", "2,1,1"],
}


def pairs(engine: str, num_ranks: int) -> list[str]:
    """Returns all pairs of a training layout and an engine's layout in a world.

    In half of them, with `peer`, ranks read each other's memory; in the others they send messages.
    """
    sizes = [1] if engine == "hf" else [tp for tp in (1, 2) if tp <= num_ranks]
    return [
        f"{layout}>{tp}" + ",peer" * (num_ranks > 1 and (place + tp) % 2)
        for place, layout in enumerate(LAYOUTS[num_ranks])
        for tp in sizes
    ]


def cases() -> Iterator[Any]:
    """Yields an engine and a world."""
    for engine in ENGINES:
        name = engine if isinstance(engine, str) else engine.values[0]
        marks = () if isinstance(engine, str) else engine.marks
        for num_ranks in LAYOUTS:
            marked = (*marks, pytest.mark.full)
            yield pytest.param(name, num_ranks, marks=marked, id=f"{name}-{num_ranks}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "num_ranks"), cases())
def test_adapters_reach_the_engine_in_every_pair_of_layouts(
    engine: str, num_ranks: int, tmp_path: Path
) -> None:
    reference = make_reference(MODEL)
    reference.save_pretrained(tmp_path / "base")
    config = reference.config.to_dict()
    family = resolve_family(None, config)
    peft_folder(tmp_path / "base", tmp_path / "peft", target_names(family, family.shape(config)))
    arguments = [str(tmp_path), engine, *pairs(engine, num_ranks)]
    run_ranks(num_ranks, WORKER, arguments, timeout_s=1200)


def test_there_are_thirty_pairs_and_more() -> None:
    names = [one if isinstance(one, str) else one.values[0] for one in ENGINES]
    every = {
        (name, num_ranks, pair.removesuffix(",peer"))
        for name in names
        for num_ranks in LAYOUTS
        for pair in pairs(name, num_ranks)
    }
    assert len(every) >= 30, len(every)
