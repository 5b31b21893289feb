"""Predicted times of steps and passes against those that were measured on H200 and H100."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.config.source import read_model_config
from hybridrl.hybrid_engine.memory.headroom import SPARE_SHARE
from hybridrl.models.family import read_model
from hybridrl.parallel.host_gpus import Host
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner import estimate as estimate_module
from hybridrl.services.planner.estimate import estimate
from hybridrl.services.planner.hardware import ClusterFile, assume
from hybridrl.services.planner.micro_batch_sizes import Lengths
from hybridrl.services.planner.phase_memory import role_models
from hybridrl.services.planner.planned_models import planned_models
from hybridrl.services.planner.sizes import fullest_stage
from hybridrl.services.planner.times import (
    GIVING_BACK_S,
    MEMORY_DOUBT,
    PAIR_SHARE,
    ROOM_SHARE,
    Packs,
    PassTimes,
    giving_back_s,
    packs,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ROOT / "benchmarks" / "models"
SIZES = ("tp", "pp", "vpp", "cp", "ep")
# Hosts, engines and kernels have changed between measurements, so that a few of them are further
# away: nine of ten are within these bounds, and all within LARGEST.
STEP_BOUND, PASS_BOUND, GENERATION_BOUND, LARGEST = 0.15, 0.12, 0.25, 0.45
MEMORY_BOUND = 0.10  # of a peak with samples of usual length


def check(errors: dict[str, float], bound: float, centre: float) -> None:
    """Compares relative errors with the bounds, and the middle one with the one that is given."""
    sizes = sorted(map(abs, errors.values()))
    print(errors)
    assert sum(size < bound for size in sizes) >= 0.9 * len(sizes), errors
    assert sizes[-1] < LARGEST, errors
    assert abs(median(errors.values())) < centre, errors


def has_moved_state(case: dict[str, Any]) -> bool:
    config: dict[str, Any] = case.get("config", {"train": {}})
    return bool(config["train"].get("offload_optimizer"))


def cases(file: str) -> list[dict[str, Any]]:
    """Returns measured steps, without those of versions that moved the whole optimizer state."""
    found = json.loads((RESULTS / file).read_text())["cases"]
    found = [case for case in found if not has_moved_state(case)]
    return [case for case in found if "lag" not in " ".join(case["command"].split())]


def model_of(case: dict[str, Any], folder: Path) -> str:
    name = case["case"].partition("/")[0]
    file = min(MODELS.glob(f"*{name}.json"), key=lambda found: len(found.name))
    if "--num-layers" not in case["command"]:
        return str(file)
    num_layers = int(case["command"].partition("--num-layers ")[2].split()[0])
    made = folder / "config.json"
    made.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": num_layers}))
    return str(made)


def predicted_step(case: dict[str, Any], folder: Path, gpu: str = "H200") -> Any:
    told, work = case["config"], case["workload"]
    train = {key: told["train"][key] for key in ("tp", "pp", "cp", "ep", "micro_batch_tokens")}
    train |= {key: told["train"][key] for key in ("recompute",)}
    train["optimizer_memory"] = told["train"].get("optimizer_memory", "device")
    if told["train"]["share_prompts"] is not None:
        train["share_prompts"] = told["train"]["share_prompts"]
    config = load_config_dict(
        {
            "run": {"name": "a"},
            "model": {"init": model_of(case, folder)},
            "algorithm": {"name": "grpo", "kl_coef": told["algorithm"]["kl_coef"]},
            "train": train,
            "rollout": {
                "engine": "vllm",
                "tp": told["rollout"]["tp"],
                "ep": told["rollout"].get("ep") or 1,
                "max_batch": told["rollout"]["max_batch"],
                "max_new_tokens": work["response_tokens_max"],
            },
            "steps": {
                "prompts_per_step": work["prompts"],
                "samples_per_prompt": work["samples"],
            },
            "data": {"max_prompt_tokens": work["prompt_tokens"]},
            "layout": {"mean_response_tokens": round(work["response_tokens_mean"])},
        }
    )
    assumed, errors = assume(ClusterFile(gpu=gpu), case["world"], Host())
    assert assumed is not None and not errors
    models, _ = planned_models(config)
    assert models is not None
    family, shape = read_model(None, read_model_config(config.model))
    return estimate(config, role_models(config, models, family, shape), case["world"], assumed)


def laid_gradients(case: dict[str, Any]) -> int:
    """Returns bytes of gradients outside torch's allocator, which these files' peaks leave out."""
    lines = [line for line in case["ledger"] if line.startswith("policy gradients")]
    is_lent = any("lent by engine" in line for line in lines)
    return round(sum(float(line.split()[-2]) for line in lines) * 2**30) if is_lent else 0


# Dense ones of four GPUs came after the rates were fitted. Nothing is predicted of engines apart.
STEPS = [case for n in ("", "2gpu_", "4gpu_") for case in cases(f"step_{n}h200.json")]
STEPS = [case for case in STEPS if "apart" not in case["case"]]


def test_steps_take_what_is_predicted(tmp_path: Path) -> None:
    errors = {}
    for number, case in enumerate(STEPS):
        found = predicted_step(case, tmp_path)
        if "memory" in case:
            peak = case["memory"]["training"]["measured_bytes"] + laid_gradients(case)
            assert abs(found.memory.usual_train / peak - 1) < MEMORY_BOUND, case["case"]
        errors[f"{case['case']} {number}"] = found.times.step / case["median"]["step_s"] - 1
    check(errors, STEP_BOUND, centre=0.03)


def layouts(gpu: str) -> list[dict[str, Any]]:
    """Returns measured layouts as cases of bench_step.py."""
    found = json.loads((RESULTS / f"layouts_{gpu.lower()}.json").read_text())["cases"]
    return [as_step(case, gpu) for case in found]


def as_step(case: dict[str, Any], gpu: str) -> dict[str, Any]:
    _, train, rollout = case["case"].split("/")
    sizes = {axis: int(size) for axis, size in re.findall(r"(tp|pp|cp|ep)(\d+)", train)}
    told = dict(one.split("=") for one in case["options"] if "=" in one)
    world, tp = case["world"], int(rollout.removeprefix("tp"))
    prompts, samples = 16 * world, 8
    return {
        **case,
        "gpu": gpu,
        "command": "",
        "config": {
            "train": {
                **dict.fromkeys(("tp", "pp", "cp", "ep"), 1),
                **sizes,
                "micro_batch_tokens": int(case["options"][1]),
                "recompute": told["train.recompute"],
                "share_prompts": None,
            },
            "algorithm": {"kl_coef": float(told["algorithm.kl_coef"])},
            "rollout": {
                "tp": tp,
                "ep": int(told["rollout.ep"]),
                "max_batch": prompts * samples * tp // world,
            },
        },
        "workload": {
            **{"prompts": prompts, "samples": samples, "prompt_tokens": 256},
            **{"response_tokens_max": 512, "response_tokens_mean": 512},
        },
    }


MEASURED = [*layouts("H200"), *layouts("H100")]


def test_steps_of_layouts_take_what_is_predicted(tmp_path: Path) -> None:
    errors = {
        f"{case['case']} {number}": predicted_step(case, tmp_path, case["gpu"]).times.step
        / case["measured_s"]
        - 1
        for number, case in enumerate(MEASURED)
    }
    check(errors, STEP_BOUND, centre=0.05)


def test_a_step_to_which_no_constant_was_fitted_takes_what_is_predicted(tmp_path: Path) -> None:
    lags = json.loads((RESULTS / "step_h100_lag.json").read_text())["cases"]
    (case,) = (case for case in lags if case["case"] == "1.5b/dp2/tp1")
    seconds = predicted_step(case, tmp_path, "H100").times.step
    assert seconds == pytest.approx(case["median"]["step_s"], rel=0.05)


@pytest.mark.parametrize("model", ["0.5b", "1.5b", "7b"])
def test_the_layout_with_the_shortest_predicted_step_is_within_5_percent_of_the_best(
    model: str, tmp_path: Path
) -> None:
    measured = [case for case in MEASURED if case["model"] == model and case["world"] == 2]
    assert len(measured) >= 4
    chosen = min(measured, key=lambda case: predicted_step(case, tmp_path).times.step)
    best = min(case["measured_s"] for case in measured)
    print(model, chosen["case"], f"{chosen['measured_s'] / best - 1:.1%} beyond the best")
    assert chosen["measured_s"] <= 1.05 * best


def mixtures() -> list[dict[str, Any]]:
    """Returns layouts of a mixture."""
    found = json.loads((RESULTS / "layouts_moe_h200.json").read_text())
    return [as_step(case, "H200") | {"command": found["command"]} for case in found["cases"]]


@pytest.mark.parametrize(
    ("part", "bound", "centre"),
    [
        ("step", STEP_BOUND, 0.11),
        ("update", PASS_BOUND, 0.07),
        ("reference", PASS_BOUND, 0.06),
        ("generation", GENERATION_BOUND, 0.16),
    ],
)
def test_steps_of_mixtures_take_what_is_predicted(
    part: str, bound: float, centre: float, tmp_path: Path
) -> None:
    names = {"reference": "scoring"}
    errors = {}
    for number, case in enumerate(mixtures()):
        seconds = getattr(predicted_step(case, tmp_path).times, names.get(part, part))
        measured = case["measured_s"] if part == "step" else case["median"]["parts_s"][part]
        errors[f"{case['case']} {number}"] = seconds / measured - 1
    check(errors, bound, centre)


def test_the_layout_chosen_for_a_mixture_is_within_5_percent_of_the_best(tmp_path: Path) -> None:
    measured = [case for case in mixtures() if case["world"] == 2]
    assert len(measured) >= 10
    chosen = min(measured, key=lambda case: predicted_step(case, tmp_path).times.step)
    assert chosen["measured_s"] <= 1.05 * min(case["measured_s"] for case in measured)


def gathered() -> dict[str, Any]:
    run = json.loads((RESULTS / "train_moe_tp_h100.json").read_text())["runs"]["gathered"]
    return {**run["cases"][0], "command": run["command"], "commit": run["commit"]}


def passes() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields the passes of the newest measurement of each case."""
    found = [*cases("train_h200.json"), *cases("train_moe_h200.json"), gathered()]
    usual = [c for c in found if c["train"]["fp8"] == "none" and c.get("grouped_gemm") != "cublas"]
    for case in {case["case"]: case for case in usual}.values():
        for name in case["passes"]:
            if "tails" not in name:
                yield f"{case['case']} {name}", case, name


