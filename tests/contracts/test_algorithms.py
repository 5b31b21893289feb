"""What every algorithm must keep, whatever its formula. A new algorithm adds its settings to
CASES.

The policy and the critic are tables over tokens in float64, so that a position's log-probability
does not depend on how samples are packed, and a difference between two gradients is the
algorithm's own.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from thread_ranks import on_ranks
from torch import Tensor

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import (
    AdaptiveAlgorithm,
    Algorithm,
    CriticAlgorithm,
    LossOutput,
    SelectiveAlgorithm,
)
from hybridrl.algorithms.preference import feedback_metrics
from hybridrl.config.algorithm import (
    PRESETS,
    OnPolicyDistillationConfig,
    PolicyGradientConfig,
    ReinforceConfig,
)
from hybridrl.config.correction import CorrectionConfig
from hybridrl.config.distillation import DistillationConfig, GkdConfig
from hybridrl.config.schema import (
    DpoConfig,
    GrpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    PpoConfig,
    SftConfig,
)
from hybridrl.config.supervised import PAIR_PRESETS
from hybridrl.contracts.batch import (
    GREEDY,
    UNRELATED,
    BatchError,
    MicroBatch,
    Producer,
    Prompt,
    Rollout,
    RolloutBatch,
    TrainBatch,
)
from hybridrl.errors import UserError
from hybridrl.parallel.exchange import bring
from hybridrl.training.batches.collation import micro_batch
from hybridrl.training.mismatch import behaviour_metrics

CASES = {
    "sft": SftConfig(),
    **{name: DpoConfig(name=name) for name in PAIR_PRESETS},
    "dpo-sft": DpoConfig(sft_coef=0.3, beta=0.7, target_margin=0.2, label_smoothing=0.1),
    "kto": KtoConfig(),
    "kto-weights": KtoConfig(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7),
    "online_dpo": OnlineDpoConfig(),
    "online_dpo-ipo": OnlineDpoConfig(loss="squared", length_normalized=True, sft_coef=0.2),
    "online_dpo-simpo": OnlineDpoConfig(reference=False, length_normalized=True, beta=2.0),
    "grpo": GrpoConfig(),
    **{name: GrpoConfig(name=name) for name in PRESETS},
    # The presets' own numbers are for thousands of tokens; here some must be in reach.
    "dapo": GrpoConfig(name="dapo", overlong_max_tokens=5, overlong_buffer_tokens=3),
    "clip_cov": GrpoConfig(
        name="clip_cov",
        cov_clip_fraction=0.2,
        cov_clip_low=0.05,
        clip_high=0.2,
        whiten_advantages=True,
    ),
    "kl_cov": GrpoConfig(name="kl_cov", cov_kl_fraction=0.2, cov_kl_coef=0.7),
    "pass_at_k": GrpoConfig(name="pass_at_k", pass_k=2),
    "gdpo-weights": GrpoConfig(name="gdpo", part_weights={"a": 0.3, "b": 2.0}, kl_coef=0.1),
    "remax-kl": GrpoConfig(name="remax", kl_coef=0.1),
    "grpo-tis": GrpoConfig(correction=CorrectionConfig(weight="token", max=1.2)),
    "dapo-icepop": GrpoConfig(
        clip_high=0.28, correction=CorrectionConfig(weight="token", bound="mask", min=0.7, max=1.5)
    ),
    "sapo-mis": GrpoConfig(
        name="sapo",
        correction=CorrectionConfig(weight="sequence", bound="mask", max=1.5, reject="token"),
    ),
    "grpo-geometric": GrpoConfig(
        correction=CorrectionConfig(weight="geometric", reject="geometric", reject_max=1.2),
    ),
    "cispo-behaviour": GrpoConfig(
        name="cispo", clip_high=0.1, correction=CorrectionConfig(proximal="behaviour")
    ),
    "ppo-behaviour-rejects": PpoConfig(
        correction=CorrectionConfig(proximal="behaviour", reject="sequence")
    ),
    "vapo": PpoConfig(name="vapo"),
    "ppo-adaptive-kl": PpoConfig(kl_coef=0.1, kl_target=6.0),
    "rloo-kl-entropy": GrpoConfig(name="rloo", kl_coef=0.1, entropy_coef=0.05),
    "gspo-kl-weighted": GrpoConfig(name="gspo", kl_coef=0.1, kl_importance_weighted=True),
    "grpo-dual-clip": GrpoConfig(dual_clip=1.1, aggregate="sequence_mean", kl_coef=0.1),
    "reinforce_pp": ReinforceConfig(),
    "reinforce_pp-kl": ReinforceConfig(kl_coef=0.1, gamma=0.9),
    "ppo-vapo": PpoConfig(
        gae_length_alpha=0.6, critic_gae_lambda=1.0, clip_high=0.28, aggregate="sequence_mean"
    ),
    "grpo-kl-loss-entropy": GrpoConfig(kl_coef=0.1, entropy_coef=0.05, normalize_std=False),
    "grpo-kl-reward": GrpoConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
    "ppo": PpoConfig(),
    "ppo-kl-reward": PpoConfig(kl_coef=0.1),
    "ppo-kl-loss-entropy": PpoConfig(
        kl_coef=0.1, kl_in="loss", kl_estimator="k2", entropy_coef=0.05, whiten_advantages=False
    ),
    "on_policy_distillation": OnPolicyDistillationConfig(teacher="t"),
    "on_policy_distillation-all": OnPolicyDistillationConfig(
        teacher="t", gamma=0.9, reward_coef=0.5, kl_coef=0.1, kl_in="reward", kl_estimator="k1"
    ),
    "on_policy_distillation-tis": OnPolicyDistillationConfig(
        teacher="t", objective="ratio", correction=CorrectionConfig(weight="token", max=1.2)
    ),
    "distillation": DistillationConfig(teacher="t", top_k=5),
    "gkd": GkdConfig(teacher="t", top_k=3),
}
VOCABULARY = 17
HERE = Producer.here("test")
EXACT = 1e-12  # float64 sums in another order
COLUMN = 1e-6  # float32 columns beside float64 log-probabilities

pytestmark = pytest.mark.parametrize("case", CASES)


@dataclass
class Tables:
    """The policy's logits and the critic's values for each token, and their initial gradients."""

    logits_VV: Tensor
    values_V: Tensor

    @staticmethod
    def random(seed: int = 0) -> Tables:
        generator = torch.manual_seed(seed)
        return Tables(
            torch.randn(
                VOCABULARY, VOCABULARY, dtype=torch.float64, generator=generator
            ).requires_grad_(),
            torch.randn(VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_(),
        )

    def policy(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets, and entropies."""
        logp_SV = self.logits_VV[micro.tokens_S].log_softmax(-1)
        entropy_S = -(logp_SV.exp() * logp_SV).sum(-1)
        if micro.teacher_tokens_SK is not None:
            return logp_SV.gather(1, micro.teacher_tokens_SK.long()), entropy_S
        return logp_SV.gather(1, micro.targets_S[:, None])[:, 0], entropy_S


