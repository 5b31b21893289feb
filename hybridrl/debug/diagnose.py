"""`hybridrl check --mismatch`: why engine and trainer give the same tokens different
log-probabilities.

Lets both compute on prompts of the run, and has verdicts.py compare weights (every copy, by
checksum), tokens (of all ranks and replicas, and the trainer's own choice), sampling support (what
top_p and top_k cut off) and numerics (the residual stream, stage by stage: residual.py). Where an
engine tells the experts that it chose, the trainer takes these in all comparisons; what its own
would make of it is a verdict of its own, routing.

Who waits for whom: everything is collective over the world. What one rank's engine finds wrong is
told to all before any goes on, so that all take part in what follows, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.config.rules_experts import replays
from hybridrl.config.schema import Config, PlacementConfig
from hybridrl.config.source import read_model_config
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
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
from hybridrl.training.mismatch import BOUNDS

NUM_PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 256, 16
ROWS = 64  # positions whose logits over the whole vocabulary are held at a time
Streams = Mapping[str, Tensor]


def diagnose_rank(config: Config, with_reference: bool = False) -> dict[str, Any]:
    """Runs one rank of `hybridrl check --mismatch`.

    Args:
        config: of the run, with an engine and an algorithm that generate; the weights are its
            newest checkpoint's, or the initial ones.
        with_reference: also compare both with transformers' own forward in float32, on rank 0's
            CPU.

    Returns:
        The report, the same on all ranks: `agree`, `checkpoint`, `engine`, `dtype`, and a Finding
        each for `weights`, `tokens`, `sampling`, `numerics`, and of recorded experts `routing`.
    """
    rollout = config.rollout.model_copy(update={"eager": True})  # or its graphs call no module
    # Or there is nothing to compare the engine's weights with.
    train = config.train.model_copy(update={"release_weights_in_rollout": False})
    # What engine and trainer compute does not depend on where they lie.
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
    """Returns whether trainer and engine can compute with the same experts."""
    family, shape = read_model(config.model.family, read_model_config(config.model))
    is_known = isinstance(config.algorithm, PolicyGradientConfig) and family.layer_spec is None
    return shape.moe is not None and is_known and ENGINES[config.rollout.engine].records_experts


def diagnose(
    trainer: Trainer, with_reference: bool = False, run_replays: bool = False
) -> dict[str, Finding]:
    """Returns the verdicts `weights`, `tokens`, `sampling` and `numerics`, and `routing` where the
    engine tells its experts; the same on all ranks.

    Args:
        trainer: in the rollout phase, its engine idle and `eager`.
        with_reference: as of `diagnose_rank`.
        run_replays: whether the run trains with the engine's experts.
    """
    prompts = [prompt.tokens[:PROMPT_TOKENS] for prompt in trainer.prompts.take(NUM_PROMPTS)]
    weights = _weights(trainer)
    answers, error = _ask(trainer, prompts)
    everyone: list[tuple[list[Answer], str]] = trainer.world.gather_objects((answers, error))
    failed = [f"rank {rank}: {found}" for rank, (_, found) in enumerate(everyone) if found]
    if failed:
        remedy = "Weights or seeds differ between the ranks of a replica."
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
        remedy = "The transport is broken, or something else wrote to the engine's parameters."
        return Finding(False, str(error), remedy)
    return Finding(True, "every engine parameter equals the trainer's weights, by checksum")


def _ask(trainer: Trainer, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Answer], str]:
    """Returns this rank's answers, greedy ones and those sampled as in the run, or what kept its
    replica from going on.
    """
    given = trainer.sampler.sampling
    num_tokens = min(NEW_TOKENS, given.max_new_tokens)
    greedy = SamplingParams(0.0, max_new_tokens=num_tokens)
    sampled = SamplingParams(given.temperature, given.top_p, given.top_k, num_tokens)
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
    """Lets the engine, then the trainer compute the same tokens, and compares."""
    model, layout, sampling = trainer.policy.model, trainer.sampler.layout, trainer.sampler.sampling
    engine = trainer.engine
    assert isinstance(engine, ComputingEngine)  # the command refuses others
    with trainer.world.all_agree("reading the engine's residual stream"):
        theirs = engine_streams(engine, prompts)
    trainer.enter_training()
    batch, first_of, placed = _batch(prompts, by_rank, layout)
    wanted_N = torch.cat(
        [
            torch.arange(len(prompt)) + batch.offsets[first_of[number]]
            for number, prompt in enumerate(prompts)
        ]
    )
    ours, norm_TD, plain_T = trainer_streams(model, batch, wanted_N, trainer.policy.temperature)
    ends_N = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    ours["logits"] = trainer_logits(model, ours["norm"][ends_N])
    said = _tokenwise(trainer, batch, norm_TD, plain_T)
    exact = reference_streams(model, prompts) if with_reference else {}
    bounds = BOUNDS[trainer.source.dtype]
    total, replica = mean_difference(placed, said)
    numerics = judge_numerics(_table(trainer, theirs, ours, exact), total, replica, bounds)
    # What only happens further on, as a window or a scaling of positions may, was not looked at.
    longest = max(map(len, prompts))
    numerics = replace(numerics, found=f"{numerics.found}; on prompts of up to {longest} tokens")
    found = {
        "tokens": judge_tokens(layout, by_rank, placed, said, bounds.refuse),
        "sampling": judge_sampling(placed, said, sampling, bounds.warn),
        "numerics": numerics,
    }
    if ROUTED_EXPERTS in batch.blobs:
        plan = model.plan(batch.with_blobs(), 1.0)
        outputs: list[TokenStats] = model.forward_all(plan.inputs)
        own_T = plan.column([output.logp_S for output in outputs])
        found["routing"] = judge_routing(placed, said, own_T, bounds.warn, run_replays)
    return found


def _batch(
    prompts: Sequence[tuple[int, ...]],
    by_rank: Sequence[Sequence[Answer]],
    layout: RolloutLayout,
) -> tuple[TrainBatch, list[int], Placed]:
    """Returns the different responses of all replicas as a batch, in the order of their prompts;
    for each prompt its first sample; and where each answer lies.
    """
    firsts = [by_rank[rank] for rank in layout.ranks if layout.tp_rank(rank) == 0]
    different = {(one.prompt, one.completion.tokens) for answers in firsts for one in answers}
    ordered = sorted(different)
    sample_of = {key: sample for sample, key in enumerate(ordered)}
    samples = [
        Prompt(sample, "", prompts[number], {}, tokens)
        for sample, (number, tokens) in enumerate(ordered)
    ]
    batch = TrainBatch.supervised(samples, Producer.here("the diagnosis"))
    # Of the first replica that drew it.
    blobs_of = {
        (one.prompt, one.completion.tokens): one.completion.blobs
        for answers in reversed(firsts)
        for one in answers
    }
    batch = replace(batch, blobs=joined_blobs([blobs_of[key] for key in ordered]))
    numbers = [number for number, _ in ordered]
    starts, ends = batch.offsets[:-1] + batch.prompt_lengths_B, batch.offsets[1:]
    spans = [slice(*pair) for pair in zip(starts.tolist(), ends.tolist(), strict=True)]
    placed = [
        [(one, spans[sample_of[one.prompt, one.completion.tokens]]) for one in answers]
        for answers in firsts
    ]
    return batch, [numbers.index(number) for number in range(len(prompts))], placed


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
    trainer: Trainer, theirs: Streams, ours: Streams, exact: Streams
) -> list[dict[str, Any]]:
    """Returns for every stage the largest difference of any rank's engine from the trainer, and
    where there is a reference, the error of the trainer and of rank 0's engine.
    """
    order = [*stages(trainer.source.shape.num_layers), "logits"]
    difference = {s: relative_rms(theirs[s], ours[s]) for s in order if s in theirs}
    errors = {
        stage: {
            "trainer_error": relative_rms(ours[stage], exact[stage]),
            "engine_error": relative_rms(theirs[stage], exact[stage]),
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
