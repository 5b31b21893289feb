"""Rules on sampling replay and score centering, which use recorded likely tokens. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.rollout.registry import ENGINES, offered_engines

REPLAY, CENTERING = "algorithm.sampling_replay", "algorithm.score_centering"
# Number of most probable tokens for score centering without truncation. The others are modelled by
# the trainer's distribution; with 64 tokens they have little probability.
CENTERED_TOKENS = 64


def replays_sampling(config: Config) -> bool:
    """Whether the trainer computes probabilities over the tokens that the engine could draw."""
    algorithm = config.algorithm
    return isinstance(algorithm, PolicyGradientConfig) and algorithm.sampling_replay == "rollout"


def centers_scores(config: Config) -> bool:
    return isinstance(config.algorithm, PolicyGradientConfig) and config.algorithm.score_centering


def num_likely(config: Config, vocab_size: int) -> int:
    """Returns the number of most probable tokens that the engine records for each token."""
    num = CENTERED_TOKENS if centers_scores(config) else 0
    return min(config.rollout.top_k if replays_sampling(config) else num, vocab_size)


def sampling_rules(config: Config) -> Iterator[UserError]:
    """Yields why the engine cannot record tokens, or the trainer cannot use them."""
    rollout, engine = config.rollout, config.rollout.engine
    used = [
        (key, value, off)
        for key, value, off, is_on in (
            (REPLAY, "rollout", f"{REPLAY}=off", replays_sampling(config)),
            (CENTERING, "true", f"{CENTERING}=false", centers_scores(config)),
        )
        if is_on
    ]
    for key, value, off in used:
        without = off.partition("=")[2]
        if not ENGINES[engine].max_likely:
            able = " or ".join(name for name in offered_engines() if ENGINES[name].max_likely)
            allowed = f"{without} with engine {engine!r}, which does not record likely tokens"
            yield UserError(key, value, allowed, f"Set rollout.engine={able}, or {off}.")
        if config.agent.is_on:
            reason = "the likely tokens of conversations with several branches are not recorded"
            allowed = f"{without} with the section agent, because {reason}"
            yield UserError(key, value, allowed, f"Set {off}.")
        if config.numerics.is_exact:
            allowed = f"{without} with numerics.match=exact, which has no difference to correct"
            yield UserError(key, value, allowed, f"Set {off}, or numerics.match=close.")
    most = ENGINES[engine].max_likely
    if replays_sampling(config) and most and not 0 < rollout.top_k <= most:
        allowed = f"1 to {most} with {REPLAY}=rollout, which bounds the tokens to record"
        remedy = "Set rollout.top_k=512: top-p then chooses among the 512 most probable tokens."
        yield config.refused("rollout.top_k", allowed, remedy)
    is_truncated = rollout.top_k > 0 or rollout.top_p < 1
    if centers_scores(config) and is_truncated and not replays_sampling(config):
        knobs = f"rollout.top_k={rollout.top_k} and rollout.top_p={rollout.top_p:g}"
        reason = "because engine and trainer must have the same tokens to choose from"
        allowed = f"false with {knobs} unless {REPLAY}=rollout, {reason}"
        remedy = f"Set {REPLAY}=rollout, or rollout.top_k=0 and rollout.top_p=1."
        yield UserError(CENTERING, "true", allowed, remedy)
