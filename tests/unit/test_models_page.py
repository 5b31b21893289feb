"""The page of models says only what tests and results show."""

from __future__ import annotations

from pathlib import Path

from covered_models import compared, engines, layouts
from documented import documentation_script

from hybridrl.models.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_every_layout_and_engine_on_the_page_is_that_of_a_test() -> None:
    made = documentation_script("models")
    assert made.RAN.keys() == FAMILIES.keys() == compared() & FAMILIES.keys()
    tested, served = layouts(), engines()
    for family, ran in made.RAN.items():
        assert ran.layouts and set(ran.layouts) <= tested[family], family
        assert set(ran.engines) == {one for one, families in served.items() if family in families}


def test_every_run_on_gpus_has_a_result() -> None:
    for family, ran in documentation_script("models").RAN.items():
        if ran.on_gpus is not None:
            assert ran.on_gpus.case in (ROOT / ran.on_gpus.file).read_text(), family


def test_page_is_up_to_date() -> None:
    made = documentation_script("models")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run python docs/scripts/models.py"
