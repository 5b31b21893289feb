"""What sampling replay and score centering refuse, each by its name."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import QUICKSTART

from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import check
from hybridrl.config.rules_sampling import num_likely
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text

REPLAY, CENTERING = "algorithm.sampling_replay=rollout", "algorithm.score_centering=true"


def config(*overrides: str, algorithm: str = "grpo") -> Config:
    content: dict[str, Any] = {"run": {"name": "x"}, "model": {"init": "x"}}
    content |= {"algorithm": {"name": algorithm}, "rollout": {"engine": "hf"}}
    return load_config_dict(content, list(overrides))


def refusals(*overrides: str) -> dict[str, str]:
    errors = check(config(*overrides), 1, {"model_type": "llama"})
    return {error.name: str(error) for error in errors if "algorithm.s" in str(error)}


def test_what_the_engine_records_follows_from_the_knobs() -> None:
    kept = ("rollout.top_k=20", "rollout.top_p=0.9")
    for overrides, expected in (
        ((), 0),
        ((REPLAY, *kept), 20),
        ((CENTERING,), 64),
        ((REPLAY, CENTERING, *kept), 20),
    ):
        assert refusals(*overrides) == {}
        assert num_likely(config(*overrides), 1000) == expected
        assert num_likely(config(*overrides), 5) == min(expected, 5)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ((REPLAY,), "rollout.top_k", "1 to 1024"),
        ((REPLAY, "rollout.top_p=0.9"), "rollout.top_k", "Set rollout.top_k=512"),
        ((REPLAY, "rollout.top_k=1025"), "rollout.top_k", "got 1025"),
        ((REPLAY, "rollout.top_k=9", "rollout.engine=sglang"), "algorithm.sampling_replay", "hf"),
        ((CENTERING, "rollout.engine=sglang"), "algorithm.score_centering", "hf or vllm"),
        ((CENTERING, "rollout.top_p=0.9"), "algorithm.score_centering", REPLAY),
        ((CENTERING, "numerics.match=exact"), "algorithm.score_centering", "numerics.match=close"),
        ((REPLAY, "rollout.top_k=9", "agent.server=true"), "algorithm.sampling_replay", "branches"),
        ((CENTERING, "agent.server=true"), "algorithm.score_centering", "branches"),
    ],
)
def test_replay_and_centering_are_refused_by_name(
    overrides: tuple[str, ...], key: str, said: str
) -> None:
    assert said in refusals(*overrides)[key]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.correction.weight=sequence", "correction.weight"),
        ("algorithm.correction.reject=token", "correction.reject"),
        ("algorithm.correction.proximal=behaviour", "correction.proximal"),
        ("algorithm.objective=sequence_clip", "objective sequence_clip"),
    ],
)
def test_centering_names_the_knob_that_it_excludes(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"score_centering.*{said}"):
        config(CENTERING, override)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model", "online_dpo"])
def test_other_algorithms_do_not_have_the_knobs(algorithm: str) -> None:
    for knob in (REPLAY, CENTERING):
        with pytest.raises(ConfigError, match=knob.partition("=")[0]):
            config(knob, algorithm=algorithm)


def test_plan_counts_what_likely_tokens_take() -> None:
    model = [f"model.init={QUICKSTART / 'model'}", "steps.prompts_per_step=4"]
    sizes = [
        "rollout.max_new_tokens=10",
        "steps.samples_per_prompt=2",
        "train.micro_batch_tokens=128",
        "data.max_prompt_tokens=6",
    ]
    (off, _), (on, _) = (
        plan_report(config(*model, *sizes, *more), 1) for more in ((), (REPLAY, "rollout.top_k=6"))
    )
    assert off["memory"]["likely_tokens"] is None
    token, train = 8 * (6 + 2), 48 * 7 * 128
    sizes_on = {"token_bytes": token, "step_bytes": token * 80, "train_bytes": train}
    assert on["memory"]["likely_tokens"] == sizes_on
    peaks = (one["memory"]["train_peak_bytes"] for one in (on, off))
    assert next(peaks) - next(peaks) == train
    assert f"likely tokens: at most {token} B per sampled token" in plan_text(on)
