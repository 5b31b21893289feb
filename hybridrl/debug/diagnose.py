"""Diagnosis of different log-probabilities of engine and trainer: `hybridrl check --mismatch`.

Engine and trainer process the same prompts from the run. verdicts.py compares the weights (every
copy, by checksum), the tokens (between ranks and replicas, and with the trainer's choice), the
sampling support (tokens that top_p and top_k exclude) and the numerics (the residual stream, see
residual.py). If the engine reports which experts it chose, the trainer uses the same ones, and the
verdict `routing` evaluates its own choice. Collective; all ranks learn of an engine's error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.config.rules_experts import replays
from hybridrl.config.rules_sampling import replays_sampling
from hybridrl.config.schema import Config, PlacementConfig
from hybridrl.config.source import read_model_config
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.contracts.likely_tokens import LIKELY_LOGPS, LIKELY_TOKENS
from hybridrl.contracts.ragged import joined_blobs
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.debug.reference import reference_streams
from hybridrl.debug.residual import engine_streams, stages, trainer_logits, trainer_streams
from hybridrl.debug.verdicts import (
    Answer,
    Finding,
    Placed,
    Tokenwise,
    judge_numerics,
    judge_routing,
    judge_sampling,
    judge_tokens,
    mean_difference,
    relative_rms,
)
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.loop.trainer import Trainer
from hybridrl.models.family import read_model
from hybridrl.models.megatron.heads import TokenStats
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.build import ComputingEngine
from hybridrl.rollout.common.agreement import TokensDifferError
from hybridrl.rollout.common.sampling import log_distribution
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.registry import ENGINES
from hybridrl.training.mismatch import BOUNDS, bounds_of

NUM_PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 256, 16
ROWS = 64  # number of positions for which full logits are in memory at a time
Streams = Mapping[str, Tensor]


def diagnose_rank(config: Config, with_reference: bool = False) -> dict[str, Any]:
    """Runs one rank of `hybridrl check --mismatch`, from the newest checkpoint if there is one.

    `with_reference` also compares with transformers' float32 forward pass on rank 0's CPU.

    Returns:
        The report, which is the same on all ranks. Its keys are `agree`, `checkpoint`, `engine`,
        `dtype`, and one Finding each for `weights`, `tokens`, `sampling`, `numerics` and, if the
        engine records experts, `routing`.
    """
    rollout = config.rollout.model_copy(update={"eager": True})  # hooks do not run in CUDA graphs
    # The trainer's weights must stay in memory for the comparison.
    train = config.train.model_copy(update={"release_weights_in_rollout": False})
    # The placement does not change what engine and trainer compute.
    changed: dict[str, Any] = {"rollout": rollout, "train": train, "placement": PlacementConfig()}
    if _can_replay(config):
        changed["algorithm"] = config.algorithm.model_copy(update={"router_replay": "rollout"})
    trainer = Trainer(config.model_copy(update=changed))
    folder = trainer.store.newest()
    if folder is not None:
        trainer.load_checkpoint(folder)
    else:
        trainer.reshard()
    findings = diagnose(trainer, with_reference, replays(config))
    trainer.close()
    return {
        "agree": all(finding.agrees for finding in findings.values()),
        "checkpoint": str(folder) if folder is not None else None,
        "engine": rollout.engine,
        "dtype": str(trainer.source.dtype).removeprefix("torch."),
        **{name: asdict(finding) for name, finding in findings.items()},
    }


def _can_replay(config: Config) -> bool:
    family, shape = read_model(config.model.family, read_model_config(config.model))
    is_known = isinstance(config.algorithm, PolicyGradientConfig) and family.layer_spec is None
    return shape.moe is not None and is_known and ENGINES[config.rollout.engine].records_experts


def diagnose(
    trainer: Trainer, with_reference: bool = False, run_replays: bool = False
) -> dict[str, Finding]:
    """Returns the verdicts on all ranks, with an idle, `eager` engine, in the rollout phase."""
    prompts = [prompt.tokens[:PROMPT_TOKENS] for prompt in trainer.prompts.take(NUM_PROMPTS)]
    weights = _weights(trainer)
    answers, error = _ask(trainer, prompts)
    everyone: list[tuple[list[Answer], str]] = trainer.world.gather_objects((answers, error))
    failed = [f"rank {rank}: {found}" for rank, (_, found) in enumerate(everyone) if found]
    if failed:
        remedy = "Compare weights and seeds between the ranks of a replica."
        missing = Finding(False, "not compared: the ranks of a replica drew different tokens")
        tokens = Finding(False, failed[0], remedy)
        return {"weights": weights, "tokens": tokens, "sampling": missing, "numerics": missing}
    by_rank = [answers for answers, _ in everyone]
    found = _compare(trainer, prompts, by_rank, with_reference, run_replays)
    return {"weights": weights, **found}


def _weights(trainer: Trainer) -> Finding:
    try:
        trainer.hybrid_engine.verify()
    except VerifyError as error:
        remedy = (
            "Try rollout.transport=packed. If that does not help, other code may be modifying the "
            "engine's parameters."
        )
        return Finding(False, str(error), remedy)
    return Finding(True, "checksums of all engine parameters match the trainer's weights")


def _ask(trainer: Trainer, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Answer], str]:
    given = trainer.sampler.sampling
    num_tokens = min(NEW_TOKENS, given.max_new_tokens)
    greedy = SamplingParams(0.0, max_new_tokens=num_tokens)
    sampled = SamplingParams(
        given.temperature, given.top_p, given.top_k, num_tokens, num_likely=given.num_likely
    )
    asked = [
        (number, params)
        for number in range(len(prompts))
        for params in (greedy, *[sampled] * SAMPLES)
    ]
    requests = [Request(i, prompts[number], i, params) for i, (number, params) in enumerate(asked)]
    error, answers = "", []
    with trainer.world.all_agree("generation"):
        try:
            done = generate(trainer.engine, requests)
        except TokensDifferError as caught:
            error = str(caught)
        else:
            answers = [
                Answer(number, params is greedy, completion)
                for (number, params), completion in zip(asked, done, strict=True)
            ]
    return answers, error


def _compare(
    trainer: Trainer,
    prompts: Sequence[tuple[int, ...]],
    by_rank: Sequence[Sequence[Answer]],
    with_reference: bool,
    run_replays: bool,
) -> dict[str, Finding]:
    model, layout, sampling = trainer.policy.model, trainer.sampler.layout, trainer.sampler.sampling
    engine = trainer.engine
    assert isinstance(engine, ComputingEngine)  # the command refuses other engines
    with trainer.world.all_agree("reading the engine's residual stream"):
        engine_rows = engine_streams(engine, prompts)
    trainer.enter_training()
    whole, first_of, placed = _batch(prompts, by_rank, layout)
    # Greedy tokens have no likely tokens, so that all are first computed over the vocabulary.
    batch = whole.with_blobs(whole.blobs.keys() - {LIKELY_TOKENS, LIKELY_LOGPS})
    wanted_N = torch.cat(
        [
            torch.arange(len(prompt)) + batch.offsets[first_of[number]]
            for number, prompt in enumerate(prompts)
        ]
    )
    trainer_rows, norm_TD, plain_T = trainer_streams(
        model, batch, wanted_N, trainer.policy.temperature
    )
    ends_N = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    trainer_rows["logits"] = trainer_logits(model, trainer_rows["norm"][ends_N])
    tokenwise = _tokenwise(trainer, batch, norm_TD, plain_T)
    if replays_sampling(trainer.config):
        tokenwise = replace(tokenwise, plain=_replayed(trainer, whole, plain_T))
    exact = reference_streams(model, prompts) if with_reference else {}
    bounds = bounds_of(trainer.source.dtype, trainer.config)
    total, replica = mean_difference(placed, tokenwise)
    numerics = judge_numerics(
        _table(trainer, engine_rows, trainer_rows, exact),
        total,
        replica,
        bounds,
        error_floor=BOUNDS[trainer.source.dtype].residual,
    )
    # State the length, because engine and trainer may agree on these prompts but differ on longer
    # ones, such as prompts that are longer than an attention window.
    longest = max(map(len, prompts))
    numerics = replace(numerics, found=f"{numerics.found}; on prompts of up to {longest} tokens")
    found = {
        "tokens": judge_tokens(layout, by_rank, placed, tokenwise, bounds.refuse),
        "sampling": judge_sampling(
            placed, tokenwise, sampling, bounds.warn, replays_sampling(trainer.config)
        ),
        "numerics": numerics,
    }
    if ROUTED_EXPERTS in batch.blobs:
        plan = model.plan(batch.with_blobs(), 1.0)
        outputs: list[TokenStats] = model.forward_all(plan.inputs)
        own_T = plan.column([output.logp_S for output in outputs])
        found["routing"] = judge_routing(placed, tokenwise, own_T, bounds.warn, run_replays)
    return found


def _batch(
    prompts: Sequence[tuple[int, ...]],
    by_rank: Sequence[Sequence[Answer]],
    layout: RolloutLayout,
) -> tuple[TrainBatch, list[int], Placed]:
    """Returns a batch of all distinct responses by prompt, its groups, and the answers' rows."""
    firsts = [by_rank[rank] for rank in layout.ranks if layout.tp_rank(rank) == 0]
    different = {
        (answer.prompt, answer.completion.tokens) for answers in firsts for answer in answers
    }
    ordered = sorted(different)
    sample_of = {key: sample for sample, key in enumerate(ordered)}
    samples = [
        Prompt(sample, "", prompts[number], {}, tokens)
        for sample, (number, tokens) in enumerate(ordered)
    ]
    batch = TrainBatch.supervised(samples, Producer.here("the diagnosis"))
    # Blobs are taken from the first replica that sampled a response, rather than from a greedy
    # answer with the same tokens.
    blobs_of = {
        (answer.prompt, answer.completion.tokens): answer.completion.blobs
        for is_greedy in (True, False)
        for answers in reversed(firsts)
        for answer in answers
        if answer.is_greedy == is_greedy
    }
    batch = replace(batch, blobs=joined_blobs([blobs_of[key] for key in ordered]))
    numbers = [number for number, _ in ordered]
    starts, ends = batch.offsets[:-1] + batch.prompt_lengths_B, batch.offsets[1:]
    spans = [slice(*pair) for pair in zip(starts.tolist(), ends.tolist(), strict=True)]
    placed = [
        [(answer, spans[sample_of[answer.prompt, answer.completion.tokens]]) for answer in answers]
        for answers in firsts
    ]
    return batch, [numbers.index(number) for number in range(len(prompts))], placed


