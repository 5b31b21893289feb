"""Placements: how ranks are written, which they are, and what is refused, before ranks start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from planned_configs import write_config

from hybridrl.config.load import load_config_dict
from hybridrl.config.placement import Machines, Place, Placement, shown
from hybridrl.config.rules import check, default_world_size
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.loop import preflight as validate
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.plan_report import plan_report

SMALL = {"hidden_size": 96, "intermediate_size": 192, "num_key_value_heads": 2, "vocab_size": 199}
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4}
UNLIKE = ("NVIDIA H100 80GB HBM3",) * 2 + ("NVIDIA A30",) * 2
ONE_REWARD = "reward.functions={judge: {function: reward_model, options: {path: j}}}"


def config_of(*overrides: str, algorithm: str = "grpo", **sections: object) -> Config:
    content = {
        "run": {"name": "a"},
        "model": {"init": "m"},
        "algorithm": {"name": algorithm},
        "steps": {"samples_per_prompt": 8 if algorithm == "grpo" else 1},
        **sections,
    }
    return load_config_dict(content, list(overrides))


def found(
    *overrides: str,
    world: int = 4,
    node: int | None = 2,
    gpus: Sequence[str] | None = None,
    **sections: Any,
) -> list[str]:
    """Returns the messages of what is wrong with a configuration."""
    machines = Machines(world, node, gpus)
    config = config_of(*overrides, **sections)
    return [str(error) for error in check(config, world, SHAPE, machines=machines)]


def place_of(*overrides: str, world: int = 8, **machines: Any) -> Placement:
    """Returns a placement without errors."""
    content = config_of(*overrides, algorithm="ppo", **machines.pop("sections", {}))
    placement, errors = placed(content, Machines(world, **machines))
    assert errors == []
    return placement


@pytest.mark.parametrize(
    ("written", "kept", "ranks"),
    [
        ("all", "all", range(8)),
        (3, "3", [3]),
        ("3", "3", [3]),
        ("0-3", "0-3", range(4)),
        ("first:2", "first:2", [0, 1]),
        ("last:2", "last:2", [6, 7]),
        ("node:1", "node:1", range(4, 8)),
        ("node:0-1", "node:0-1", range(8)),
        ("gpu:h100", "gpu:h100", [0, 1]),
        ("gpu:NVIDIA A30", "gpu:NVIDIA A30", range(2, 8)),
        ("5, 0-1,last:1", "5,0-1,last:1", [0, 1, 5, 7]),
        ("0-2,1-3", "0-2,1-3", range(4)),
        ([0, 2, 5], "0,2,5", [0, 2, 5]),
        ([0, "4-5", "last:1"], "0,4-5,last:1", [0, 4, 5, 7]),
    ],
)
def test_ranks_may_be_written_in_many_ways(
    written: object, kept: str, ranks: Sequence[int]
) -> None:
    """As a section, as ranks alone in its place, and as an override of either."""
    given = json.dumps(written).replace('"', "")
    configs = [
        config_of(placement={"policy": {"ranks": written}}),
        config_of(placement={"policy": written}),
        config_of(f"placement.policy.ranks={given}"),
        config_of(f"placement.policy={given}"),
    ]
    gpus = (*UNLIKE, *["NVIDIA A30"] * 4) if "gpu" in kept else None
    for config in configs:
        assert config.placement.policy.ranks == kept
        placement, errors = placed(config, Machines(8, 4, gpus))
        assert errors == [] and placement.policy.ranks == tuple(ranks)


def test_nothing_said_is_all_models_on_all_ranks() -> None:
    config = config_of("train.tp=2", "train.pp=2", "train.vpp=2")
    placement, errors = placed(config, Machines(8))
    everyone = tuple(range(8))
    assert errors == [] and placement.is_shared
    assert placement == Placement(8, Place(everyone, tp=2, pp=2, vpp=2), everyone)
    assert placement.of("critic") == placement.of("reward judge") == placement.policy
    same, _ = placed(config_of("placement.policy=all", "placement.critic=0-7"), Machines(8))
    assert same.is_shared and same.of("critic") == same.policy


def test_roles_have_sizes_of_their_own_and_else_those_of_train() -> None:
    placement = place_of(
        "train.tp=2",
        "train.pp=2",
        "train.vpp=2",
        "placement.policy=0-3",
        "placement.critic.tp=1",
        "placement.reference={ranks: 4-7, pp: 1}",
        "placement.rewards.judge=last:4",
        "placement.rewards.other={ranks: [0, 1], tp: 1, pp: 2, cp: 1, ep: 1}",
    )
    policy = (0, 1, 2, 3)
    assert placement.policy == Place(policy, tp=2, pp=2, vpp=2)
    assert placement.rollout == tuple(range(8)) and not placement.is_shared
    assert placement.of("critic") == Place(policy, tp=1, pp=2, vpp=2)
    assert placement.of("reference") == Place((4, 5, 6, 7), tp=2)  # no pipeline, none of chunks
    assert placement.of("reward judge") == Place((4, 5, 6, 7), tp=2, pp=2, vpp=2)
    assert placement.of("reward other") == Place((0, 1), pp=2, vpp=2)
    assert placement.of("teacher") == placement.of("reward third") == placement.policy


def test_ranks_are_shown_as_they_are_written() -> None:
    for text in ("0-3,6", "5", "0-1,3,5-7"):
        assert shown(place_of(f"placement.policy={text}").policy.ranks) == text


HOW = "all, 3, 0-3, first:2, last:2, node:0, gpu:H100, or several, joined by ','"


@pytest.mark.parametrize("written", ["0:3", "", "-1", "0-", "first", "node:", True, 1.5, ["a"]])
def test_ranks_that_mean_nothing_are_refused_as_they_are_read(written: object) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(placement={"policy": {"ranks": written}})
    (violation,) = error.value.violations
    assert violation.name == "placement.policy.ranks" and violation.allowed == HOW


@pytest.mark.parametrize(
    ("override", "algorithm", "key", "said"),
    [
        ("policy=2-6", "grpo", "policy.ranks: got 2-6", "ranks 0 to 3, because the run has 4"),
        ("policy=first:5", "grpo", "policy.ranks: got first:5", "at most 4, the number of ranks"),
        ("critic=last:0", "ppo", "critic.ranks: got last:0", "or remove the role from placement"),
        ("rollout=node:2", "grpo", "rollout.ranks: got node:2", "nodes 0 to 1, with 2 ranks each"),
        ("rollout=gpu:H100", "grpo", "rollout.ranks: got gpu:H100", "the GPUs are unknown"),
        (
            "critic={ranks: 1-3, tp: 2}",
            "ppo",
            "critic: tp * pp * cp: got 2 * 1 * 1 = 2",
            "a divisor of its 3 ranks, 1-3. Set placement.critic.tp, .pp or .cp",
        ),
        ("critic={ranks: 0-1, ep: 2}", "ppo", "critic.ep: got 2", "Set placement.critic.ep=1."),
        ("critic=0-1", "grpo", "critic: got 0-1", "algorithm grpo, which has no critic."),
        ("reference.tp=2", "grpo", "reference: got a layout", "which has no reference"),
        ("teacher=0", "ppo", "teacher: got 0", "algorithm ppo, which has no teacher"),
        ("rewards.judge=0", "grpo", "rewards.judge: got 0", "no scorer has one. Remove placement."),
    ],
)
def test_what_is_refused_is_named_with_its_remedy(
    override: str, algorithm: str, key: str, said: str
) -> None:
    (text,) = found(f"placement.{override}", algorithm=algorithm)
    assert text.startswith(f"placement.{key}; allowed: ") and said in text


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["policy=0-2", "train.tp=2"], "train.tp * train.pp * train.cp: got", "the 3 ranks of"),
        (["rollout=1-3", "rollout.tp=2", "rollout.engine=vllm"], "rollout.tp: got 2", "3 ranks of"),
        (["rewards.juge=0", ONE_REWARD], "placement.rewards.juge: got 0", "only judge has one"),
        (["policy=0", "placement.rollout=2"], "placement: got no model", "ranks 1,3 of 4"),
    ],
)
def test_what_does_not_fit_together_is_named(overrides: list[str], key: str, said: str) -> None:
    (text,) = found(f"placement.{overrides[0]}", *overrides[1:])
    assert text.startswith(key) and said in text


def test_more_stages_than_layers_of_a_critics_own_size_are_refused() -> None:
    ranks = "placement.critic={ranks: 0-7, tp: 1, pp: 8}"
    assert found(ranks, world=8, algorithm="ppo") == [
        "placement.critic.pp: got 8; allowed: at most the model's 4 layers. Change "
        "placement.critic.pp."
    ]
    # Three stages of four layers are one of two layers and two of one.
    assert not found("placement.critic={ranks: 0-2, tp: 1, pp: 3}", algorithm="ppo")


def test_heads_that_a_critics_own_size_cannot_cut_are_refused() -> None:
    ranks = "placement.critic={ranks: 0-7, tp: 8}"
    assert found(ranks, world=8, algorithm="ppo") == [
        "placement.critic.tp: got 8; allowed: a divisor of the model's 12 attention heads. Change "
        "placement.critic.tp."
    ]
    # A size that is train's is said once, of train.
    both = found("train.tp=8", "placement.critic=0-7", world=8, algorithm="ppo")
    assert [text.split(":")[0] for text in both] == ["train.tp"]


def test_gpus_of_several_kinds_are_not_mixed_by_accident() -> None:
    told = "placement.critic.ranks: got 1-2, which have NVIDIA A30 and NVIDIA H100 80GB HBM3; "
    told += "allowed: GPUs of one kind, because all ranks would wait for the slowest GPU. "
    told += "Select ranks with gpu:NAME, or set placement.critic.mixed_gpus=true."
    assert found("placement.critic=1-2", algorithm="ppo", gpus=UNLIKE) == [told]
    mixed = "placement.critic={ranks: 1-2, mixed_gpus: true}"
    assert found(mixed, algorithm="ppo", gpus=UNLIKE) == []
    assert found("placement.critic=gpu:a30", algorithm="ppo", gpus=UNLIKE) == []
    assert found("placement.critic=gpu:H200", algorithm="ppo", gpus=UNLIKE) == [
        "placement.critic.ranks: got gpu:H200; allowed: a part of a GPU's name: NVIDIA A30, NVIDIA "
        "H100 80GB HBM3. Name one of these GPUs."
    ]


def test_nodes_that_are_not_known_are_refused() -> None:
    assert found("placement.policy=node:0", node=None) == [
        "placement.policy.ranks: got node:0; allowed: rank numbers, because the ranks of each "
        "node are unknown. Name ranks, or start with torchrun, which sets LOCAL_WORLD_SIZE."
    ]


def test_what_is_wrong_comes_together() -> None:
    texts = found("placement.policy=0-9", "placement.critic=last:0", "train.vpp=2", "model.path=p")
    assert [text.split(": ")[0] for text in texts] == [
        "model.path and model.init",
        "placement.policy.ranks",
        "placement.critic.ranks",
        "train.vpp",
    ]
    texts = found("placement.critic=0", "placement.reference.tp=2", "placement.rewards.a=1")
    assert [text.split(": ")[0] for text in texts] == [
        "placement.reference",
        "placement.critic",
        "placement.rewards.a",
    ]


def test_what_only_the_ranks_know_is_left_to_them() -> None:
    config = config_of("placement.policy=gpu:H100", "train.cp=3", "train.vpp=2")
    assert [error.name for error in check(config, 4, SHAPE)] == ["train.vpp"]
    numbers = config_of("placement.policy=0-9")
    assert [error.name for error in check(numbers, 4, SHAPE)] == ["placement.policy.ranks"]


def test_a_host_tells_the_rules_what_it_knows_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def machines(*overrides: str, world: int = 4) -> Machines | None:
        return validate.local_machines(config_of(*overrides).placement, world)

    names: tuple[str, ...] | None = UNLIKE
    monkeypatch.setattr(validate, "local_gpu_names", lambda: names)
    monkeypatch.setattr(validate, "num_local_gpus", lambda: 4)
    monkeypatch.delenv("RANK", raising=False)
    of_h100 = "placement.policy=gpu:H100"
    assert machines() == Machines(4)  # nobody asks
    assert machines(of_h100) == Machines(4, 4, UNLIKE)
    assert machines("placement.policy=0-1", world=2) == Machines(2, 2, UNLIKE[:2])
    # Under torchrun on two nodes; and where it is not known which of the GPUs is the first.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machines(of_h100, world=8) is None
    assert machines("placement.policy=node:0", world=8) == Machines(8, 4)
    assert machines(of_h100) == Machines(4, 4, UNLIKE)
    names = None
    assert machines(of_h100) is None
    assert machines("placement.policy=node:0") == Machines(4, 4)
    # Without GPUs there is nothing to wait for.
    monkeypatch.setattr(validate, "num_local_gpus", lambda: 0)
    assert machines(of_h100) == Machines(4, 4)


@pytest.mark.parametrize(
    ("overrides", "layouts"),
    [
        ([], [TrainLayout(4, tp=2)]),
        (["placement.rollout=0-1"], [TrainLayout(4, tp=2)]),
        (["placement.critic.tp=2"], [TrainLayout(4, tp=2)]),
        (["placement.policy=0-1"], [TrainLayout(2, tp=2)]),
        (
            ["placement.policy=0-1", "placement.critic={ranks: 2-3, tp: 1}"],
            [TrainLayout(2, tp=2), TrainLayout(2)],
        ),
        (
            ["placement.critic.tp=1", "placement.reference.tp=1"],
            [TrainLayout(4, tp=2), TrainLayout(4)],
        ),
    ],
)
def test_open_files_are_counted_for_the_groups_of_every_place(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], layouts: list[TrainLayout]
) -> None:
    asked: list[list[TrainLayout]] = []
    monkeypatch.setattr(validate, "shortage", lambda _, found, is_cpu: asked.append(found))
    config = config_of("train.tp=2", *overrides, algorithm="ppo")
    validate._descriptors(config, Machines(4))
    assert asked == [layouts]


def test_ranks_on_cpu_are_as_many_as_a_placement_names() -> None:
    def default(*overrides: str) -> int:
        return default_world_size(config_of(*overrides, algorithm="ppo"), num_gpus=0)

    assert default() == 1
    assert default("placement.policy=0-1", "placement.critic=4") == 5
    assert default("placement.rollout=first:3", "train.tp=2") == 3
    assert default("placement.rollout=last:2", "train.tp=4") == 4
    assert default("placement.policy=all", "placement.rewards.judge=[1, 3]") == 4
    assert default("placement.policy=node:1") == 1  # how large nodes are is not known
    assert default_world_size(config_of("placement.policy=0-1"), num_gpus=8) == 8


def test_a_teacher_and_reward_models_are_cut_as_their_own_sizes_say(tmp_path: Path) -> None:
    """What they cannot be cut into is refused by the key that says it."""
    for name, heads, layers in (("m", 12, 4), ("j", 6, 1)):
        sizes = {"num_attention_heads": heads, "num_hidden_layers": layers}
        write_config(tmp_path / name, **SMALL, **sizes)

    def told(role: str, *overrides: str) -> list[UserError]:
        path = tmp_path / "j"
        options = f"{{function: reward_model, options: {{path: '{path}'}}}}"
        samples, beside = 2, f"reward.functions={{judge: {options}}}"
        if role == "teacher":
            samples, beside = 1, f"algorithm={{name: distillation, teacher: '{path}'}}"
        sections = {
            "model": {"init": str(tmp_path / "m")},
            "steps": {"samples_per_prompt": samples},
        }
        config = config_of("train.tp=4", beside, *overrides, **sections)
        return plan_report(config, 4)[1]

    for role, prefix in (("teacher", ""), ("rewards.judge", "reward judge: ")):
        (error,) = told(role)
        assert error.name == f"{prefix}train.tp" and "6 attention heads" in error.allowed
        key = f"placement.{role}"
        assert told(role, f"{key}.tp=2") == []
        assert [e.name for e in told(role, f"{key}={{tp: 2, pp: 2}}")] == [f"{prefix}{key}.pp"]
