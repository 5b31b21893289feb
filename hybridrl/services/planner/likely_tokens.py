"""Estimates the memory for sampling replay and score centering. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hybridrl.config.rules_sampling import num_likely
from hybridrl.config.schema import Config
from hybridrl.contracts.likely_tokens import ENTRY_BYTES

# Bytes of a likely token in training: three int64 indices, and six fp32 values from logits on.
TRAIN_BYTES = 3 * 8 + 6 * 4


@dataclass(frozen=True)
class LikelyBytes:
    """Largest sizes: of a sampled `token`, of a `step` in host memory, on a device in `train`."""

    token: int
    step: int
    train: int

    def as_json(self) -> dict[str, int]:
        """Returns the sizes by their keys in the report."""
        return {f"{name}_bytes": value for name, value in asdict(self).items()}


def likely_bytes(config: Config, vocab_size: int) -> LikelyBytes | None:
    """Returns the memory for likely tokens; None if the run records none."""
    if not (num := num_likely(config, vocab_size)):
        return None
    # The drawn token may be another one, and an entry marks the position.
    token = ENTRY_BYTES * (num + 2)
    samples = config.steps.prompts_per_step * config.steps.samples_per_prompt
    positions = config.train.micro_batch_tokens // config.train.cp
    train = TRAIN_BYTES * (num + 1) * positions
    return LikelyBytes(token, token * config.rollout.max_new_tokens * samples, train)
