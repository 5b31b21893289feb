"""Parameter groups and step counts of the optimizers that take the place of Megatron's Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class StepCounts:
    """Parameter groups, each with the number of its steps.

    Attributes:
        param_groups: The groups, with the step count `step` once a step was taken.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def count_step(self) -> None:
        """Counts a step of each group that has parameters."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups and the step count, without other states, as torch optimizers do."""
        groups = [
            {**group, "params": list(range(len(group["params"])))} for group in self.param_groups
        ]
        step = max((group.get("step", 0) for group in self.param_groups), default=0)
        for group in groups:
            group["step"] = step
        return {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the step counts of `state_dict`; other states are loaded one by one."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["step"] = int(loaded.get("step") or 0)