def make_batch(
    tables: Tables, seed: int = 0, num_prompts: int = 4, num_samples: int = 3
) -> TrainBatch:
    """Samples of an old policy near the current one, half of them with observations."""
    rng = random.Random(seed)
    rollouts = []
    for p in range(num_prompts):
        length = rng.randint(1, 4)
        prompt = Prompt(p, "", tuple(rng.randrange(1, VOCABULARY) for _ in range(length)))
        for s in range(num_samples):
            tokens = tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 6)))
            number = num_samples * p + s
            seen = random.Random(number)
            observed = tuple(s % 2 == 1 and seen.random() < 0.5 for _ in tokens[1:]) + (False,)
            logps = tuple(-rng.random() * (not was) for was in observed)
            rollouts.append(Rollout(number, prompt, tokens, logps, "stop", 0, observed))
    groups = [i // num_samples for i in range(len(rollouts))]
    batch = RolloutBatch.from_rollouts(rollouts, groups, HERE)
    generator = torch.manual_seed(seed)
    noise_T = torch.randn(batch.num_tokens, generator=generator) * batch.response_mask_T
    reward_B, a_B = torch.rand(2, len(rollouts), generator=generator)
    parts = {"a": a_B, "b": reward_B - a_B, GREEDY: reward_B.flip(0)}
    train = batch.scored(reward_B, parts, HERE).to_train(HERE)
    logp_T = current_logps(tables, train)
    mask_T = train.response_mask_T
    other_T = torch.randn(batch.num_tokens, generator=generator) * mask_T
    train = replace(train, behaviour_logp_T=logp_T + 0.3 * noise_T + 0.2 * other_T)
    return train.join_columns(
        HERE,
        old_logp_T=logp_T + 0.3 * noise_T,
        reference_logp_T=logp_T - 0.5 * noise_T.abs(),
        values_T=noise_T.roll(1) * mask_T,
    )


def with_teacher(batch: TrainBatch, top: int) -> TrainBatch:
    """The batch with what a teacher says of it: another random table, near the policy's own."""
    generator = torch.manual_seed(5)
    logits_VV = Tables.random().logits_VV.detach()
    noise_VV = torch.randn(logits_VV.shape, dtype=torch.float64, generator=generator)
    logp_TV = (logits_VV + noise_VV)[batch.tokens_T.roll(1)].log_softmax(-1)
    mask_T = batch.response_mask_T
    logp_T = logp_TV.gather(1, batch.tokens_T[:, None])[:, 0]
    columns = {"teacher_logp_T": (logp_T * mask_T).float()}
    if top:
        found = logp_TV.topk(top)
        columns["teacher_tokens_TK"] = found.indices.int() * mask_T[:, None]
        columns["teacher_logp_TK"] = (found.values * mask_T[:, None]).float()
    return batch.join_columns(HERE, **columns)


def make_feedback_batch(case: str, tables: Tables, seed: int = 0) -> TrainBatch:
    """Six pairs, or twelve labelled responses and then as many unrelated ones."""
    if CASES[case].needs.feedback == "pairs":
        batch = make_batch(tables, seed, 6, 2)
        return replace(batch, reward_B=torch.tensor([1.0, 0.0, 0.0, 1.0] * 3))
    batch = make_batch(tables, seed, 12, 2)
    batch = batch.select([*range(0, 24, 2), *range(1, 24, 2)])
    parts = {UNRELATED: torch.tensor([0.0, 1.0]).repeat_interleave(12)}
    reward_B = torch.tensor([1.0, 0.0, 0.0] * 8)
    # Above the reference, or its KL would be cut off at 0.
    reference_T = batch.old_logp_T - 0.4 * batch.response_mask_T
    return replace(batch, reward_B=reward_B, reward_parts=parts, reference_logp_T=reference_T)


def has_feedback(case: str) -> bool:
    """Whether the loss is of preferences, be they the data's or made of samples."""
    return make_algorithm(CASES[case]).needs.feedback is not None


def kept(algorithm: Algorithm, batch: TrainBatch) -> TrainBatch:
    """The samples that the algorithm learns from: kto's unrelated ones are behind the others."""
    if isinstance(algorithm, SelectiveAlgorithm):
        return batch.select(algorithm.selected(batch))
    return batch.select(range(min(batch.num_samples, 12)))


def has_distributions(case: str) -> bool:
    return make_algorithm(CASES[case]).needs.teacher_top > 0


def current_logps(tables: Tables, batch: TrainBatch) -> Tensor:
    """The policy's own log-probabilities as a column: token t's from token t - 1."""
    logp_TV = tables.logits_VV.detach()[batch.tokens_T.roll(1)].log_softmax(-1)
    logp_T = logp_TV.gather(1, batch.tokens_T[:, None])[:, 0]
    return (logp_T * batch.response_mask_T).float()


def run(
    algorithm: Algorithm,
    tables: Tables,
    filled: TrainBatch,
    parts: list[list[int]],
    pads: tuple[int, int] = (1, 1),
    num_slices: int = 1,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and metrics of a batch with advantages, cut into these micro-batches."""
    denominator = algorithm.denominator(filled)
    found: list[LossOutput] = []
    for part in parts:
        whole = micro_batch(filled, part, *pads)
        for k in range(num_slices):
            micro = whole.take_positions(torch.arange(k, whole.num_positions, num_slices))
            found.append(algorithm.loss(*tables.policy(micro), micro, denominator))
            if isinstance(algorithm, CriticAlgorithm):
                values_S = tables.values_V[micro.tokens_S]
                found.append(algorithm.value_loss(values_S, micro, denominator))
    total = torch.stack([output.loss for output in found]).sum()
    wanted = {"policy": tables.logits_VV, "critic": tables.values_V}
    grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    metrics: dict[str, float] = {"loss": float(total.detach())}
    for output in found:
        for name, value in output.metrics.items():
            assert value.ndim == 0 and not value.requires_grad, name
            joined = max if name.endswith("_max") else float.__add__
            metrics[name] = joined(metrics.get(name, 0.0), float(value))
    return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}, metrics


@cache
def prepared(case: str, seed: int) -> tuple[Tables, TrainBatch, Tensor]:
    """What a case learns from, and the state that making it leaves torch's random numbers in."""
    tables, algorithm = Tables.random(seed), make_algorithm(CASES[case])
    needs = CASES[case].needs
    if needs is not None and not needs.rollouts and needs.feedback:
        batch = make_feedback_batch(case, tables, seed)
    else:  # of three samples a pair is kept; every case is to learn from twelve
        batch = make_batch(tables, seed, 6 if isinstance(algorithm, SelectiveAlgorithm) else 4)
    batch = with_teacher(batch, algorithm.needs.teacher_top)
    return tables, batch, torch.get_rng_state()


def prepare(case: str, seed: int = 0) -> tuple[Algorithm, Tables, TrainBatch]:
    """A new algorithm, and copies of its own of what is the same in all tests."""
    tables, batch, state = deepcopy(prepared(case, seed))
    torch.set_rng_state(state)
    return make_algorithm(CASES[case]), tables, batch


def assert_same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


ALL = [list(range(12))]


def without_observations(batch: TrainBatch) -> TrainBatch:
    """The same samples, of the sampled tokens alone."""
    assert batch.observed_T is not None and bool(batch.observed_T.any())
    kept = ~batch.observed_T
    columns = {
        name: column[kept] if name.endswith(("_T", "_TK")) else column
        for name, column in batch.columns().items()
    }
    lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
    return replace(batch, **{**columns, "lengths_B": lengths_B, "observed_T": None})


def needs_whole(case: str) -> bool:
    config = CASES[case]
    return isinstance(config, PolicyGradientConfig) and config.needs_whole_sequences


def weights(case: str, batch: TrainBatch) -> Tensor:
    """What a response token counts in the mean that `aggregate` names: (T,) float64."""
    lengths_B, config = batch.response_lengths_B.double(), CASES[case]
    if has_feedback(case):
        return batch.response_mask_T / make_algorithm(config).denominator(batch)
    aggregate = getattr(config, "aggregate", "token_mean")
    if aggregate == "token_mean":
        weight_B = torch.full_like(lengths_B, 1 / lengths_B.sum().item())
    elif aggregate == "sequence_mean":
        weight_B = 1 / lengths_B / len(lengths_B)
    else:
        weight_B = torch.full_like(lengths_B, 1 / (len(lengths_B) * config.fixed_length))
    return weight_B[batch.sample_index_T] * batch.response_mask_T


def test_there_is_something_to_learn(case):
    algorithm, tables, batch = prepare(case)
    grads, metrics = run(algorithm, tables, algorithm.advantages(batch), ALL)
    assert set(grads) == ({"policy", "critic"} if algorithm.needs.values else {"policy"})
    assert all(grad.abs().max() > 1e-4 for grad in grads.values())
    if getattr(CASES[case], "objective", "plain") not in ("plain", "sapo", "ratio"):
        assert 0 < metrics["policy/clip_fraction"] < int(batch.response_lengths_B.sum())


@pytest.mark.parametrize("garbage", [torch.nan, 5.0])
def test_masked_positions_have_no_gradient_and_no_effect(case, garbage):
    algorithm, tables, batch = prepare(case)
    filled = algorithm.advantages(batch)
    micro = micro_batch(filled, range(12), 4, 8)
    mask_S = micro.loss_mask_S
    losses = [(algorithm.loss, [x.detach() for x in tables.policy(micro)])]
    if isinstance(algorithm, CriticAlgorithm):
        losses.append((algorithm.value_loss, [tables.values_V.detach()[micro.tokens_S]]))
    for loss, inputs in losses:
        clean = [x.clone().requires_grad_() for x in inputs]
        masks = [mask_S.view(-1, *[1] * (x.ndim - 1)) for x in inputs]
        spoilt = [
            torch.where(mask, x, garbage).requires_grad_()
            for x, mask in zip(inputs, masks, strict=True)
        ]
        outputs = [loss(*given, micro, 7.0) for given in (clean, spoilt)]
        assert outputs[0].loss == outputs[1].loss
        assert outputs[0].metrics == outputs[1].metrics
        for given, output in zip((clean, spoilt), outputs, strict=True):
            output.loss.backward()
            assert (given[0].grad[~mask_S] == 0).all()
            assert (given[0].grad[mask_S] != 0).any()


def test_observations_have_no_part_in_advantages_denominator_or_loss(case):
    algorithm, tables, batch = prepare(case)
    filled = algorithm.advantages(batch)
    short = algorithm.advantages(without_observations(batch))
    mask_T, short_T = filled.response_mask_T, short.response_mask_T
    for name in ("advantages_T", "returns_T", "term_weights_T"):
        if (column_T := filled.columns().get(name)) is not None:
            assert not column_T[~mask_T].any()
            assert torch.equal(column_T[mask_T], short.columns()[name][short_T])
    assert algorithm.denominator(filled) == algorithm.denominator(short)
    whole, part = (micro_batch(one, range(one.num_samples), 1, 1) for one in (filled, short))
    logp_S, entropy_S = (x.detach() for x in tables.policy(whole))
    mask_S = whole.loss_mask_S
    given = [x.clone().requires_grad_() for x in (logp_S, entropy_S)]
    fewer = [torch.zeros(part.num_positions, *x.shape[1:], dtype=torch.float64) for x in given]
    for all_S, few_S in zip(given, fewer, strict=True):
        few_S[part.loss_mask_S] = all_S.detach()[mask_S]
        few_S.requires_grad_()
    outputs = [algorithm.loss(*given, whole, 7.0), algorithm.loss(*fewer, part, 7.0)]
    assert_close = partial(torch.testing.assert_close, rtol=COLUMN, atol=COLUMN)
    assert_close(outputs[0].loss, outputs[1].loss)
    assert_close(outputs[0].metrics, outputs[1].metrics)
    for output in outputs:
        output.loss.backward()
    assert not given[0].grad[~mask_S].any()
    assert_close(given[0].grad[mask_S], fewer[0].grad[part.loss_mask_S])


def test_any_cut_into_micro_batches_gives_the_same_gradient(case):
    algorithm, tables, batch = prepare(case)
    filled = algorithm.advantages(batch)
    expected = run(algorithm, tables, filled, ALL)
    slices = 1 if needs_whole(case) else 2
    for seed, (pads, num_slices) in enumerate((((1, 1), 1), ((1, 4), 1), ((4, 8), slices))):
        rng = random.Random(seed)
        order = rng.sample(range(12), 12)
        cuts = sorted(rng.choices(range(13), k=4))  # some parts are empty: padding only
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        found = run(algorithm, tables, filled, parts, pads, num_slices)
        assert_same(found[0], expected[0], EXACT)
        assert_same(found[1], expected[1], COLUMN)  # some metrics are sums of float32 columns


@pytest.mark.parametrize("seed", range(2))
def test_samples_dealt_to_ranks_have_the_same_columns_and_metrics(case, seed):
    """Bit for bit, where a rank has the tokens of some samples or of none, or two have the same."""
    _, _, batch = prepare(case)
    rng = random.Random(seed)
    table_BW = torch.zeros(batch.num_samples, 4, dtype=torch.bool)  # rank 3 has nothing
    for row in table_BW:
        row[rng.sample(range(3), rng.randint(1, 2))] = True

    def fill(batch):
        algorithm = make_algorithm(CASES[case])
        filled = algorithm.advantages(batch)
        metrics = behaviour_metrics(filled, filled.old_logp_T, algorithm)
        metrics |= feedback_metrics(filled) | {"denominator": algorithm.denominator(filled)}
        if isinstance(algorithm, AdaptiveAlgorithm):
            metrics |= algorithm.after_step(filled) | algorithm.state()
        return filled, metrics

    whole, expected = fill(batch)

    def on_rank(world):
        filled, metrics = fill(bring(batch, table_BW, world))
        assert metrics == expected
        own = bring(whole, filled.holders.by_rank_BW, world)
        assert own.columns().keys() == filled.columns().keys()
        for name, value in own.columns().items():
            assert torch.equal(filled.columns()[name], value), name
        assert filled.reward_parts.keys() == own.reward_parts.keys()
        for name, value in own.reward_parts.items():
            assert torch.equal(filled.reward_parts[name], value), name

    on_ranks(4, on_rank)


def test_a_loss_over_whole_responses_refuses_parts_of_them(case):
    algorithm, tables, batch = prepare(case)
    filled = algorithm.advantages(batch)
    if not needs_whole(case):
        return
    with pytest.raises(UserError, match=r"train\.cp: got above 1; allowed: 1 .* Set train\.cp=1"):
        run(algorithm, tables, filled, ALL, (4, 8), 2)
    micro = micro_batch(filled, range(12), 4, 8).take_positions(torch.arange(0, 8, 2))
    if isinstance(algorithm, CriticAlgorithm):
        with pytest.raises(UserError, match=r"train\.cp"):
            algorithm.value_loss(torch.zeros(micro.num_positions), micro, 1.0)


def test_the_order_of_samples_does_not_matter(case):
    algorithm, tables, batch = prepare(case)
    expected = run(algorithm, tables, algorithm.advantages(batch), ALL)
    order = random.Random(1).sample(range(batch.num_samples), batch.num_samples)
    found = run(algorithm, tables, algorithm.advantages(batch.select(order)), ALL)
    assert_same(found[0], expected[0], COLUMN)
    assert_same(found[1], expected[1], COLUMN)


@pytest.mark.parametrize("old", ["absent", "equal to the policy"])
def test_at_ratio_one_the_gradient_is_the_policy_gradient(case, old):
    config = CASES[case]
    if has_distributions(case):
        pytest.skip("no token has an advantage; test_algorithms_distillation.py has its gradient")
    if "kl_coef" in type(config).model_fields:
        terms = ("kl_coef", "entropy_coef", "positive_lm_coef", "cov_kl_coef")
        off = {name: 0.0 for name in terms if name in type(config).model_fields}
        config = config.model_copy(update={**off, "kl_target": None})
    if has_feedback(case) and old == "absent":
        pytest.skip("needs the column")
    _, tables, batch = prepare(case)
    algorithm = make_algorithm(config)
    batch = algorithm.advantages(batch)
    logp_T = current_logps(tables, batch)
    old_logp_T = None if old == "absent" else logp_T
    filled = replace(batch, old_logp_T=old_logp_T, behaviour_logp_T=logp_T)
    grads, metrics = run(algorithm, tables, filled, ALL)
    # The score function by its own path: sum of A_t grad log p(token t | token t - 1).
    previous_T, mask_T = batch.tokens_T.roll(1), batch.response_mask_T
    logp_TV = tables.logits_VV[previous_T].log_softmax(-1)
    chosen_T = logp_TV.gather(1, batch.tokens_T[:, None])[:, 0]
    credit_T = mask_T.double() if filled.advantages_T is None else filled.advantages_T.double()
    objective = (chosen_T * credit_T * weights(case, batch))[mask_T].sum()
    (expected,) = torch.autograd.grad(-objective, tables.logits_VV)
    torch.testing.assert_close(grads["policy"], expected, rtol=COLUMN, atol=COLUMN)
    assert metrics.get("policy/clip_fraction", 0.0) == 0


def test_gradients_agree_with_finite_differences(case):
    algorithm, tables, batch = prepare(case)
    if getattr(CASES[case], "objective", "plain") == "cispo":
        pytest.skip("its weight has no gradient by design; test_algorithms_presets.py has its form")
    micro = micro_batch(algorithm.advantages(batch), range(12), 2, 4)
    double = {n: c.double() for n, c in vars(micro).items() if n in FLOATS and c is not None}
    micro = replace(micro, **double)
    logp_S, entropy_S = (x.detach().requires_grad_() for x in tables.policy(micro))

    def loss(logp_S: Tensor, entropy_S: Tensor) -> Tensor:
        return algorithm.loss(logp_S, entropy_S, micro, 3.0).loss

    assert torch.autograd.gradcheck(loss, (logp_S, entropy_S), eps=1e-6, atol=1e-8, rtol=1e-6)
    if isinstance(algorithm, CriticAlgorithm):
        values_S = tables.values_V.detach()[micro.tokens_S].requires_grad_()
        assert torch.autograd.gradcheck(
            lambda v: algorithm.value_loss(v, micro, 3.0).loss, (values_S,), atol=1e-8, rtol=1e-6
        )


FLOATS = (
    *("old_logp_S", "reference_logp_S", "behaviour_logp_S"),
    *("advantages_S", "returns_S", "values_S", "term_weights_S", "teacher_logp_SK"),
)
NEEDED = {
    "reference": "reference_logp_T",
    "values": "values_T",
    "old_logps": "old_logp_T",
    "rollouts": "reward_B",
    "greedy": "reward_parts",
    "teacher": "teacher_logp_T",
    "teacher_top": "teacher_logp_TK",
}


def without_need(batch: TrainBatch, need: str) -> TrainBatch:
    if need != "greedy":
        return replace(batch, **{NEEDED[need]: None})
    return replace(batch, reward_parts={n: p for n, p in batch.reward_parts.items() if n != GREEDY})


def with_other(batch: TrainBatch, need: str) -> TrainBatch:
    """The batch with noise on what a need is about; rewards are the sum and its parts."""
    if need == "greedy":
        if GREEDY not in batch.reward_parts:
            return batch
        noise_B = torch.rand(batch.num_samples)
        return batch.with_parts({GREEDY: batch.reward_parts[GREEDY] + noise_B})
    if (column := batch.columns().get(NEEDED[need])) is None:
        return batch
    other = replace(batch, **{NEEDED[need]: column * (1 + torch.rand(column.shape))})
    if need != "rollouts":
        return other
    noisy = {n: p * (1 + torch.rand(p.shape)) for n, p in batch.reward_parts.items()}
    kept = {n: p for n, p in batch.reward_parts.items() if n in (GREEDY, UNRELATED)}
    return other.with_parts(noisy | kept)


def test_what_is_declared_is_used_and_what_is_not_is_not_needed(case):
    algorithm, tables, batch = prepare(case)

    def gradient(given: TrainBatch, old_logp_T: Tensor | None) -> dict[str, Tensor]:
        # Only what `advantages` reads of the old policy is at stake: the loss may always use it.
        filled = algorithm.advantages(given)
        if old_logp_T is not None:
            old_logp_T = kept(algorithm, replace(given, old_logp_T=old_logp_T)).old_logp_T
        filled = replace(filled, old_logp_T=old_logp_T)
        return run(algorithm, tables, filled, ALL)[0]

    expected = gradient(batch, batch.old_logp_T)
    takes_reward = getattr(CASES[case], "reward_coef", 1) > 0 and not has_distributions(case)
    for need in NEEDED:
        found = gradient(with_other(batch, need), batch.old_logp_T)
        is_used = any((found[n] - expected[n]).abs().max() > COLUMN for n in expected)
        is_told = bool(getattr(algorithm.needs, need))
        if need == "rollouts":  # distillation learns from samples without a reward
            assert is_used == (is_told and takes_reward), need
            continue
        assert is_used == is_told, need
        without = without_need(batch, need)
        if is_used:
            named = "greedy" if need == "greedy" else NEEDED[need].removesuffix("K")[:-1]
            with pytest.raises(BatchError, match=f"{named}.*{algorithm.name}"):
                gradient(without, batch.old_logp_T)
        else:
            assert_same(gradient(without, batch.old_logp_T), expected, EXACT)


def test_the_denominator_divides_the_loss_and_adds_up_over_mini_batches(case):
    algorithm, tables, batch = prepare(case)
    filled = algorithm.advantages(batch)
    expected = {"token_mean": int(batch.response_lengths_B.sum()), "pairs": 6, "labels": 12}
    aggregate = getattr(CASES[case], "aggregate", algorithm.needs.feedback or "token_mean")
    assert algorithm.denominator(filled) == expected.get(aggregate, batch.num_samples)
    halves = filled.split(2)
    assert sum(algorithm.denominator(half) for half in halves) == algorithm.denominator(filled)
    micro = micro_batch(filled, range(12), 1, 1)
    logp_S, entropy_S = tables.policy(micro)
    losses = [algorithm.loss(logp_S, entropy_S, micro, d).loss.item() for d in (1.0, 4.0)]
    assert losses[0] == pytest.approx(4 * losses[1], rel=1e-12)


def test_advantages_leave_the_rest_of_the_batch_alone(case):
    algorithm, _, batch = prepare(case)
    before = {name: column.clone() for name, column in batch.columns().items()}
    filled = algorithm.advantages(batch)
    learned = kept(algorithm, batch)
    for name, column in before.items():
        assert torch.equal(filled.columns()[name], learned.columns()[name])
        assert torch.equal(batch.columns()[name], column)
    added = set(filled.columns()) - set(before)
    has_advantages = algorithm.needs.rollouts or has_feedback(case)
    expected = {"advantages_T"} if has_advantages and not has_distributions(case) else set()
    expected |= {"returns_T"} if algorithm.needs.values else set()
    assert added == expected | ({"term_weights_T"} if case in ("kl_cov", "vapo") else set())


def far_apart(batch: TrainBatch, gap: float) -> TrainBatch:
    """The batch with log-probabilities of -0.5 or `gap` less, for each policy at other tokens."""
    mask_T = batch.response_mask_T
    names = ("old_logp_T", "behaviour_logp_T", "reference_logp_T", "teacher_logp_T")
    columns = {name: either(gap, batch.num_tokens) * mask_T for name in names}
    if (top_TK := batch.teacher_logp_TK) is not None:
        columns["teacher_logp_TK"] = uneven(gap, top_TK.shape) * mask_T[:, None]
    return replace(batch, **columns)


def either(gap: float, size: int) -> Tensor:
    return -0.5 - gap * (torch.rand(size) < 0.5)


def uneven(gap: float, shape: torch.Size) -> Tensor:
    return (gap * torch.rand(shape)).log_softmax(-1)


def with_each_kl(case: str) -> list:
    """The settings of a case, and those with each estimate of the KL in each place."""
    config = CASES[case]
    if not isinstance(config, PolicyGradientConfig) or getattr(config, "normalize_parts", False):
        return [config]
    in_reward = [{"kl_in": "reward", "kl_estimator": name} for name in ("k1", "k2", "k3")]
    in_loss = [term | {"kl_in": "loss"} for term in in_reward]
    weighted = [term | {"kl_importance_weighted": True} for term in in_loss]
    terms = in_reward + in_loss + weighted
    return [config, *(config.model_copy(update={"kl_coef": 0.1, **term}) for term in terms)]


@pytest.mark.parametrize("gap", [90.0, 1000.0])
def test_policies_that_are_far_apart_give_a_finite_loss_and_gradient(case, gap):
    """In float32, where exp(89) is infinite, and 0 times that is not a number."""
    torch.manual_seed(3)
    for config in with_each_kl(case):
        algorithm, (_, _, batch) = make_algorithm(config), prepare(case)
        filled = algorithm.advantages(far_apart(batch, gap))
        micro = micro_batch(filled, range(12), 1, 4)
        logp_S, entropy_S = either(gap, micro.num_positions), torch.zeros(micro.num_positions)
        if has_distributions(case):
            logp_S = uneven(gap, micro.teacher_logp_SK.shape)
        found = algorithm.loss(logp_S.requires_grad_(), entropy_S, micro, 7.0)
        found.loss.backward()
        assert found.loss.isfinite() and logp_S.grad.isfinite().all()
        assert all(value.isfinite() for value in found.metrics.values())
