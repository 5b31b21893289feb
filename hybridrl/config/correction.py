"""The section `algorithm.correction`: correction for samples of another policy. No torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.section import Section

Level = Literal["none", "token", "sequence", "geometric"]
"""How the ratio of two policies is computed: per token, as the product over a response, or as the geometric mean over a response."""

REJECT_MAX = {"none": 2.0, "token": 2.0, "sequence": 2.0, "geometric": 1.001}


class CorrectionConfig(Section):
    """Importance weights and rejection, based on the ratio k = old / behaviour: the probability under the policy at the start of the step, divided by the probability with which the engine sampled."""

    weight: Level = "none"
    """Level at which the ratio k = old / behaviour is computed as a weight that multiplies the objective. The default is 'none', as in the papers of the algorithms, or 'token' if steps.max_policy_lag is above 0 or the engine uses FP8 (rollout.quantization, rollout.kv_cache_dtype). The mismatch metrics are reported in either case."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Treatment of weights outside min and max: 'truncate' clamps them, 'mask' sets them to 0. The default, 'truncate', is TIS, which discards no sample."""
    max: float = Field(2.0, gt=0)
    """Upper bound on the weights. The default, 2, is common for TIS; IcePop masks weights above 5."""
    min: float = Field(0.0, ge=0)
    """Lower bound on the weights. The default, 0, has no effect, as in TIS; IcePop masks weights below 0.5."""
    reject: Level = "none"
    """Level at which the ratio k = old / behaviour is computed for rejection: tokens or responses whose k is below reject_min or above reject_max are rejected. The default is 'none', because rejection discards samples."""
    reject_max: float | None = Field(None, gt=0)
    """Largest ratio k that is not rejected. The default is 1.001 with reject 'geometric' and 2 otherwise; both values are from verl's rollout correction."""
    reject_min: float | None = Field(None, ge=0)
    """Smallest ratio k that is not rejected. The default is 1 / reject_max; 0 means no lower bound."""
    proximal: Literal["old", "behaviour"] = "old"
    """Policy in the denominator of the objective's ratio: 'old' or 'behaviour'. With the default, 'old', clipping limits only how far the policy moves within a step, whatever policy generated the samples."""

    @property
    def is_on(self) -> bool:
        """Whether weights or rejection change the loss; the proximal policy is not considered."""
        return self.weight != "none" or self.reject != "none"

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a ratio is computed over whole responses."""
        return not {self.weight, self.reject} <= {"none", "token"}

    @property
    def reject_bounds(self) -> tuple[float, float]:
        high = REJECT_MAX[self.reject] if self.reject_max is None else self.reject_max
        return 1 / high if self.reject_min is None else self.reject_min, high

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        of_levels = {"weight": ("bound", "max", "min"), "reject": ("reject_max", "reject_min")}
        for level, names in of_levels.items():
            for name in names:
                value, field = getattr(self, name), type(self).model_fields[name]
                if getattr(self, level) == "none" and value != field.get_default():
                    raise ValueError(f"{name}: no value, because correction.{level} is none")
        if self.min >= self.max:
            raise ValueError(f"min: less than correction.max ({self.max}), instead of {self.min}")
        low, high = self.reject_bounds
        if low >= high:
            raise ValueError(
                f"reject_min: less than correction.reject_max ({high}), instead of {low:g}; the "
                "default is 1 / reject_max"
            )
        if self.weight != "none" and self.proximal == "behaviour":
            raise ValueError(
                "weight: none, because with correction.proximal=behaviour the objective's ratio "
                "already includes the weight"
            )
        return self