def test_passes_take_what_is_predicted(tmp_path: Path) -> None:
    errors = {key: error_of_pass(case, name, tmp_path) for key, case, name in passes()}
    check(errors, PASS_BOUND, centre=0.02)


def error_of_pass(case: dict[str, Any], name: str, tmp_path: Path) -> float:
    """Returns by how much a predicted pass is longer, as a share of the measured one."""
    train, found = case["train"], case["passes"][name]
    command = case["command"]

    def told(key: str, default: int) -> int:
        return int(command.partition(f"--{key} ")[2].split()[0]) if key in command else default

    prompt, response = told("prompt-tokens", 256), told("response-tokens", 512)
    is_shared = "shared" in name
    sizes = {axis: train.get(axis) or 1 for axis in SIZES}
    layout = TrainLayout(case["world"], **sizes)
    config = load_config_dict(
        {
            "run": {"name": "a"},
            "model": {"init": model_of(case, tmp_path)},
            "algorithm": {"name": "grpo"},
            "train": {
                "micro_batch_tokens": train["micro_batch_tokens"],
                "share_prompts": is_shared,
            },
            "steps": {
                "prompts_per_step": max(1, found["tokens"] // (prompt + response) // 8),
                "samples_per_prompt": 8,
            },
            "rollout": {"max_new_tokens": response},
            "data": {"max_prompt_tokens": prompt},
        }
    )
    assumed, _ = assume(ClusterFile(gpu="H200"), case["world"], Host())
    assert assumed is not None
    family, shape = read_model(None, read_model_config(config.model))
    budget = train["micro_batch_tokens"]
    packed = packs(config, shape, Lengths.of(config), layout.dp, layout.cp, budget)
    predicts = PassTimes(shape, layout, assumed, shape.vocab_size)
    if "update" in name:
        num_params, _ = fullest_stage(family, shape, layout)
        seconds = predicts.update_s(packed, train["recompute"], num_params)
    else:
        seconds = predicts.forward_s(packed)
    return seconds / (found["ms"] / 1e3) - 1


def test_updates_of_the_mtp_layer_take_the_time_of_a_layer_and_a_second_head() -> None:
    shape = read_model(None, json.loads((MODELS / "qwen3.5-4b.json").read_text()))[1]
    assumed, _ = assume(ClusterFile(gpu="H200"), 1, Host())
    assert assumed is not None
    found = Packs(4, 4 * 16384, 4 * 16384 * 256, 4 * 8192)
    plain, trained = (
        PassTimes(one, TrainLayout(1), assumed, shape.vocab_size)
        for one in (shape, replace(shape, has_mtp=True))
    )
    assert trained.forward_s(found) == plain.forward_s(found)  # no pass without gradients has it
    attention = 2560 * (2 * 4096 + 2 * 1024) + 4096 * 2560
    layer = 3 * 2 * found.tokens * (attention + 3 * 2560 * 9216 + 2 * 2560**2)
    head = 2 * 2 * found.head_tokens * 2560 * shape.vocab_size
    products_s = (layer + head) / (assumed.values["matrix_tflops"].value * 1e12)
    for recompute in ("none", "full"):
        added_s = trained.update_s(found, recompute, 0) - plain.update_s(found, recompute, 0)
        assert products_s < added_s < 1.4 * products_s


def test_a_pipeline_with_one_micro_batch_gains_nothing_and_one_with_many_nearly_all() -> None:
    shape = read_model(None, json.loads((MODELS / "qwen2.5-7b.json").read_text()))[1]
    assumed, _ = assume(ClusterFile(gpu="H200"), 4, Host())
    assert assumed is not None
    seconds = {
        (pp, num): PassTimes(shape, TrainLayout(4, pp=pp), assumed, 1).forward_s(
            Packs(num, num * 16384, num * 16384 * 256, num * 8192)
        )
        for pp in (1, 4)
        for num in (1, 100)
    }
    assert seconds[4, 1] == pytest.approx(seconds[1, 1], rel=0.02)
    assert seconds[4, 100] == pytest.approx(seconds[1, 100] / 4 * 1.03, rel=0.02)


def test_a_step_with_short_responses_takes_what_the_plan_says_of_its_tokens(tmp_path: Path) -> None:
    """The plan counts the longest: 73 GiB, where a step of short ones took 56."""
    found = json.loads((RESULTS / "step_h200.json").read_text())["cases"]
    tailed = [one for one in found if one["workload"]["workload"] == "tailed"]
    case = next(one for one in tailed if one["case"].startswith("0.5b"))
    work = case["workload"]
    # What each of the two replicas has, a prompt once for its 8 samples.
    repeated = (work["samples"] - 1) * work["prompt_tokens"] * work["prompts"]
    tokens = (work["tokens"] - repeated) // 2
    assert tokens < case["config"]["train"]["micro_batch_tokens"]
    shorter = {**case["config"]["train"], "micro_batch_tokens": tokens}
    case = {**case, "config": {**case["config"], "train": shorter}}
    memory = predicted_step(case, tmp_path).memory
    # Within 7%: the tokens are a half of all, of which the fuller replica has a little more.
    assert memory.train == pytest.approx(case["measured_memory"]["update"], rel=0.07)


def test_gathered_tokens_bring_their_weights_for_all_experts() -> None:
    shape = read_model(None, json.loads((MODELS / "qwen3-30b-a3b.json").read_text()))[1]
    assumed, _ = assume(ClusterFile(gpu="H200"), 2, Host())
    assert assumed is not None and shape.moe is not None
    more = replace(shape, moe=replace(shape.moe, num_experts=shape.moe.num_experts + 100))
    found = Packs(1, 1000, 1000.0, 1000)

    def added_s(layout: TrainLayout) -> float:
        times = (PassTimes(one, layout, assumed, 1) for one in (shape, more))
        fewer_s, more_s = (one._sent_s(found) for one in times)
        return more_s - fewer_s

    # Of each of the other rank's 500 tokens an fp32 weight and a byte an expert.
    sent_s = 500 * 5 * 100 * shape.num_layers / (PAIR_SHARE * assumed.cluster.link_rate)
    assert added_s(TrainLayout(2, tp=2, ep=2)) == pytest.approx(sent_s, rel=1e-6)
    assert added_s(TrainLayout(2, ep=2)) == 0.0  # sent once an expert, with one weight each


def test_memory_that_is_given_in_turn_costs_time_where_both_phases_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7B TP4 on four H200: micro-batches of 69,760 tokens leave the engine room, since it lends
    memory to gradients: 88046a9 has `reshard/keeps_memory` 1 in each step. Without it had none.
    """
    assert ROOM_SHARE == 1 - SPARE_SHARE
    found = {}
    for case in cases("step_4gpu_h200.json"):
        told = case["config"]["train"]
        if case["case"] == "7b/tp4/tp1" and told["share_prompts"] is None:
            if case["commit"] == "88046a9":
                kept = [step["metrics"]["reshard/keeps_memory"] for step in case["steps"]]
                assert kept == [1.0] * 4
            for lends in (True, False):
                with monkeypatch.context() as patched:
                    if not lends:
                        patched.setattr(estimate_module, "gradient_bytes", lambda config: 0)
                    times = predicted_step(case, tmp_path).times
                found[lends, told["micro_batch_tokens"]] = times.reshard
    small = found[True, 34880]
    assert found[False, 69760] > GIVING_BACK_S > 5 * small
    assert found[False, 34880] == small
    # Predicted to take 0.89 of the memory, it may not have kept it.
    assert small < found[True, 69760] < small + GIVING_BACK_S / 2


def test_micro_batches_that_may_leave_the_engine_no_room_are_predicted_slower(
    tmp_path: Path,
) -> None:
    """1.5B DP2: with micro-batches of 69,760 tokens and selective recomputation, which would be as
    fast, both phases were predicted to just fit and did not: 3.85 s, 0.2 of them for the changes;
    3.46 with the smaller ones, on another host.
    """
    both = [case for case in MEASURED if case["case"] == "1.5b/dp2/tp1" and case["world"] == 2]
    measured = {case["options"][1]: case["measured_s"] for case in both}
    assert measured["34880"] < 0.95 * measured["69760"]
    predicted = {case["options"][1]: predicted_step(case, tmp_path).times.step for case in both}
    assert predicted["34880"] < predicted["69760"] - GIVING_BACK_S / 4


def test_a_step_of_decoding_reads_no_embedding_that_is_not_the_output_layer(tmp_path: Path) -> None:
    """7B: a tied embedding is the output layer, which each step reads whole."""
    case = next(case for case in MEASURED if case["case"] == "7b/dp2/tp1")
    own = json.loads(next(MODELS.glob("*7b.json")).read_text())
    seconds = {}
    for is_tied in (False, True):
        (tmp_path / "a7b.json").write_text(json.dumps(own | {"tie_word_embeddings": is_tied}))
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(globals(), "MODELS", tmp_path)
            seconds[is_tied] = predicted_step(case, tmp_path).times.generation
    assert not own["tie_word_embeddings"]
    assert seconds[True] == pytest.approx(seconds[False], rel=1e-3)


def test_giving_memory_back_is_expected_where_both_phases_hardly_fit() -> None:
    shares = [0.5, ROOM_SHARE - MEMORY_DOUBT, ROOM_SHARE, ROOM_SHARE + MEMORY_DOUBT, 2.0]
    expected = [0, 0, GIVING_BACK_S / 2, GIVING_BACK_S, GIVING_BACK_S]
    assert [giving_back_s(share) for share in shares] == pytest.approx(expected)
