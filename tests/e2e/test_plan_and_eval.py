"""The commands that only look, and the road from nothing to a run folder, on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented import undocumented
from planned_configs import write_config
from refusals import QUICKSTART, files_below, refuse, succeed
from transformers import Qwen3Config, Qwen3ForCausalLM

from hybridrl.config.load import load_config, to_yaml

# The architecture page's words, not the code's.
PLAN_KEYS = {
    "train": {"tp", "pp", "vpp", "cp", "ep", "dp"},
    "rollout": {"engine", "tp", "replicas", "assignment", "choices"},
    "reshard": {
        "receive_bytes",
        "send_bytes",
        "local_bytes",
        "alias_bytes",
        "messages",
        "predicted_ms",
    },
    "memory": {
        "train_peak_bytes",
        "usual_train_peak_bytes",
        "rollout_peak_bytes",
        "staging_bytes",
        "checkpoint_copy_bytes",
        "state_copy_bytes",
        "router_replay",
        "likely_tokens",
    },
}
METRICS = {
    "step",
    "reward/mean",
    "reward/std",
    "response_tokens/mean",
    "policy/loss",
    "policy/kl",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "policy/learning_rate",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
    "mismatch/kl",
    "mismatch/correlation",
    "time_s/generate",
    "time_s/reward",
    "time_s/logprobs",
    "time_s/advantages",
    "time_s/update",
    "time_s/reshard",
    "time_s/step",
    "throughput/tokens_per_s_per_gpu",
    "reshard/received_bytes",
    "reshard/gb_per_s",
    "memory/peak_gib",
}
SMALL = (
    "data.eval_limit=8",
    "steps.prompts_per_step=8",
    "steps.eval_every=0",
    "checkpoint.every=0",
    "reward.function=scripted_reward:digits",  # after few steps no answer is right
    "reward.isolated=false",
    "reward.extract=null",
)
SFT = (
    "examples/quickstart/sft.yaml",
    *SMALL,
    "steps.num_steps=3",
    "steps.stop_at_accuracy=null",
    "checkpoint.export_hf=true",
)
DIGITS = "{function: scripted_reward:digits}"
HELD_OUT = "form: prompts, path: examples/quickstart/heldout.jsonl"
SET = f"{{{HELD_OUT}, limit: 4, scorer: {DIGITS}}}"
GRPO = (
    "examples/quickstart/grpo.yaml",
    *SMALL,
    "steps.num_steps=2",
    "steps.samples_per_prompt=2",
    "train.tp=1",
    "train.pp=1",
    f"eval.sets={{digits: {SET}}}",
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart without its prompts, tokenizer and weights."""
    folder = tmp_path_factory.mktemp("bare")
    config = QUICKSTART / "model" / "config.json"
    for place in ("examples/quickstart/model", "runs/quickstart-sft/hf"):
        (folder / place).mkdir(parents=True)
        shutil.copyfile(config, folder / place / "config.json")
    for file in QUICKSTART.glob("*.yaml"):
        shutil.copyfile(file, folder / "examples" / "quickstart" / file.name)
    write_config(folder / "qwen")
    content = {
        "run": {"name": "large"},
        "model": {"init": "qwen"},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 8},
    }
    (folder / "qwen.yaml").write_text(yaml.safe_dump(content))
    return folder


def plan(folder: Path, *arguments: str) -> dict[str, Any]:
    """Returns what `plan --json` prints, and checks what holds for every plan."""
    before = files_below(folder)
    report: dict[str, Any] = json.loads(succeed(folder, "plan", *arguments, "--json"))
    assert files_below(folder) == before
    added = {"fits", "verdict", "step", "gpu_memory_bytes", "positions", "order", "ranks"}
    added |= {"assumptions", "images", "trained", "update_positions"}
    added.add("cluster")
    assert report.keys() == {*PLAN_KEYS, *added, "violations"}
    assert all(report[section].keys() == keys for section, keys in PLAN_KEYS.items())
    assert report["violations"] == []
    world = len(report["rollout"]["assignment"])
    reshard = report["reshard"]
    for key in ("receive_bytes", "send_bytes", "local_bytes", "alias_bytes", "messages"):
        assert len(reshard[key]) == world
        assert all(isinstance(number, int) and number >= 0 for number in reshard[key])
    assert sum(reshard["receive_bytes"]) == sum(reshard["send_bytes"])
    assert report["rollout"]["replicas"] * report["rollout"]["tp"] == world
    places = [tuple(place) for place in report["rollout"]["assignment"]]
    replicas, tp = report["rollout"]["replicas"], report["rollout"]["tp"]
    assert sorted(places) == [(replica, rank) for replica in range(replicas) for rank in range(tp)]
    return report


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quickstart was gone through, in few and small steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(QUICKSTART, folder / "examples" / "quickstart")
    succeed(folder, "train", *SFT)  # 4 processes, TP2 x PP2
    succeed(folder, "convert", "runs/quickstart-sft", "runs/quickstart-sft/hf", "--to", "hf")
    (folder / "stdout").write_text(succeed(folder, "train", *GRPO, "--world", "2"))
    return folder


