"""Rules between knobs, the world and the model's shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import check, default_world_size
from hybridrl.rollout.registry import ENGINES

VALID: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": "m"},
    "algorithm": {"name": "grpo"},
    "steps": {"samples_per_prompt": 8},
}
SHAPE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
}


def keys(*overrides: str, world: int = 8, shape: dict[str, Any] | None = None) -> list[str]:
    config = load_config_dict(VALID, overrides)
    return [violation.name for violation in check(config, world, SHAPE if shape is None else shape)]


def test_valid_config_has_no_violation() -> None:
    assert keys() == []
    assert keys("train.tp=2", "train.pp=2", "train.vpp=2", "train.cp=2") == []
    assert keys("algorithm.name=remax", "steps.samples_per_prompt=1") == []
    assert keys("algorithm.correction.weight=token", "train.cp=2") == []
    assert keys("algorithm.name=gspo", "algorithm.objective=ratio") == []
    assert keys("algorithm.name=vapo", "rollout.max_new_tokens=21") == []
    assert keys("algorithm.name=ppo", "rollout.max_new_tokens=1") == []
    assert keys("algorithm.name=kl_cov", "steps.updates_per_step=2") == []
    # Covariances are of the step's start: these two do something in a single update too.
    assert keys("algorithm.name=clip_cov") == []
    assert keys("reward.functions.greedy.weight=1") == []


EXPERTS = {**SHAPE, "num_experts": 12, "moe_intermediate_size": 24}
ENGINE = ["rollout.engine=vllm", "rollout.tp=4"]


@pytest.mark.parametrize(
    ("overrides", "shape", "said"),
    [
        (["rollout.ep=2"], EXPERTS, "got 2; allowed: 1 with engine 'hf'"),
        ([*ENGINE, "rollout.ep=4"], SHAPE, "1 with a dense model"),
        ([*ENGINE, "rollout.ep=2"], EXPERTS, "1, or rollout.tp = 4"),
        ([*ENGINE, "rollout.ep=4"], {**EXPERTS, "num_experts": 6}, "divisor of the model's 6"),
        (
            ENGINE,
            {**EXPERTS, "moe_intermediate_size": 18},
            "got 4; allowed: a divisor of the width",
        ),
        ([*ENGINE, "rollout.ep=4"], {**EXPERTS, "moe_intermediate_size": 18}, ""),
        ([*ENGINE, "rollout.ep=4"], EXPERTS, ""),
        (ENGINE, EXPERTS, ""),
    ],
)
def test_experts_of_an_engine_are_cut_or_dealt(
    overrides: list[str], shape: dict[str, Any], said: str
) -> None:
    found = check(load_config_dict(VALID, overrides), 8, shape)
    assert len(found) == bool(said), found
    assert not said or said in str(found[0])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.path=p"], "model.path and model.init"),
        (["model.init=null"], "model.path and model.init"),
        (["train.tp=4", "train.pp=4"], "train.tp * train.pp * train.cp"),
        (["rollout.engine=vllm", "rollout.tp=3"], "rollout.tp"),
        (["rollout.tp=2"], "rollout.tp"),
        (["train.vpp=2"], "train.vpp"),
        (["train.pp=8"], "train.pp * train.vpp"),
        (["train.pp=4", "train.vpp=2"], "train.pp * train.vpp"),
        (["train.tp=8"], "train.tp"),
        (["train.ep=2"], "train.ep"),
        (["steps.samples_per_prompt=1"], "steps.samples_per_prompt"),
        (["algorithm.name=pass_at_k", "steps.samples_per_prompt=3"], "steps.samples_per_prompt"),
        (["algorithm.name=remax", "rollout.temperature=0"], "rollout.temperature"),
        (["algorithm.correction.weight=sequence", "train.cp=2"], "train.cp"),
        (["algorithm.correction.reject=geometric", "train.cp=2"], "train.cp"),
        (["algorithm.name=gdpo", "reward.weight=2"], "algorithm.part_weights"),
        (["algorithm.name=remax", "reward.functions.greedy.weight=1"], "reward.functions"),
        (["algorithm.name=gdpo", "reward.functions.greedy.weight=1"], "reward.functions"),
        (["algorithm.name=kl_cov"], "steps.updates_per_step"),
        (["algorithm.name=rloo", "algorithm.clip_high=0.3"], "algorithm.clip_high"),
        (["algorithm.sapo_tau_negative=2"], "algorithm.sapo_tau_negative"),
        (["algorithm.fixed_length=12"], "algorithm.fixed_length"),
        (["algorithm.name=ppo", "algorithm.fixed_length=12"], "algorithm.fixed_length"),
        (["algorithm.pass_k=8"], "algorithm.pass_k"),
        (["algorithm.name=vapo", "rollout.max_new_tokens=20"], "algorithm.gae_length_alpha"),
        (
            ["algorithm.name=vapo", "algorithm.critic_warmup_steps=101"],
            "algorithm.critic_warmup_steps",
        ),
        (["algorithm.name=sft"], "steps.samples_per_prompt"),
        (["algorithm.name=dpo"], "steps.samples_per_prompt"),
        (
            ["algorithm.name=ipo", "steps.samples_per_prompt=1", "steps.updates_per_step=2"],
            "steps.updates_per_step",
        ),
        (
            ["algorithm.name=kto", "steps.samples_per_prompt=1", "steps.prompts_per_step=1"],
            "steps.prompts_per_step",
        ),
        (["rollout.temperature=0"], "rollout.temperature"),
        (["rollout.engine=vllm", "rollout.temperature=0.001"], "rollout.temperature"),
        (["rollout.engine=vllm", "rollout.temperature=2.5"], "rollout.temperature"),
        (["rollout.engine=vllm", "eval.temperature=2.5"], "eval.temperature"),
        (["steps.updates_per_step=7"], "steps.updates_per_step"),
        (["algorithm.name=gspo", "train.cp=2"], "train.cp"),
        (["algorithm.name=opo", "steps.updates_per_step=2"], "steps.updates_per_step"),
        (
            ["algorithm.name=reinforce_pp", "train.critic_learning_rate=1e-5"],
            "train.critic_learning_rate",
        ),
        (["steps.stop_at_accuracy=0.5"], "steps.stop_at_accuracy"),
        (["steps.eval_every=5"], "steps.eval_every"),
        (["train.min_learning_rate=1"], "train.min_learning_rate"),
        (["train.critic_learning_rate=1e-5"], "train.critic_learning_rate"),
        (
            ["algorithm.name=ppo", "algorithm.critic_warmup_steps=101"],
            "algorithm.critic_warmup_steps",
        ),
        (["train.micro_batch_tokens=600"], "train.micro_batch_tokens"),
        (["rollout.engine=vllm", "rollout.max_new_tokens=700"], "rollout.max_new_tokens"),
    ],
)
def test_rule_is_broken_by(overrides: list[str], key: str) -> None:
    assert set(keys(*overrides)) == {key}


def test_a_micro_batch_holds_the_longest_sample_with_the_padding_of_context_parallelism() -> None:
    sizes = "data.max_prompt_tokens=256", "rollout.max_new_tokens=256", "train.cp=3"
    fits = "train.micro_batch_tokens=516"  # 512, rounded up to a multiple of 6
    assert keys(*sizes, fits, world=3) == []
    (found,) = check(load_config_dict(VALID, [*sizes, "train.micro_batch_tokens=515"]), 3, SHAPE)
    assert found.name == "train.micro_batch_tokens"
    assert "= 512, padded to 516, a multiple of 2 * train.cp" in str(found)
    own = "algorithm.kl_coef=0.1", "placement.reference.cp=3", "train.micro_batch_tokens=515"
    (found,) = check(load_config_dict(VALID, [*sizes[:2], *own]), 3, SHAPE)
    assert "padded to 516, a multiple of 2 * placement.reference.cp" in str(found)


FREED = "train.release_weights_in_rollout=true"


def test_weights_are_freed_only_where_masters_can_make_them_again() -> None:
    assert keys(FREED) == keys(FREED, "train.fuse_param_gather=true") == []
    assert keys(FREED, "model.dtype=float32") == ["model.dtype"]
    assert keys(FREED, "rollout.transport=packed", "model.dtype=bfloat16") == []
    assert keys(FREED, "rollout.transport=peer") == ["rollout.transport"]
    on_cpu = check(load_config_dict(VALID, [FREED]), 8, SHAPE, "float32")
    assert [violation.name for violation in on_cpu] == ["model.dtype"]
    message = str(on_cpu[0])
    assert "auto (float32 here)" in message and "Set model.dtype=bfloat16" in message


def test_key_value_heads_must_divide_or_be_divided() -> None:
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4}
    assert keys("train.tp=6", world=6, shape=shape) == ["train.tp"]
    shape = {"num_attention_heads": 12, "num_key_value_heads": 3}
    assert keys("train.tp=6", world=6, shape=shape) == []


def expert_keys(*overrides: str, **shape: Any) -> list[str]:
    """Returns what is wrong with a model of 8 experts whose engine can run it."""
    experts = {"num_experts": 8, "moe_intermediate_size": 12, **shape}
    return keys("rollout.engine=scripted", *overrides, shape=experts)


def test_experts_follow_the_model() -> None:
    assert expert_keys("train.ep=2") == []
    assert expert_keys("train.ep=2", "train.etp=2") == []
    assert expert_keys("train.ep=4", num_experts=6) == ["train.ep"]
    assert expert_keys("train.ep=8", "train.pp=2") == ["train.ep"]
    assert expert_keys("train.ep=8", "train.etp=2") == ["train.ep * train.etp"]
    assert expert_keys("train.etp=8") == ["train.etp"]  # an expert is 12 units wide
    assert expert_keys("train.etp=2", moe_intermediate_size=None, num_experts=0) == ["train.etp"]
    order = "train.order=tp-cp-ep-pp-dp"
    assert expert_keys("train.pp=2", order) == ["train.order"]
    assert expert_keys(order) == [] and keys("train.pp=2", order, shape=SHAPE) == []
    roles = "placement.reference={ranks: 0-3, ep: %d}"
    reference = "algorithm.kl_coef=0.1"
    assert expert_keys(roles % 4, reference) == []
    assert expert_keys(roles % 4, reference, num_experts=6) == ["placement.reference.ep"]
    assert expert_keys(roles % 8, reference) == ["placement.reference.ep"]  # of 4 ranks


def test_losses_of_routers_ask_for_a_mixture_of_experts() -> None:
    assert expert_keys("train.moe.aux_loss=0.01", "train.moe.z_loss=0.001") == []
    assert keys("train.moe.aux_loss=0.01") == ["train.moe.aux_loss"]
    assert keys("train.moe.z_loss=0.01", "train.moe.aux_loss=0") == ["train.moe.z_loss"]


def test_what_a_mixture_of_experts_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expert_keys("train.fp8=hybrid") == ["train.fp8"]
    assert expert_keys("train.recompute=selective") == []
    config = load_config_dict(VALID, ["rollout.engine=hf"])
    shape = {"num_local_experts": 8}
    assert check(config, 8, shape) == []
    without = replace(ENGINES["hf"], takes_experts=False)
    monkeypatch.setitem(ENGINES, "hf", without)
    (found,) = check(config, 8, shape)
    assert "rollout.engine: got hf" in str(found) and "Set rollout.engine=" in str(found)


def test_all_rules_are_reported_at_once() -> None:
    found = keys("train.tp=5", "rollout.tp=3", "steps.samples_per_prompt=1", "train.vpp=99")
    assert set(found) == {
        "train.tp * train.pp * train.cp",
        "rollout.tp",
        "train.vpp",
        "steps.samples_per_prompt",
        "train.pp * train.vpp",
        "train.tp",
    }


def test_message_names_value_bound_and_remedy() -> None:
    config = load_config_dict(VALID, ["train.tp=3"])
    message = str(check(config, 4)[0])
    assert "3 * 1 * 1 = 3" in message and "world size 4" in message and "--world" in message


@pytest.mark.parametrize("key", ["train.tp=3", "train.ep=3", "rollout.tp=3"])
def test_remedy_names_what_sets_the_number_of_ranks_there(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config_dict(VALID, [key])
    message = str(check(config, 4, is_script=True)[0])
    assert "torchrun --nproc-per-node=N (python alone starts 1 rank)" in message
    monkeypatch.setenv("RANK", "0")
    for is_script in (False, True):
        message = str(check(config, 4, is_script=is_script)[0])
        assert "torchrun's --nproc-per-node" in message and "--world" not in message


def test_default_world_size_is_the_gpus_or_what_the_layout_needs() -> None:
    config = load_config_dict(VALID, ["train.tp=2", "train.pp=2", "rollout.tp=8"])
    assert default_world_size(config, 16) == 16
    assert default_world_size(config, 0) == 8
    assert default_world_size(load_config_dict(VALID, ["train.cp=3"]), 0) == 3
    experts = load_config_dict(VALID, ["train.tp=4", "train.ep=3", "train.etp=2", "train.pp=2"])
    assert default_world_size(experts, 0) == 24


ONLINE = ("algorithm={name: online_dpo}",)
MIX = ("mix={sft: {algorithm: {name: sft}, data: {prompts: a.jsonl}, prompts_per_step: 8}}",)


def test_valid_online_dpo_and_terms_have_no_violation() -> None:
    assert keys(*ONLINE, "steps.samples_per_prompt=2") == []
    assert keys(*MIX) == []
    assert keys(*MIX, "mix.sft.algorithm={name: kto, beta: 0.2}", "steps.updates_per_step=4") == []
    assert keys(*MIX, "mix.sft.algorithm.name=own.module:Mine", "algorithm={name: dpo}") == [
        "steps.samples_per_prompt"
    ]


def test_numbers_of_a_term_that_is_left_out_are_not_judged() -> None:
    odd = (*MIX, "mix.sft.prompts_per_step=7", "steps.updates_per_step=2")
    assert keys(*odd) == ["mix.sft.prompts_per_step"] and keys(*odd, "mix.sft.weight=0") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([*ONLINE, "steps.samples_per_prompt=1"], "steps.samples_per_prompt"),
        ([*ONLINE, "rollout.temperature=0"], "rollout.temperature"),
        ([*ONLINE, "steps.updates_per_step=2"], "steps.updates_per_step"),
        ([*ONLINE, "train.critic_learning_rate=1"], "train.critic_learning_rate"),
        (["mix={reward: {algorithm: {name: sft}, data: {prompts: a}}}"], "mix"),
        (["mix={Sft: {algorithm: {name: sft}, data: {prompts: a}}}"], "mix"),
        ([*MIX, "mix.sft.algorithm={name: grpo}"], "mix.sft.algorithm.name"),
        ([*MIX, "mix.sft.algorithm={name: online_dpo}"], "mix.sft.algorithm.name"),
        ([*MIX, "mix.sft.algorithm={name: reward_model}"], "mix.sft.algorithm.name"),
        (
            [*MIX, "algorithm={name: reward_model}", "steps.samples_per_prompt=1"],
            "mix.sft",
        ),
        (
            [*MIX, "mix.sft.prompts_per_step=6", "steps.updates_per_step=4"],
            "mix.sft.prompts_per_step",
        ),
        (
            [*MIX, "mix.sft.algorithm={name: kto}", "steps.updates_per_step=8"],
            "mix.sft.prompts_per_step",
        ),
        ([*MIX, "mix.sft.data.max_prompt_tokens=3900"], "train.micro_batch_tokens"),
        ([*MIX, "mix.sft.data.eval_prompts=b"], "mix.sft.data.eval_prompts"),
        ([*MIX, "mix.sft.data.eval_share=0.5"], "mix.sft.data.eval_share"),
        ([*MIX, "mix.sft.data.margin_key=m"], "mix.sft.data.margin_key"),
    ],
)
def test_online_dpo_and_terms_are_judged(overrides: list[str], key: str) -> None:
    assert keys(*overrides) == [key]


def test_a_reward_models_learning_rate_is_that_of_training() -> None:
    given = "algorithm={name: reward_model}", "steps.samples_per_prompt=1"
    config = load_config_dict(VALID, [*given, "train.critic_learning_rate=1e-5"])
    (found,) = check(config, 8, SHAPE)
    assert found.name == "train.critic_learning_rate"
    assert "set train.learning_rate" in found.remedy
