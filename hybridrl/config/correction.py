"""The section `algorithm.correction`: off-policy correction for samples that another policy drew.
No torch.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.section import Section

Level = Literal["none", "token", "sequence", "geometric"]
"""Unit over which the ratio of two policies is taken: one token, the product over a response, or
its geometric mean.
"""

REJECT_MAX = {"none": 2.0, "token": 2.0, "sequence": 2.0, "geometric": 1.001}


class CorrectionConfig(Section):
    """Importance weights and rejection by the ratio k = old / behaviour: the policy at the start of
    the step over the policy that the engine sampled from.
    """

    weight: Level = "none"
    """Level of k by which the objective is multiplied. The default 'none' keeps every algorithm as in its paper; with steps.max_policy_lag above 0 the default is 'token'. The mismatch is measured either way."""
    bound: Literal["truncate", "mask"] = "truncate"
    """How weights outside min and max are treated: 'truncate' clamps them, 'mask' sets them to 0. The default 'truncate' is TIS, which loses no sample."""
    max: float = Field(2.0, gt=0)
    """Largest weight. The default 2 is usual for TIS; IcePop masks above 5."""
    min: float = Field(0.0, ge=0)
    """Smallest weight. The default 0 is no bound, as in TIS; IcePop masks below 0.5."""
    reject: Level = "none"
    """Level of k at which samples are rejected if k is outside reject_min and reject_max. The default is 'none', because rejection loses samples."""
    reject_max: float | None = Field(None, gt=0)
    """Largest k that is kept. The default is 2, and 1.001 for geometric; both are from verl's rollout correction."""
    reject_min: float | None = Field(None, ge=0)
    """Smallest k that is kept. The default is 1 / reject_max; 0 is no bound."""
    proximal: Literal["old", "behaviour"] = "old"
    """Policy in the denominator of the objective's ratio. The default 'old' is decoupled from the behaviour policy, so that clipping bounds only this step."""

    @property
    def is_on(self) -> bool:
        """Whether weights or rejection change the loss; the proximal policy is not considered."""
        return self.weight != "none" or self.reject != "none"

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a ratio is taken over whole responses."""
        return not {self.weight, self.reject} <= {"none", "token"}

    @property
    def reject_bounds(self) -> tuple[float, float]:
        """Smallest and largest k that is kept."""
        high = REJECT_MAX[self.reject] if self.reject_max is None else self.reject_max
        return 1 / high if self.reject_min is None else self.reject_min, high

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for level, names in (
            ("weight", ("bound", "max", "min")),
            ("reject", ("reject_max", "reject_min")),
        ):
            for name in names:
                value, field = getattr(self, name), type(self).model_fields[name]
                if getattr(self, level) == "none" and value != field.get_default():
                    raise ValueError(
                        f"correction.{name}: no value while correction.{level} is none, not {value}"
                    )
        if self.min >= self.max:
            raise ValueError(f"correction.min: below correction.max = {self.max}, not {self.min}")
        low, high = self.reject_bounds
        if low >= high:
            raise ValueError(
                f"correction.reject_min: below correction.reject_max = {high}, not {low:g}; "
                "without reject_min, reject_max must be above 1"
            )
        if self.weight != "none" and self.proximal == "behaviour":
            raise ValueError(
                f"correction.weight: none with correction.proximal behaviour, not {self.weight}: "
                "the objective's ratio already includes the weight"
            )
        return self