def _replayed(trainer: Trainer, batch: TrainBatch, plain_T: Tensor) -> Tensor:
    """Returns log-probabilities over the tokens that could be drawn, `plain_T` if unknown."""
    is_sampled_B = batch.blobs[LIKELY_TOKENS].num_rows_B > 0
    found_T = plain_T.clone()
    is_sampled_T = is_sampled_B.repeat_interleave(batch.lengths_B)
    found_T[is_sampled_T] = trainer.policy.logprobs(batch.select(is_sampled_B.nonzero()[:, 0]))
    return found_T


def _tokenwise(trainer: Trainer, batch: TrainBatch, norm_TD: Tensor, plain_T: Tensor) -> Tokenwise:
    where_R = batch.response_mask_T.nonzero().flatten()
    choice, best, own, cut = (torch.zeros(batch.num_tokens) for _ in range(4))
    choice = choice.long()
    for part_R in where_R.split(ROWS):
        logits_RV = trainer_logits(trainer.policy.model, norm_TD[part_R - 1])
        logp_RV = logits_RV.log_softmax(-1)
        cut_RV = log_distribution(logits_RV, [trainer.sampler.sampling] * len(part_R))
        token_R1 = batch.tokens_T[part_R, None]
        best[part_R], choice[part_R] = logp_RV.max(-1)
        own[part_R] = logp_RV.gather(1, token_R1)[:, 0]
        cut[part_R] = cut_RV.gather(1, token_R1)[:, 0]
    return Tokenwise(choice, best, own, cut, plain_T)


def _table(
    trainer: Trainer, engine_rows: Streams, trainer_rows: Streams, exact: Streams
) -> list[dict[str, Any]]:
    order = [*stages(trainer.source.shape.num_layers), "logits"]
    difference = {
        s: relative_rms(engine_rows[s], trainer_rows[s]) for s in order if s in engine_rows
    }
    errors = {
        stage: {
            "trainer_error": relative_rms(trainer_rows[stage], exact[stage]),
            "engine_error": relative_rms(engine_rows[stage], exact[stage]),
        }
        for stage in difference
        if stage in exact
    }
    ranks = trainer.world.gather_objects((difference, errors))
    return [
        {
            "stage": stage,
            "difference": max(found[stage] for found, _ in ranks if stage in found),
            **ranks[0][1].get(stage, {}),
        }
        for stage in order
    ]
