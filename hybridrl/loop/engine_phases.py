"""Switches between training and rollout, and checks the engine against the trainer. Collective.

`EnginePhases.check` detects an engine that has the right weights but uses them differently, for
example with other positions, norms, heads or precision. It first compares each parameter with the
trainer's. Then every replica generates responses to a few fixed prompts, and the trainer computes
the log-probabilities of the generated tokens for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from hybridrl.config.schema import Config
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.contracts.prompts import Content
from hybridrl.contracts.ragged import joined_blobs
from hybridrl.generation.sampler import Sampler
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.memory.phases import Phase
from hybridrl.loop.journal import Journal
from hybridrl.loop.position import Position
from hybridrl.roles.policy import Policy
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.rollout.registry import ENGINES
from hybridrl.training.mismatch import bounds_of

PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 16, 8, 4


class EngineDiffersError(RuntimeError):
    """The engine has the same weights as the trainer but computes different log-probabilities."""


class EnginePhases:
    """Switches between training and rollout. `is_checked`: whether the engine was compared."""

    def __init__(
        self,
        *,
        config: Config,
        hybrid_engine: HybridEngine,
        sampler: Sampler,
        policy: Policy,
        position: Position,
        journal: Journal,
    ) -> None:
        self._config, self._hybrid_engine, self._sampler = config, hybrid_engine, sampler
        self._policy, self._position, self._journal = policy, position, journal
        self.is_checked = False
        hybrid_engine.before_change = journal.note_peak

    @property
    def is_rollout(self) -> bool:
        return self._hybrid_engine.phases.phase is Phase.ROLLOUT

    def reshard(self, verifies: bool = False) -> dict[str, float]:
        """Sends weights to the engine, compares them if `verifies`, and returns metrics."""
        # Other ranks may still be reading or writing files.
        self._sampler.world.arrive("the work before the reshard")
        with self._journal.phase("reshard"):
            return self._hybrid_engine.to_rollout(self._position.step, verifies).metrics()

    def check(self, memory_table: Callable[[], str]) -> None:
        """Sends the weights and checks that engine and trainer compute equal log-probabilities.

        Raises:
            VerifyError: A parameter of the engine differs from its source.
            EngineDiffersError: A replica and the trainer compute different log-probabilities.
        """
        self.enter_training()
        self.reshard(verifies=True)
        self.is_checked = True
        if ENGINES[self._config.rollout.engine].computes:
            requests = _fixed_requests(
                self._sampler, self._policy, self._config.data.max_prompt_tokens
            )
            completions = _complete(self._sampler, requests)
            self.enter_training()
            gap = _compare(self._policy, requests, completions, self._config)
            num_others = sum(bool(request.contents) for request in requests)
            images = f", {num_others} of {len(requests)} prompts with images" if num_others else ""
            self._journal.notify(
                f"engine and trainer agree within {gap:.1e} nats per token{images}"
            )
            self._journal.notify(memory_table())
            self.reshard()

    def enter_training(self, frees_memory: bool = False) -> None:
        """Switches to the training phase if necessary. The engine must be idle."""
        if self.is_rollout:
            self._hybrid_engine.to_train(frees_memory)
        elif frees_memory:
            self._hybrid_engine.free_engine()

    def enter_rollout(self) -> None:
        if self._hybrid_engine.phases.phase is Phase.TRAIN:
            self.reshard()

    def send_frozen_again(self) -> None:
        """Makes the next reshard also send frozen weights, because they have changed."""
        self._hybrid_engine.send_frozen_again()


def _fixed_requests(sampler: Sampler, policy: Policy, max_prompt_tokens: int) -> list[Request]:
    """Returns requests of random tokens from a fixed seed, every second one with an image."""
    rng, num_tokens = np.random.default_rng(0), policy.model.source.shape.vocab_size
    length = min(PROMPT_TOKENS, max_prompt_tokens)
    # Sample at the temperature at which the policy computes log-probabilities, and without top-p or
    # top-k, unless the policy replays them.
    given = sampler.sampling
    sampling = SamplingParams(
        given.temperature or 1.0, max_new_tokens=min(NEW_TOKENS, given.max_new_tokens)
    )
    if given.num_likely:
        top_p, top_k, num_likely = given.top_p, given.top_k, given.num_likely
        sampling = replace(sampling, top_p=top_p, top_k=top_k, num_likely=num_likely)
    extra = policy.model.source.extra_inputs
    requests = []
    for number in range(REQUESTS):
        tokens = tuple(rng.integers(0, num_tokens, length).tolist())
        contents: tuple[Content, ...] = ()
        if extra is not None and number % 2:
            tokens, contents = extra.probe(tokens, number, max_prompt_tokens)
        requests.append(Request(number, tokens, number, sampling, contents=contents))
    return requests


def _complete(sampler: Sampler, requests: Sequence[Request]) -> list[list[Completion]]:
    """Returns each replica's completions, in the rollout phase with idle engines."""
    world, layout = sampler.world, sampler.layout
    with world.all_agree("the first generation"):
        done = generate(sampler.engine, requests) if world.rank in layout.ranks else []
    place = layout.assignment[world.rank]
    own = (place[0], done) if place is not None and place[1] == 0 else None
    by_replica = dict(found for found in world.gather_objects(own) if found is not None)
    return [by_replica[number] for number in range(layout.replicas)]


