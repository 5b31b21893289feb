"""What is asked of a teacher before any rank starts, and when no reward is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned_configs import QWEN25_7B

from hybridrl.config.identity import identity as identity_of
from hybridrl.config.identity import identity_violations
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.config.teacher import is_scored
from hybridrl.errors import ConfigError
from hybridrl.loop.preflight import model_violations, validate_training
from hybridrl.services.planner.plan_report import plan_report

SMALL = QWEN25_7B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
# Twice as wide, of another family.
LARGE = {
    **SMALL,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TOKENS = {"a": 0, "b": 1, "c": 2}
ADDED = [{"id": 3, "content": "<end>"}]


def write(folder: Path, content: dict[str, Any], tokens: object = None) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    if tokens is not None:
        text = json.dumps({"model": {"vocab": tokens}, "added_tokens": ADDED})
        (folder / "tokenizer.json").write_text(text)


def config_of(folder: Path, *overrides: str, name: str = "distillation") -> Config:
    base = {
        "run": {"name": "a", "dir": str(folder / "runs")},
        "model": {"init": str(folder / "student")},
        "algorithm": {"name": name, "teacher": str(folder / "teacher")},
    }
    return load_config_dict(base, overrides)


def violations(folder: Path, *overrides: str, **given: str) -> list[str]:
    return [str(found) for found in model_violations(config_of(folder, *overrides, **given), 8)[1]]


def test_a_teacher_of_another_family_and_size_may_teach(tmp_path: Path) -> None:
    write(tmp_path / "student", SMALL)
    write(tmp_path / "teacher", LARGE)
    for name in ("distillation", "gkd", "on_policy_distillation"):
        assert violations(tmp_path, "train.tp=2", "train.pp=2", name=name) == []


@pytest.mark.parametrize(
    ("teacher", "overrides", "said"),
    [
        ({}, ["algorithm.teacher=none/such/place"], "algorithm.teacher: got none/such/place"),
        ({}, ["algorithm.top_k=257"], "algorithm.top_k: got 257; allowed: at most the model's 256"),
        ({"vocab_size": 250}, [], "with 250 tokens; allowed: a teacher with the policy's 256"),
        ({"vocab_size": 300}, [], "or with more tokens and a tokenizer.json that agrees"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}, ["train.tp=4"],
         "train.tp: got 4; allowed: a divisor of the teacher's 6 attention heads"),
        ({"num_hidden_layers": 1}, ["train.pp=2"], "at most the teacher's 1 layers"),
        ({"architectures": ["GPT2LMHeadModel"]}, [], "GPT2LMHeadModel"),
        ({}, ["train.critic_learning_rate=1e-5"], "train.critic_learning_rate"),
        ({}, ["steps.samples_per_prompt=2"], "1 with algorithm distillation, which uses responses"),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_teach_is_refused_by_name(
    tmp_path: Path, teacher: dict[str, Any], overrides: list[str], said: str
) -> None:
    write(tmp_path / "student", SMALL)
    write(tmp_path / "teacher", {**LARGE, **teacher})
    found = violations(tmp_path, *overrides)
    assert len(found) == 1 and said in found[0], found


def test_a_larger_embedding_is_taken_where_the_tokenizers_agree(tmp_path: Path) -> None:
    write(tmp_path / "student", SMALL, TOKENS)
    write(tmp_path / "teacher", {**LARGE, "vocab_size": 300}, TOKENS | {"d": 4})
    assert violations(tmp_path) == []
    # A list, as unigram tokenizers have it.
    content = {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}, "added_tokens": []}
    (tmp_path / "student" / "tokenizer.json").write_text(json.dumps(content))
    assert violations(tmp_path) == []
    # Of the same size, but another tokenizer's.
    write(tmp_path / "other", LARGE, {"a": 0, "c": 1, "b": 2})
    found = violations(tmp_path, f"algorithm.teacher={tmp_path / 'other'}")
    assert len(found) == 1
    assert (
        "in which token 1 is 'c'; allowed: a teacher with the policy's tokens, in which token 1"
        in found[0]
    )
    assert "a teacher from the policy's model family" in found[0]


def test_a_teacher_alone_needs_no_answers_in_the_data(tmp_path: Path) -> None:
    write(tmp_path / "student", SMALL, TOKENS)
    write(tmp_path / "teacher", LARGE, TOKENS)
    weights = tmp_path / "teacher" / "model.safetensors"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p"}\n')
    data = f"data.prompts={rows}"
    for name in ("on_policy_distillation", "gkd"):
        config = config_of(tmp_path, data, "rollout.engine=hf", name=name)
        assert not is_scored(config)
        with pytest.raises(ConfigError) as caught:  # the weights are looked for before any rank
            validate_training(config, 1)
        assert [str(weights.parent) in str(v) for v in caught.value.violations] == [True]
    needing = (
        ["algorithm.reward_coef=0.1", "steps.samples_per_prompt=2"],
        ["reward.function=gsm8k"],
        [f"data.eval_prompts={rows}"],
        ["data.eval_share=0.5"],
    )
    for overrides in needing:
        config = config_of(tmp_path, data, *overrides, name="on_policy_distillation")
        assert is_scored(config)
        with pytest.raises(ConfigError, match="'answer'"):
            validate_training(config, 1)
    assert is_scored(config_of(tmp_path, "algorithm={name: grpo}"))


def test_the_teacher_is_in_the_plan_and_in_the_identity(tmp_path: Path) -> None:
    write(tmp_path / "student", SMALL)
    write(tmp_path / "teacher", LARGE)

    def memory(*overrides: str) -> dict[str, int]:
        config = config_of(tmp_path, "rollout.engine=vllm", "model.dtype=bfloat16", *overrides)
        report, found = plan_report(config, 4)
        assert found == []
        return report["memory"]

    plain = memory("algorithm={name: sft}", "train.tp=2", "train.pp=2")
    taught = memory("train.tp=2", "train.pp=2")
    # Llama, 2 of 4 layers on a stage, halves of everything but norms and what a stage has besides.
    hidden, ffn, vocab = 128, 192, 256
    layer = 4 * hidden * hidden // 2 + 3 * hidden * ffn // 2 + 2 * hidden
    stage = 2 * layer + vocab * hidden // 2 + hidden  # the last one: head and final norm
    for phase in ("train_peak_bytes", "rollout_peak_bytes"):
        assert taught[phase] - plain[phase] == 2 * stage
    config = config_of(tmp_path)
    moved = config_of(tmp_path, "algorithm.teacher=elsewhere/model")
    found = identity_violations(identity_of(config), moved)
    assert [v.name for v in found] == ["algorithm.teacher"]
