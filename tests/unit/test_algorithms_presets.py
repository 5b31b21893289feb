"""Every algorithm with rollouts against float64 loops written from its paper's formulas.

Nothing of the package's tensors is used on the expected side: samples are NumPy arrays, cut out
with a loop, and each formula stands here once more, as the paper has it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import train_batch
from test_algorithms_advantage import gae_by_definition, responses

from hybridrl.algorithms import make_algorithm
from hybridrl.config.algorithm import CRITIC_PRESETS, PRESETS, ReinforceConfig
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import GrpoConfig, PpoConfig
from hybridrl.contracts.batch import GREEDY, BatchError, TrainBatch
from hybridrl.errors import ConfigError
from hybridrl.training.batches.collation import micro_batch

NUM_BATCHES = 20
F32 = 1e-6  # columns are stored as float32; everything before that is float64
EXACT = 1e-9  # float64 on both sides, sums in another order
GROUP = 4  # samples a prompt

# Where a preset's own number is for thousands of tokens, one that these batches reach.
CONFIGS = {
    "grpo": GrpoConfig(),
    **{name: GrpoConfig(name=name) for name in PRESETS},
    "dapo": GrpoConfig(name="dapo", overlong_max_tokens=6, overlong_buffer_tokens=4),
    "rloo": GrpoConfig(name="rloo", kl_coef=0.2),
    "pass_at_k": GrpoConfig(name="pass_at_k", pass_k=2),
    "kl_cov": GrpoConfig(name="kl_cov", cov_kl_fraction=0.1, cov_kl_coef=0.7),
    "gdpo": GrpoConfig(name="gdpo", part_weights={"a": 1.0, "b": 0.25}),
    "reinforce_pp": ReinforceConfig(kl_coef=0.3),
    "ppo": PpoConfig(),
    "vapo": PpoConfig(name="vapo", gae_length_alpha=0.5),
}


@pytest.fixture(scope="module")
def batches() -> list[TrainBatch]:
    """Random batches; every other one has rewards 0 and 1, so that some groups are all equal."""
    found = []
    for seed in range(NUM_BATCHES):
        batch = train_batch(3, GROUP, seed)
        if seed % 2:
            right = np.random.default_rng(seed).integers(0, 2, batch.num_samples)
            batch = replace(batch, reward_B=torch.from_numpy(right).float())
        names = ("a", "b", GREEDY)
        parts = torch.randn(3, batch.num_samples, generator=torch.Generator().manual_seed(seed))
        found.append(batch.with_parts(dict(zip(names, parts, strict=True))))
    return found


def groups_of(reward: np.ndarray) -> np.ndarray:
    return reward.reshape(-1, GROUP)


def grpo(reward, lengths, old, reference):
    own = groups_of(reward)
    return (own - own.mean(1, keepdims=True)) / (own.std(1, ddof=1, keepdims=True) + 1e-6)


def dr_grpo(reward, lengths, old, reference):
    return groups_of(reward) - groups_of(reward).mean(1, keepdims=True)


def dapo(reward, lengths, old, reference):
    longest, cache = 6, 4
    shaped = reward.copy()
    for i, n in enumerate(lengths):
        if n > longest:
            shaped[i] -= 1
        elif n > longest - cache:
            shaped[i] += ((longest - cache) - n) / cache
    return grpo(shaped, lengths, old, reference)


def rloo(reward, lengths, old, reference):
    total = [r - 0.2 * (o - q).sum() for r, o, q in zip(reward, old, reference, strict=True)]
    found = np.zeros(len(reward))
    for i, r in enumerate(total):
        first = i // GROUP * GROUP
        others = [total[j] for j in range(first, first + GROUP) if j != i]
        found[i] = r - sum(others) / (GROUP - 1)
    return found


def opo(reward, lengths, old, reference):
    length = groups_of(np.array(lengths, dtype=float))
    base = (length * groups_of(reward)).sum(1) / length.sum(1)
    return groups_of(reward) - base[:, None]


def gpg(reward, lengths, old, reference):
    own = groups_of(reward)
    useless = sum(GROUP for row in own if len(set(row)) == 1)
    alpha = len(reward) / (len(reward) - useless) if useless < len(reward) else 1
    return alpha * dr_grpo(reward, lengths, old, reference)


def pass_at_k(reward, lengths, old, reference):
    """By enumeration of all sets of k samples, not the closed form."""
    found = []
    for row in groups_of(reward) >= 0.5:
        sets = list(itertools.combinations(range(GROUP), 2))
        worth = np.array([float(any(row[i] for i in chosen)) for chosen in sets])
        for i in range(GROUP):
            own = np.mean([w for w, chosen in zip(worth, sets, strict=True) if i in chosen])
            found.append((own - worth.mean()) / worth.std() if worth.std() else 0.0)
    return np.array(found)


def covariance_of(batch: TrainBatch, a: list[np.ndarray]) -> np.ndarray:
    logp = np.concatenate(responses(batch, batch.old_logp_T))
    flat = np.concatenate(a)
    return np.array(
        [(x - logp.mean()) * (y - flat.mean()) for x, y in zip(logp, flat, strict=True)]
    )


def whitened(rows: list[np.ndarray]) -> list[np.ndarray]:
    every = np.concatenate(rows)
    return [(row - every.mean()) / (every.std(ddof=1) + 1e-8) for row in rows]


def expected_advantages(name: str, batch: TrainBatch) -> list[np.ndarray]:
    old, reference, values = (
        responses(batch, c) for c in (batch.old_logp_T, batch.reference_logp_T, batch.values_T)
    )
    lengths = [len(row) for row in old]
    reward = batch.reward_B.double().numpy()
    if name == "reinforce_pp":
        rows = []
        for r, o, q in zip(reward, old, reference, strict=True):
            penalty = 0.3 * (o - q)
            rows.append(np.array([r - penalty[t:].sum() for t in range(len(o))]))
        return whitened(rows)
    if name == "remax":
        greedy = batch.reward_parts[GREEDY].double().numpy()
        return [np.full(n, r - g) for n, r, g in zip(lengths, reward, greedy, strict=True)]
    if name == "gdpo":
        each = [
            weight * grpo(batch.reward_parts[part].double().numpy(), lengths, old, reference)
            for part, weight in (("a", 1.0), ("b", 0.25))
        ]
        sample = sum(each).reshape(-1)  # eq. 6: mean and deviation over the rollouts of the batch
        sample = (sample - sample.mean()) / (sample.std(ddof=1) + 1e-8)
        return [np.full(n, a) for n, a in zip(lengths, sample, strict=True)]
    if name in ("ppo", "vapo"):
        rows = []
        for r, v in zip(reward, values, strict=True):
            lam = max(1 - 1 / (0.5 * len(v)), 0) if name == "vapo" else 0.95
            rows.append(gae_by_definition([0.0] * (len(v) - 1) + [r], v, 1.0, lam))
        return whitened(rows)
    rule = {
        "dr_grpo": dr_grpo, "dapo": dapo, "rloo": rloo, "opo": opo, "gpg": gpg,
        "pass_at_k": pass_at_k, "reinforce_pp_baseline": dr_grpo,
    }.get(name, grpo)  # fmt: skip
    sample = rule(reward, lengths, old, reference).reshape(-1)
    rows = [np.full(n, a) for n, a in zip(lengths, sample, strict=True)]
    return whitened(rows) if name == "reinforce_pp_baseline" else rows


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "clip_cov"])
def test_advantages_are_those_of_the_paper(name, batches):
    algorithm = make_algorithm(CONFIGS[name])
    for batch in batches:
        filled = algorithm.advantages(batch)
        found = np.concatenate(responses(batch, filled.advantages_T))
        expected = np.concatenate(expected_advantages(name, batch))
        np.testing.assert_allclose(found, expected, rtol=F32, atol=F32)
        assert (filled.advantages_T[~batch.response_mask_T] == 0).all()
        if name == "vapo":
            reward = batch.reward_B.double().numpy()
            for row, r in zip(responses(batch, filled.returns_T), reward, strict=True):
                np.testing.assert_allclose(row, r, rtol=F32, atol=F32)  # lambda 1: r itself


def term_weights(name: str, batch: TrainBatch) -> list[np.ndarray]:
    """The second number of a token: KL-Cov's coefficient, or VAPO's for what is right."""
    lengths = [len(row) for row in responses(batch, batch.old_logp_T)]
    found = [np.zeros(n) for n in lengths]
    if name == "kl_cov":
        flat = covariance_of(batch, expected_advantages("grpo", batch))
        count = max(int(0.1 * len(flat)), 1)
        chosen = np.zeros(len(flat))
        chosen[sorted(range(len(flat)), key=lambda t: -flat[t])[:count]] = 0.7
        found = np.split(chosen, np.cumsum(lengths)[:-1])
    if name == "vapo":
        right = [r >= 0.5 for r in batch.reward_B.tolist()]
        num_right = sum(n for n, is_right in zip(lengths, right, strict=True) if is_right)
        for row, is_right in zip(found, right, strict=True):
            row[:] = 0.1 * sum(lengths) / num_right if is_right else 0.0
    return found


def objective(name, ratio, logp, a, term):
    """A response's objective by token, and its derivative by each token's log-probability."""
    n = len(ratio)
    low, high = {
        "cispo": (0.0, 1.28), "clip_cov": (0.0, 2.0), "dapo": (0.8, 1.28),
        "pass_at_k": (0.8, 1.28), "vapo": (0.8, 1.28),
    }.get(name, (0.8, 1.2))  # fmt: skip
    if name == "kl_cov":
        gap = np.log(ratio)
        return ratio * a - term * abs(gap), ratio * a - term * np.sign(gap)
    if name == "gspo":
        s = math.exp(np.log(ratio).sum() / n)
        bounded = min(max(s, 1 - 3e-4), 1 + 4e-4)
        values = [min(s * a[t], bounded * a[t]) for t in range(n)]
        return values, [0 if bounded * a[t] < s * a[t] else s * a[t] for t in range(n)]
    if name == "gmpo":
        inside = [
            min(r, math.exp(0.4)) if a[t] > 0 else max(r, math.exp(-0.4))
            for t, r in enumerate(ratio)
        ]
        mean = math.prod(inside) ** (1 / n)
        return [mean * x for x in a], [
            mean * a[t] if inside[t] == ratio[t] else 0 for t in range(n)
        ]
    values, slopes = [], []
    for r, lp, x in zip(ratio, logp, a, strict=True):
        bounded = min(max(r, low), high)
        if name == "cispo":
            values.append(bounded * x * lp)
            slopes.append(bounded * x)
        elif name == "sapo":
            tau = 1.0 if x > 0 else 1.05
            gate = 1 / (1 + math.exp(-tau * (r - 1)))
            values.append(4 / tau * gate * x)
            slopes.append(4 * gate * (1 - gate) * r * x)
        elif name in ("rloo", "opo", "gpg", "remax"):
            values.append(lp * x)
            slopes.append(x)
        else:
            values.append(min(r * x, bounded * x))
            slopes.append(0 if bounded * x < r * x else r * x)
    if name == "vapo":
        return np.array(values) + term * logp, np.array(slopes) + term
    return values, slopes


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_their_gradients_are_those_of_the_paper(name, batches):
    algorithm = make_algorithm(CONFIGS[name])
    for seed, batch in enumerate(batches):
        filled = algorithm.advantages(batch)
        noise_T = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) * 0.4
        now_T = (batch.old_logp_T + noise_T) * batch.response_mask_T
        # The first column brings a column into place, the other is of agents.
        carrier = replace(filled, behaviour_logp_T=now_T, loss_weights_T=None)
        micro = micro_batch(carrier, range(batch.num_samples), 1, 4)
        logp_S = micro.behaviour_logp_S.double().requires_grad_()
        double = {n: getattr(micro, n).double() for n in ("old_logp_S", "advantages_S")}
        micro = replace(micro, **double)
        entropy_S = torch.zeros_like(logp_S)
        kl = CONFIGS[name].model_copy(update={"kl_coef": 0.0})  # its place is tested elsewhere
        loss = make_algorithm(kl).loss(logp_S, entropy_S, micro, algorithm.denominator(filled)).loss
        loss.backward()
        total, slopes = 0.0, []
        rows = [responses(batch, c) for c in (now_T, batch.old_logp_T, filled.advantages_T)]
        rows.append(term_weights(name, batch))
        num_tokens = sum(len(row) for row in rows[0])
        for now, old, a, term in zip(*rows, strict=True):
            values, slope = objective(name, np.exp(now - old), now, a, term)
            weight = 1 / num_tokens
            if name in ("gspo", "gmpo", "sapo"):
                weight = 1 / (batch.num_samples * len(now))
            elif name in ("dr_grpo", "rloo", "opo", "remax"):
                weight = 1 / batch.num_samples
            total -= weight * sum(values)
            slopes += [-weight * x for x in slope]
        exact = F32 if name in ("kl_cov", "vapo") else EXACT  # their weights are float32
        assert loss.item() == pytest.approx(total, rel=exact, abs=exact)
        found = logp_S.grad[micro.loss_mask_S].numpy()
        np.testing.assert_allclose(found, slopes, rtol=exact, atol=exact)


def test_a_fixed_denominator_counts_responses_of_the_set_length(batches):
    algorithm = make_algorithm(GrpoConfig(name="dr_grpo", fixed_length=32))
    assert algorithm.denominator(batches[0]) == 32 * batches[0].num_samples


def test_clip_cov_draws_its_tokens_among_those_of_high_covariance(batches):
    config = GrpoConfig(name="clip_cov", cov_clip_fraction=0.1, cov_clip_low=0.2, cov_clip_high=2.0)
    num_drawn = num_left = 0
    for batch in batches:
        kept = np.concatenate(expected_advantages("grpo", batch))
        logp = np.concatenate(responses(batch, batch.old_logp_T))
        cov = (logp - logp.mean()) * (kept - kept.mean())
        high = (cov >= 0.2) & (cov <= 2.0)
        filled = make_algorithm(config).advantages(batch)
        found = np.concatenate(responses(batch, filled.advantages_T))
        drawn = (found == 0) & (kept != 0)
        assert not (drawn & ~high).any()
        count = min(max(int(0.1 * len(kept)), 1), high.sum())
        hidden = (high & (kept == 0)).sum()  # drawn or not, their advantage is zero
        assert count - hidden <= drawn.sum() <= count
        np.testing.assert_allclose(found[~drawn], kept[~drawn], rtol=F32, atol=F32)
        later = replace(batch, versions_B=batch.versions_B + 1)
        again = make_algorithm(config).advantages(later).advantages_T
        num_left += int((again != filled.advantages_T).any() and drawn.sum() < high.sum())
        num_drawn += int(drawn.sum())
    assert num_drawn > NUM_BATCHES
    assert num_left > NUM_BATCHES / 4  # another step draws other tokens


GROUP_NAMES = ["grpo", *(name for name in PRESETS if name != "remax")]


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_a_group_of_one_is_refused_by_name(name):
    lonely = train_batch(3, 4).select([0, 1, 2, 3, 4, 8, 9, 10, 11])
    with pytest.raises(
        BatchError, match=f"1 sample for group 1.*or more, which {name} needs"
    ) as caught:
        make_algorithm(GrpoConfig(name=name)).advantages(lonely)
    assert "Raise steps.samples_per_prompt" in str(caught.value)


@pytest.mark.parametrize("name", [*GROUP_NAMES, "reinforce_pp"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -3e38])
def test_rewards_that_are_all_equal_teach_nothing(name, reward):
    batch = train_batch(3, GROUP)
    batch = replace(batch, reward_B=torch.full((batch.num_samples,), reward))
    batch = batch.with_parts({"part": batch.reward_B})
    config = ReinforceConfig() if name == "reinforce_pp" else GrpoConfig(name=name)
    advantages_T = make_algorithm(config).advantages(batch).advantages_T
    # REINFORCE++ has the rounding of a mean of equal numbers, 1e-16 of them, over its epsilon.
    rounding = 1e-6 * max(1.0, abs(reward) * 1e-9) if name == "reinforce_pp" else 0.0
    assert advantages_T.abs().max() <= rounding


def with_rewards(rewards, **parts) -> TrainBatch:
    """Returns a batch of groups of GROUP samples with these rewards and parts."""
    batch = train_batch(len(rewards) // GROUP, GROUP)
    batch = batch.with_parts({name: torch.tensor(part) for name, part in parts.items()})
    return replace(batch, reward_B=torch.tensor(rewards))


def lost(batch: TrainBatch, **config) -> list[bool]:
    """Returns which groups are uninformative."""
    return make_algorithm(GrpoConfig(**config)).uninformative(batch).tolist()[::GROUP]


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if isinstance(c, GrpoConfig)])
def test_uninformative_groups_are_those_whose_advantages_are_all_zero(name):
    # What scales the whole batch, and what is no reward, says nothing of a group.
    plain = {"whiten_advantages": False, "kl_coef": 0.0, "overlong_max_tokens": None}
    no_covariance = {"cov_clip_fraction": 0.0, "cov_kl_fraction": 0.0}
    algorithm = make_algorithm(CONFIGS[name].model_copy(update=plain | no_covariance))
    num_lost = 0
    for seed in range(NUM_BATCHES):
        draw = np.random.default_rng(seed)
        # Of 0.1 + 0.1 + 0.1 the mean is not 0.1.
        values = {key: draw.choice([0.1, 0.7], 3 * GROUP, p=(0.75, 0.25)) for key in "rab"}
        greedy = draw.choice([0.1, 0.7], 3).repeat(GROUP)
        parts = {"a": values["a"], "b": values["b"], GREEDY: greedy}
        batch = with_rewards(
            values["r"].astype(np.float32), **{k: v.astype(np.float32) for k, v in parts.items()}
        )
        advantages_T = algorithm.advantages(batch).advantages_T
        of_samples = advantages_T.split(batch.lengths_B.tolist())
        is_zero = torch.tensor([not bool(one.any()) for one in of_samples]).view(-1, GROUP)
        expected = is_zero.all(1, keepdim=True).expand(-1, GROUP).flatten()
        assert algorithm.uninformative(batch).tolist() == expected.tolist()
        num_lost += int(expected.sum())
    assert 0 < num_lost < NUM_BATCHES * 3 * GROUP


def test_groups_are_uninformative_by_what_the_algorithm_compares():
    # With k = 3 the sets of a group with two wrong samples all hold a right one.
    mixed = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert lost(with_rewards(mixed), name="pass_at_k", pass_k=3) == [True, False]
    # 0.7 and 0.9 both pass.
    assert lost(with_rewards([0.7, 0.9, 0.9, 0.9]), name="pass_at_k", pass_k=2) == [True]
    # Only a part of weight 0 differs.
    part = {"a": [1.0] * 4, "b": [0.0, 1.0, 0.0, 0.0]}
    parted = with_rewards([1.0, 2.0, 1.0, 1.0], **part)
    assert lost(parted, name="gdpo", part_weights={"a": 1.0}) == [True]
    assert lost(parted, name="gdpo") == [False]
    # All samples are better than the greedy response.
    assert lost(with_rewards([1.0] * 4, **{GREEDY: [0.0] * 4}), name="remax") == [False]
    # Equal rewards, of which one pays for its length.
    batch = with_rewards([1.0] * 4)
    longest = int(batch.response_lengths_B.max())
    knobs = {"overlong_max_tokens": longest, "overlong_buffer_tokens": 1}
    assert lost(batch, name="dapo", **knobs) == [False] and lost(batch, name="grpo") == [True]


def test_gdpo_names_the_parts_there_are_and_compares_all_of_them_by_default():
    batch = train_batch(3, 4).with_parts({GREEDY: torch.ones(12)})
    with pytest.raises(BatchError, match=r"no part 'lenght', expected part"):
        make_algorithm(GrpoConfig(name="gdpo", part_weights={"lenght": 1.0})).advantages(batch)
    for parts in ({}, {GREEDY: torch.ones(12)}):  # the greedy response's is no part to compare
        with pytest.raises(BatchError, match=r"no parts, expected at least one part"):
            make_algorithm(GrpoConfig(name="gdpo")).advantages(replace(batch, reward_parts=parts))
    batches = (batch, batch.with_parts({"part": batch.reward_parts["part"] * 70 - 5}))
    found = [make_algorithm(GrpoConfig(name="gdpo")).advantages(b).advantages_T for b in batches]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)  # epsilon over deviation


def config_of(**algorithm: object) -> object:
    base = {"run": {"name": "a"}, "model": {"init": "m"}}
    return load_config_dict({**base, "algorithm": algorithm}).algorithm


def test_a_preset_gives_defaults_and_yields_to_what_is_set():
    found = config_of(name="gspo", clip_high=0.1)
    assert (found.objective, found.clip_low, found.clip_high) == ("sequence_clip", 3e-4, 0.1)
    assert GrpoConfig(**found.model_dump()) == found
    for name, preset in PRESETS.items():
        made = config_of(name=name)
        assert {key: getattr(made, key) for key in preset} == preset
        plain = GrpoConfig().model_dump()
        changed = {k for k, v in made.model_dump().items() if v != plain[k]}
        assert changed - {"name"} == {k for k in preset if preset[k] != getattr(GrpoConfig(), k)}
    for name, preset in CRITIC_PRESETS.items():
        made = config_of(name=name)
        assert {key: getattr(made, key) for key in preset} == preset


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"overlong_max_tokens": 100},
            r"overlong_buffer_tokens: .* \(100\), instead of 4096",
        ),
        (
            {"name": "sapo", "dual_clip": 3.0},
            "algorithm.dual_clip: .* allowed: null, because objective is sapo",
        ),
        ({"kl_in": "reward", "kl_importance_weighted": True}, "false, because kl_in is reward"),
        ({"name": "dapo", "clip_lo": 0.1}, "Did you mean 'algorithm.clip_low'"),
        ({"dual_clip": 1.0}, "algorithm.dual_clip"),
        ({"kl_target": 6.0}, "algorithm.kl_target: .* allowed: null unless kl_coef"),
        (
            {"part_weights": {"a": 1.0}},
            "algorithm.part_weights: .* allowed: no value unless normalize_parts is true",
        ),
        ({"name": "gdpo", "baseline": "pass_at_k"}, "normalize_parts: .*false, because baseline"),
        ({"name": "gdpo", "kl_coef": 0.1, "kl_in": "reward"}, "normalize_parts: .* kl_in=reward"),
        (
            {"name": "remax", "max_resampling": 1},
            "max_resampling: .* allowed: 0, because baseline greedy",
        ),
        ({"name": "kl_cov", "cov_clip_fraction": 0.1}, "cov_kl_fraction: 0, because cov_clip"),
        ({"correction": {"wieght": "token"}}, "Did you mean 'algorithm.correction.weight'"),
        (
            {"correction": {"weight": "token", "min": 3.0}},
            r"correction.min: got 3.0; allowed: less than correction.max \(2.0\)",
        ),
        (
            {"correction": {"reject": "token", "reject_max": 0.9}},
            r"reject_min: less than .* \(0.9\)",
        ),
        (
            {"correction": {"max": 5.0}},
            "correction.max: .*no value, because .*weight",
        ),
        (
            {"correction": {"bound": "mask"}},
            "correction.bound: .*no value, because .*weight",
        ),
        (
            {"correction": {"weight": "token", "reject_min": 0.5}},
            "reject_min: .*no value, because .*reject",
        ),
        (
            {"name": "rloo", "correction": {"proximal": "behaviour"}},
            "correction.proximal: old, because objective plain",
        ),
        (
            {"correction": {"weight": "token", "proximal": "behaviour"}},
            "correction.weight: .*none, because with correction.proximal=behaviour",
        ),
    ],
)
def test_knobs_that_do_not_fit_together_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**{"name": "grpo", **given})


def test_gpg_scales_by_the_rewards_before_the_kl():
    batch = with_rewards([1.0, 0.0, 0.0, 0.0, *[1.0] * 8])
    knobs = {"name": "gpg", "kl_in": "reward", "kl_coef": 0.5}
    scaled = make_algorithm(GrpoConfig(**knobs)).advantages(batch).advantages_T
    plain = make_algorithm(GrpoConfig(**knobs, rescale_informative=False)).advantages(batch)
    torch.testing.assert_close(scaled, 3 * plain.advantages_T)
