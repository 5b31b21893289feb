"""Reports the level of the optimizer state, its costs, and those of other levels. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridrl.config.rules_optimizer import LEVEL_KEY, LEVELS, level_name, optimizer_rules
from hybridrl.config.schema import Config
from hybridrl.services.planner.alike import fullest_rank, memory_alike
from hybridrl.services.planner.fit import with_margin
from hybridrl.services.planner.hardware import Assumptions
from hybridrl.services.planner.phase_memory import (
    FP32_BYTES,
    MOMENT_BYTES,
    RoleModel,
    itemsize_of,
    state_bytes,
)
from hybridrl.services.planner.text import memory_size
from hybridrl.services.planner.times import adam_s

MEANINGS = {
    "device": "fp32 masters and fp32 moments on the GPU",
    "low_precision": "16-bit remainders of masters and bf16 moments on the GPU",
    "host": "16-bit remainders of masters and bf16 moments in host memory, copied through the GPU "
    "in pieces during the step",
}


def optimizer_report(
    config: Config, roles: Sequence[RoleModel], world_size: int, assumed: Assumptions | None
) -> dict[str, Any]:
    """Returns the level, its bytes per parameter and, for a known cluster, all allowed levels."""
    used = level_name(config.train)
    report: dict[str, Any] = {
        "optimizer": config.train.optimizer,
        "level": used,
        "state_bytes_per_parameter": state_bytes(config, itemsize_of(config, assumed is not None)),
        "gradient_dtype": config.train.gradient_dtype,
        "levels": [],
    }
    if assumed is None:
        return report
    for name, level in LEVELS.items():
        other = config.with_values({LEVEL_KEY: name})
        if name != used and list(optimizer_rules(other, "bfloat16")):
            continue
        held = fullest_rank(other, roles, world_size)
        memory = memory_alike(other, held, world_size, assumed)
        needed, updated = with_margin(memory.least), sum(one.num_updated for one in held.models)
        found = {
            "level": name,
            "train_peak_bytes": memory.train,
            "needed_bytes": needed,
            "fits": needed <= assumed.gpu_memory_bytes,
            "host_bytes": memory.host_state,
            "step_s": adam_s(level, updated, assumed),
        }
        report["levels"].append(found)
    return report


def optimizer_lines(report: dict[str, Any]) -> list[str]:
    used, levels = report["level"], {one["level"]: one for one in report["levels"]}
    if report["optimizer"] == "muon":
        return _muon_lines(report)
    meaning = MEANINGS[used]
    if report["state_bytes_per_parameter"] == 2 * FP32_BYTES:
        meaning = "fp32 moments"
    size = f"{report['state_bytes_per_parameter']} bytes per parameter"
    lines = [f"optimizer {used}: {meaning}, {size}"]
    for name, one in levels.items():
        where = f", {memory_size(one['host_bytes'])} of host memory" if one["host_bytes"] else ""
        said = "fits" if one["fits"] else "does not fit"
        lines.append(
            f"         {name}: at most {memory_size(one['train_peak_bytes'])} of a GPU in training"
            f"{where}, {one['step_s']:.2g} s an optimizer step; {said}"
        )
    return lines


def _muon_lines(report: dict[str, Any]) -> list[str]:
    size = report["state_bytes_per_parameter"]
    masters = "" if size == FP32_BYTES else "fp32 masters and "
    lines = [
        f"optimizer muon: {masters}fp32 momentum on the GPU, {size} bytes per parameter of a "
        f"matrix; AdamW for others, {size + MOMENT_BYTES} bytes"
    ]
    for one in report["levels"]:
        said = "fits" if one["fits"] else "does not fit"
        lines.append(
            f"         at most {memory_size(one['train_peak_bytes'])} of a GPU in training; {said}"
        )
    return lines
