"""What the name of a benchmark's case says: the model, how it trains and how it generates.

A name is MODEL/TRAIN or MODEL/TRAIN/GEN. MODEL is a file benchmarks/models/MODEL.json, or
qwen2.5-MODEL.json. TRAIN is training sizes, as tp2dp2 or dp2ep2, GEN the sizes of an engine
replica, as tp1 or tp2ep2; with apart- before them the replicas are on GPUs of their own, one, or
as many as dp says: apart-dp2tp1.
"""

from __future__ import annotations

import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

APART = "apart-"
SIZES = re.compile(r"(etp|ep|tp|vpp|pp|cp|dp)(\d+)")
# The axes whose product is the number of GPUs; experts are dealt over the ranks of these.
RANKS = ("tp", "pp", "cp", "dp")


@dataclass(frozen=True)
class CaseName:
    """A case, as its name says; `is_apart` if `num_apart` replicas are on ranks of their own."""

    model: Path
    train: Mapping[str, int]
    dp: int
    rollout: Mapping[str, int]
    is_apart: bool = False
    num_apart: int = 1

    @property
    def num_train_ranks(self) -> int:
        return self.dp * math.prod(self.train.get(axis, 1) for axis in RANKS if axis != "dp")

    @property
    def num_ranks(self) -> int:
        apart = self.num_apart * self.rollout["tp"] if self.is_apart else 0
        return self.num_train_ranks + apart

    @property
    def placement(self) -> dict[str, str]:
        """The section `placement`; empty where all ranks train and generate."""
        if not self.is_apart:
            return {}
        trains, all_ranks = self.num_train_ranks, self.num_ranks
        return {"policy": f"0-{trains - 1}", "rollout": f"{trains}-{all_ranks - 1}"}

    @property
    def has_replicas(self) -> bool:
        """Whether some rank has the same parameters as another."""
        return self.dp * self.train.get("cp", 1) > 1


def options_of(arguments: Namespace) -> dict[str, Any]:
    """Returns the options that the processes of a case need to know."""
    others = ("cases", "out", "models", "case_file")
    return {name: value for name, value in vars(arguments).items() if name not in others}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a model's decoder, which a model with a vision tower may nest."""
    found: dict[str, Any] = config.get("text_config", config)
    return found


def with_num_layers(model: str | Path, num_layers: int | None, folder: str | Path) -> str:
    """Writes a model's config.json with so many layers into a folder; returns its path."""
    config = json.loads(Path(model).read_text())
    if num_layers is not None:
        text_of(config)["num_hidden_layers"] = num_layers
    file = Path(folder) / "model.json"
    file.write_text(json.dumps(config))
    return str(file)


def parse_case(case: str, models: Path, example: str) -> CaseName:
    """Returns what a case's name says; ends the program if it has other parts than `example`."""
    model, *parts = case.split("/")
    is_apart = len(parts) > 1 and parts[1].startswith(APART)
    parts = [part.removeprefix(APART) if index else part for index, part in enumerate(parts)]
    layouts = [dict((axis, int(size)) for axis, size in SIZES.findall(part)) for part in parts]
    whole = ["".join(f"{axis}{size}" for axis, size in SIZES.findall(part)) for part in parts]
    known_axes = {"tp", "ep", "dp"} if is_apart else {"tp", "ep"}
    is_rollout = len(layouts) < 2 or {"tp"} <= set(layouts[1]) <= known_axes
    if len(parts) != example.count("/") or whole != parts or "" in parts or not is_rollout:
        form = "/".join(("MODEL", "TRAIN", "GEN")[: example.count("/") + 1])
        sys.exit(f"case {case!r}: expected {form}, e.g. {example}")
    files = [models / f"{family}{model}.json" for family in ("", "qwen2.5-")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        known = ", ".join(sorted(p.stem for p in models.glob("*.json")))
        sys.exit(f"case {case!r}: no {files[0]}; there are {known}")
    train, rollout = layouts[0], layouts[1] if len(layouts) > 1 else {}
    axes = {axis: size for axis, size in train.items() if axis != "dp"}
    replicas = rollout.pop("dp", 1)
    return CaseName(file, axes, train.get("dp", 1), rollout, is_apart, replicas)
