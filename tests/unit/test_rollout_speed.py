"""What `hybridrl bench rollout` generates, of which engines, and what it says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.cli import bench
from hybridrl.config.identity import run_folder
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.loop.rollout_speed import round_requests
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.engine import Request, SamplingParams
from hybridrl.rollout.registry import EnginePackage
from hybridrl.versions import Support

CONTENT = {
    "run": {"name": "a"},
    "model": {"init": "x"},
    "algorithm": {"name": "grpo"},
    "steps": {"prompts_per_step": 5, "samples_per_prompt": 3},
    "data": {"max_prompt_tokens": 7},
}
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=99, stop_token_ids=(1,))


def requests_of(rank: int, number: int = 1, seed: int = 0) -> list[Request]:
    """The requests of a rank of four; two replicas of TP2, or with rank 4 no replica at all."""
    layout = RolloutLayout.consecutive(4, 2).on((0, 1, 2, 3), 5)
    trainer: Any = SimpleNamespace(
        config=load_config_dict(CONTENT, [f"run.seed={seed}"]),
        sampler=SimpleNamespace(layout=layout, sampling=SAMPLING),
        world=SimpleNamespace(rank=rank),
        source=SimpleNamespace(shape=SimpleNamespace(vocab_size=300)),
    )
    return round_requests(trainer, number, 12)


def test_replicas_share_the_groups_of_a_step() -> None:
    assert requests_of(0) == requests_of(1) and requests_of(2) == requests_of(3)
    assert requests_of(4) == []
    both = [*requests_of(0), *requests_of(2)]
    assert sorted(one.request_id for one in both) == list(range(15))
    assert {len(one.prompt) for one in both} == {7}
    assert len({one.prompt for one in both}) == 5 and len({one.seed for one in both}) == 15
    assert {one.request_id // 3 for one in requests_of(0)} == {0, 2, 4}
    wanted = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=12)
    assert {one.sampling for one in both} == {wanted}


def test_rounds_share_no_prompt() -> None:
    rounds = [{one.prompt for one in requests_of(0, number)} for number in range(3)]
    assert all(not rounds[i] & rounds[j] for i in range(3) for j in range(i))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of ranks; those of vllm fail."""
    commands: list[list[str]] = []

    def report_of_ranks(arguments: Sequence[str], world_size: int) -> dict[str, Any] | int:
        commands.append([*arguments, str(world_size)])
        speed = {"tokens_per_s": 1234.5, "start_s": 3.0, "engine_bytes": 1 << 20}
        if any(one == "rollout.engine=vllm" for one in arguments):
            return 1
        return {**speed, "rank_bytes": 1 << 30}

    monkeypatch.setattr(bench, "report_of_ranks", report_of_ranks)
    monkeypatch.setattr(bench, "validate_training", lambda config, world_size: None)
    monkeypatch.setattr(bench, "_version", lambda name: f"{name} 1.0")
    return commands


def measure(names: Sequence[str], all_must: bool, *given: str) -> tuple[Any, int, list[Config]]:
    loaded: list[Config] = []

    def load(overrides: Sequence[str]) -> tuple[Config, int]:
        loaded.append(load_config_dict(CONTENT, list(overrides)))
        if "rollout.engine=sglang" in overrides:
            raise UserError("rollout.engine=sglang", "no sglang", "sglang", "Install it.")
        return loaded[-1], 2

    return *bench.measure(names, all_must, given, load, ["c.yaml", "--rounds", "3"]), loaded


def test_each_engine_has_ranks_of_its_own_and_a_folder_of_no_run(
    ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    report, code, configs = measure(["hf", "sglang"], False, "run.seed=4")
    assert code == 0
    assert [command[:6] for command in ran] == [
        ["bench", "rollout", "c.yaml", "--rounds", "3", "run.seed=4"]
    ]
    assert ran[0][6] == "rollout.engine=hf" and ran[0][-1] == "2"
    for config in configs:
        folder = run_folder(config)
        assert Path(config.run.dir) != Path("runs") and not folder.exists()
    assert report["engines"][1]["refused"].startswith("rollout.engine=sglang: got no sglang")
    title, begins, hf, sglang = capsys.readouterr().out.splitlines()
    assert begins == "hf       is starting"
    assert title == "5 prompts x 3 responses, 7 + 256 tokens each; 2 ranks, engines of TP1"
    speed, start, *rest = hf.removeprefix("hf").strip().split(", ")
    assert (speed, start) == ("1,234 tokens/s", "3 s to start")
    assert rest == ["per rank 1.0 MiB for the engine and 1.0 GiB in total (hf 1.0)"]
    assert sglang.startswith("sglang   not measured: rollout.engine=sglang: got no sglang")


def test_after_an_engine_whose_ranks_fail_none_is_measured(ran: list[list[str]]) -> None:
    report, code, _ = measure(["vllm", "hf"], False)
    assert code == 1 and len(ran) == 1 and report["engines"] == []


def test_engines_that_are_asked_for_must_be_able_to_and_one_at_least(ran: list[list[str]]) -> None:
    for names, all_must in ((["hf", "sglang"], True), (["sglang"], False)):
        with pytest.raises(UserError, match="no sglang"):
            measure(names, all_must)
    assert ran == []


def test_engines_are_those_installed_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str) -> EnginePackage | None:
        if name == "hf":
            return None
        support = Support("1", ("1",))
        return EnginePackage(
            lambda: name == "sglang",
            lambda cpu: name,
            lambda shape, dtype, cpu: (),
            {},
            lambda cpu: support,
        )

    monkeypatch.setattr(bench, "engine_package", package)
    assert bench.measured_engines(None) == ["hf", "sglang"]
    assert bench.measured_engines("vllm, hf,vllm") == ["vllm", "hf"]
