"""What the tests of models run, from the parameters of the tests themselves.

The page of models says nothing beyond this (tests/unit/test_models_page.py). Tests are called with
a recorder in place of the function that starts ranks, so that nothing is computed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parent / folder) for folder in ("dist", "contracts")]

import engine_cases
import test_images
import test_parity
from packaged import REFUSED_FAMILIES
from tiny_images import FAMILIES as WITH_IMAGES

AXES = ("tp", "pp", "cp", "vpp")
# Families of models in tiny_models.py that have another name there.
OTHER_NAMES = {"phi35": "phi3", "phi4mini": "phi3"}


def started(module: Any, family: str = "qwen3_vl") -> Iterator[tuple[int, list[str]]]:
    """Yields the number of ranks and the arguments of each start of ranks in a module's tests.

    Args:
        family: Family of the model, in tests that take one.
    """
    calls: list[tuple[int, list[str]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_ranks", lambda world, _, args, **__: calls.append((world, args)))
        for name, test in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(test):
                for values in parameters(test, family):
                    test(**values)
    yield from calls


def parameters(test: Any, family: str) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each case of a test, as `make test-full` runs it."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    fixtures = {"is_full": True, "models": Path("models"), "model": Path("models") / family}
    wanted = inspect.signature(test).parameters
    known = {name: value for name, value in fixtures.items() if name in wanted}
    choices = []
    for mark in marks:
        names, cases = mark.args
        names = [one.strip() for one in names.split(",")] if isinstance(names, str) else names
        rows = [getattr(case, "values", case if len(names) > 1 else (case,)) for case in cases]
        choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for chosen in product(*choices):
        yield {**known, **{key: value for one in chosen for key, value in one.items()}}


def layout_name(world: int, text: str) -> str:
    """Returns a layout's parallel sizes above 1, such as TP2 EP2; data parallelism if none is."""
    tp, pp, cp, vpp, _, *more = text.split(",")
    sizes = dict(zip(AXES, map(int, (tp, pp, cp, vpp)), strict=True))
    sizes |= {k: int(v) for k, _, v in (one.partition("=") for one in more) if v}
    found = [f"{axis.upper()}{size}" for axis, size in sizes.items() if size > 1]
    return " ".join(found) or f"DP{world}"


def layouts() -> dict[str, set[str]]:
    """Returns for each family the layouts in which gradients are compared with one process's."""
    found: dict[str, set[str]] = {}
    for world, (mode, folder, names, *texts) in started(test_parity):
        for name in names.split(",") if mode == "compare" else ():
            family = OTHER_NAMES.get(name.split("+")[0], name.split("+")[0])
            found.setdefault(family, set()).update(layout_name(world, text) for text in texts)
        del folder
    for family in WITH_IMAGES:
        for world, (mode, _, _, *texts) in started(test_images, family):
            own = {layout_name(world, text) for text in texts if mode == "compare"}
            found.setdefault(family, set()).update(own)
    return found


def compared() -> set[str]:
    """Returns the families whose logits and gradients are compared with transformers'."""
    names = (*test_parity.NAMES, *test_parity.OTHERS, *test_parity.WITH_EXPERTS, *WITH_IMAGES)
    return {OTHER_NAMES.get(name, name) for name in names}


def engines() -> dict[str, set[str]]:
    """Returns for each packaged engine the families that it generates with on CPU."""
    import experts_worker
    import packaged_worker

    found = {name: set(WITH_IMAGES) - set(refused) for name, refused in REFUSED_FAMILIES.items()}
    # Others in engine_cases.py are those of tests of one engine.
    models = {
        **engine_cases.PACKAGED_MODELS,
        **engine_cases.PACKAGED_EXPERT_MODELS,
        **engine_cases.PACKAGED_HYBRID_MODELS,
    }
    for name, model in models.items():
        found[name.partition("-")[0]].add(model["model_type"])
    worker_names = [name for cases in packaged_worker.CASES.values() for name, _ in cases]
    for engine, families in found.items():
        cases = [
            one for (own, _), c in packaged_worker.OF_ENGINE.items() if own == engine for one in c
        ]
        families |= {OTHER_NAMES.get(name, name) for name, *_ in cases}
        families |= {OTHER_NAMES.get(name, name) for name in worker_names}
    found["vllm"] |= {name for cases in experts_worker.CASES.values() for name, *_ in cases}
    return found