def _compare(
    policy: Policy,
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
    config: Config,
) -> float:
    """Returns the largest mean absolute difference of any replica, in the training phase;
    EngineDiffersError if it exceeds the bound for the model's dtype, or for an FP8 engine.
    """
    bound = bounds_of(policy.model.source.dtype, config).refuse
    prompts = [
        Prompt(number, "", request.prompt, {}, completion.tokens, contents=request.contents)
        for done in completions
        for number, (request, completion) in enumerate(zip(requests, done, strict=True))
    ]
    producer = Producer.here("the probe")
    batch = TrainBatch.supervised(prompts, producer)
    blobs = [completion.blobs for done in completions for completion in done]
    for name, blob in joined_blobs(blobs).items():
        batch = batch.join_blob(producer, name, blob)
    expected = policy.logprobs(batch)[batch.response_mask_T].split(
        [sum(len(completion.tokens) for completion in done) for done in completions]
    )
    gaps = []
    for replica, (done, trained_T) in enumerate(zip(completions, expected, strict=True)):
        logps = torch.tensor([logp for completion in done for logp in completion.logps])
        gap_T = (logps - trained_T).abs()
        gaps.append(float(gap_T.mean()))
        if not gaps[-1] <= bound:
            raise EngineDiffersError(
                f"replica {replica} and the trainer compute different log-probabilities for the "
                f"same tokens: they differ by {gaps[-1]:.2g} nats on average and by "
                f"{float(gap_T.max()):.2g} at most; allowed: {bound:g} on average. The weights "
                "are equal, so the computation differs. "
                f"{_likely_cause(config)} "
                "To compare layer by layer: hybridrl check --mismatch CONFIG"
            )
    return max(gaps)


def _likely_cause(config: Config) -> str:
    if config.numerics.is_exact:
        return (
            "With numerics.match=exact, any difference is an error: an operation of this machine "
            "rounds differently in other batches. Set numerics.match=close to run anyway."
        )
    fp8 = config.train.fp8
    if config.rollout.uses_fp8:
        trainer = "" if fp8 == "none" else f", and the trainer too (train.fp8={fp8})"
        return (
            f"The engine computes in FP8{trainer}, which explains a part. Set "
            "rollout.quantization=none, rollout.kv_cache_dtype=auto and train.fp8=none to see "
            "whether the rest comes from elsewhere."
        )
    if fp8 == "none":
        return (
            "Check the position, norm and head settings in the model's config.json, and the "
            "engine's version (hybridrl check)."
        )
    return (
        f"With train.fp8={fp8} the trainer rounds the inputs of matrix products to FP8, and the "
        "engine does not. Set train.fp8=none. If the difference remains, check the position, norm "
        "and head settings in the model's config.json."
    )