@pytest.mark.dist
@pytest.mark.parametrize(("name", "steps", "world"), [("sft", 3, 4), ("grpo", 2, 2)])
def test_run_folder_holds_what_is_documented(
    quickstart: Path, name: str, steps: int, world: int
) -> None:
    run = quickstart / "runs" / f"quickstart-{name}"
    found = {path.name for path in run.iterdir()} - {"hf", "rollouts", "exports"}
    expected = {"checkpoints", "config.yaml", "logs", "metrics.jsonl", "run.json", "summary.json"}
    assert found == {*expected, "tensorboard"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{steps}"]
    logs = {path.name for path in (run / "logs").glob("*.log")}
    assert logs == {f"rank_{rank}.log" for rank in range(world)}
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    arguments = SFT if name == "sft" else GRPO
    given = load_config(quickstart / arguments[0], arguments[1:])
    assert (run / "config.yaml").read_text() == to_yaml(given)
    summary = json.loads((run / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds"} <= summary.keys()
    assert all(0 <= summary[f"accuracy_{when}"] <= 1 for when in ("before", "after"))


@pytest.mark.dist
def test_metrics_have_every_documented_key(quickstart: Path) -> None:
    lines = (quickstart / "runs/quickstart-grpo/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record.keys() >= METRICS, METRICS - record.keys()
        assert undocumented(record) == []
        assert all(isinstance(value, int | float) for value in record.values())
        phases = sum(value for key, value in record.items() if key.startswith("time_s/"))
        assert 0 < record["time_s/step"] < phases
        # Training is data parallel, generation too: each rank has all of the model already.
        assert record["reshard/received_bytes"] == 0
        assert 0 < record["mismatch/logprob_diff_max"] < 1e-4  # fp32 on both sides
        assert 0 <= record["mismatch/kl"] < 1e-8
        assert 0.999 < record["mismatch/correlation"] <= 1.000001
        assert 0 < record["reward/mean"] < 1
        assert record["policy/grad_norm"] > 0
    supervised = (quickstart / "runs/quickstart-sft/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["policy/loss"] for line in supervised]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.dist
def test_rollouts_are_samples_of_the_prompts(quickstart: Path) -> None:
    (dump,) = (quickstart / "runs/quickstart-grpo/rollouts").iterdir()
    samples = [json.loads(line) for line in dump.read_text().splitlines()]
    assert len(samples) == 8 * 2
    prompts = {json.loads(line)["prompt"] for line in (QUICKSTART / "train.jsonl").open()}
    assert {sample["prompt"] for sample in samples} <= prompts
    assert all({"prompt", "response", "reward", "answer"} <= sample.keys() for sample in samples)
    for sample in samples:
        num_tokens = len(sample["chars"])
        assert sum(sample["chars"]) == len(sample["response"])
        # In float32 engine and trainer agree within half a millinat.
        assert sample["diff_mnat"] == [0] * num_tokens and len(sample["logp_mnat"]) == num_tokens
        assert sum(count for _, count in sample["versions"]) == num_tokens


@pytest.mark.dist
def test_eval_prints_one_json_object_whatever_the_layout(quickstart: Path) -> None:
    before = files_below(quickstart / "runs")
    found = []
    # By its configuration, and by the folder of the run, which keeps it.
    for what, layout in (
        ((SFT[0], *SMALL), ("train.tp=1", "train.pp=1")),
        (("runs/quickstart-sft", "steps.prompts_per_step=3"), ("train.tp=1", "train.pp=2")),
    ):
        printed = succeed(quickstart, "eval", *what, *layout, "--json")
        found.append(json.loads(printed))
        assert printed.count("\n") == 1
    assert found[0] == found[1]
    assert {"accuracy", "reward", "num_prompts", "checkpoint"} <= found[0].keys()
    assert found[0]["num_prompts"] == 8
    assert found[0]["checkpoint"].endswith("runs/quickstart-sft/checkpoints/step_3")
    # Given prompts take the place of rows that the run holds out.
    three = quickstart / "three.jsonl"
    three.write_text("".join((QUICKSTART / "heldout.jsonl").open().readlines()[:3]))
    held_out = ("data.eval_prompts=null", "data.eval_share=0.01", "--prompts", str(three))
    printed = succeed(quickstart, "eval", "runs/quickstart-sft", *held_out, *layout, "--json")
    assert json.loads(printed)["num_prompts"] == 3
    summary = json.loads((quickstart / "runs/quickstart-sft/summary.json").read_text())
    assert found[0]["accuracy"] == summary["accuracy_after"]
    assert 0 < found[0]["accuracy"] < 1
    assert files_below(quickstart / "runs") == before


@pytest.mark.dist
def test_a_run_leaves_the_directory_that_convert_makes_with_a_model_card(quickstart: Path) -> None:
    run = quickstart / "runs" / "quickstart-sft"
    exported, converted = run / "exports" / "step_3", run / "hf"  # by 4 ranks, and by 1
    files = {path.name for path in converted.iterdir()}
    assert {path.name for path in exported.iterdir()} == files | {"README.md"}
    for name in files:
        assert (exported / name).read_bytes() == (converted / name).read_bytes(), name
    card = (exported / "README.md").read_text()
    assert "pipeline_tag" in card and "| accuracy | " in card and "prompts_per_step: 8" in card
    assert json.loads((exported / "config.json").read_text())["architectures"] == [
        "Qwen3ForCausalLM"
    ]


@pytest.mark.dist
def test_sets_are_measured_in_training_with_standard_errors(quickstart: Path) -> None:
    run = quickstart / "runs" / "quickstart-grpo"
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((run / "summary.json").read_text())
    assert record["eval/digits/accuracy"] == summary["digits/accuracy_after"]
    assert record["eval/digits/accuracy_stderr"] == summary["digits/accuracy_after_stderr"] > 0
    assert "digits/accuracy" in (quickstart / "stdout").read_text()


@pytest.mark.dist
def test_eval_of_an_hf_directory_needs_no_run(quickstart: Path) -> None:
    """By two replicas of one rank each, which scored other samples, with n samples a prompt."""
    folder = "runs/quickstart-sft/exports/step_3"
    before = files_below(quickstart)
    right = "{function: exact_match, extract: '(\\d)'}"
    sets = f"{{digits: {SET}, exact: {{{HELD_OUT}, limit: 5, scorer: {right}}}}}"
    knobs = ("eval.samples_per_prompt=4", "eval.temperature=1.0", "eval.pass_k=[1,4]")
    knobs += (f"eval.sets={sets}", "rollout.max_new_tokens=12", "--world", "2", "--json")
    found = json.loads(succeed(quickstart, "eval", folder, *knobs))
    assert found["num_prompts"] == 0 and found["checkpoint"] is None
    assert {name: one["num_scored"] for name, one in found["sets"].items()} == {
        "digits": 16,
        "exact": 20,
    }
    for one in found["sets"].values():
        assert one["pass_at"]["1"]["value"] <= one["pass_at"]["4"]["value"] <= 1
        assert 0 <= one["accuracy"] <= 1
    assert found["sets"]["digits"]["majority"] is None  # that scorer knows of no answers
    assert 0 <= found["sets"]["exact"]["majority"]["value"] <= 1
    assert files_below(quickstart) == before


def test_eval_of_a_distillation_needs_no_teacher(tmp_path: Path) -> None:
    shutil.copytree(QUICKSTART, tmp_path / "examples" / "quickstart")
    config = Qwen3Config.from_pretrained(QUICKSTART / "model")
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "teacher")
    run = ("examples/quickstart/grpo.yaml", *SMALL, "train.tp=1", "train.pp=1", "model.path=null")
    run += ("model.init=examples/quickstart/model", "run.name=taught", "steps.num_steps=1")
    run += ("algorithm={name: on_policy_distillation, teacher: teacher}",)
    succeed(tmp_path, "train", *run)
    summary = json.loads((tmp_path / "runs/taught/summary.json").read_text())
    shutil.rmtree(tmp_path / "teacher")
    refuse(tmp_path, ["train", *run, "steps.num_steps=2"], "algorithm.teacher")
    found = json.loads(succeed(tmp_path, "eval", *run, "--json"))
    assert found["checkpoint"].endswith("taught/checkpoints/step_1")
    assert found["accuracy"] == summary["accuracy_after"]
