"""Defaults that depend on the algorithm's name, for algorithms with rollouts. No torch."""

from __future__ import annotations

from typing import Any

# Defaults for each name; docs/algorithms.md gives their sources.
PRESETS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"normalize_std": False, "aggregate": "fixed"},
    "dapo": {"clip_high": 0.28, "overlong_max_tokens": 20480, "max_resampling": 10},
    "gspo": {
        "objective": "sequence_clip",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregate": "sequence_mean",
    },
    "gmpo": {
        "objective": "geometric_mean",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregate": "sequence_mean",
    },
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "sapo": {"objective": "sapo", "aggregate": "sequence_mean"},
    "clip_cov": {"cov_clip_fraction": 2e-4, "clip_low": 1.0, "clip_high": 1.0},
    "kl_cov": {"objective": "ratio", "cov_kl_fraction": 2e-4},
    "rloo": {
        "baseline": "leave_one_out",
        "normalize_std": False,
        "objective": "plain",
        "aggregate": "fixed",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce_pp_baseline": {
        "normalize_std": False,
        "whiten_advantages": True,
        "kl_estimator": "k2",
    },
    "remax": {
        "baseline": "greedy",
        "normalize_std": False,
        "objective": "plain",
        "aggregate": "fixed",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "opo": {
        "baseline": "length_weighted",
        "normalize_std": False,
        "objective": "plain",
        "aggregate": "fixed",
    },
    "gpg": {"normalize_std": False, "objective": "plain", "rescale_informative": True},
    "pass_at_k": {"baseline": "pass_at_k", "clip_high": 0.28},
    "gdpo": {"normalize_parts": True, "whiten_advantages": True},
}
CRITIC_PRESETS: dict[str, dict[str, Any]] = {
    "vapo": {
        "gae_length_alpha": 0.05,
        "critic_gae_lambda": 1.0,
        "clip_high": 0.28,
        "positive_lm_coef": 0.1,
    }
}
