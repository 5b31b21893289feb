"""The command line as a user meets it: exit codes, one message, JSON and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned_configs import QWEN25_7B, write_config

from hybridrl.config.load import load_config, load_config_dict, to_yaml
from hybridrl.services.planner.phase_memory import GRAPH_BYTES, GROUP_BYTES
from hybridrl.services.planner.plan_report import plan_report

PARAMETERS = 7_615_616_512
NO_SGLANG = pytest.mark.skipif(find_spec("sglang") is not None, reason="needs its absence")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working folder with a model's config.json, prompts and a valid configuration."""
    write_config(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    content = {
        "run": {"name": "a"},
        "model": {"init": "model"},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "prompts.jsonl"},
        "steps": {"samples_per_prompt": 2},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def hybridrl(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "hybridrl.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.tpp=2", ["train.tpp", "Did you mean 'train.tp'?"]),
        ("train.tp=3", ["train.tp", "28 attention heads"]),
        ("data.prompts=none.jsonl", ["none.jsonl", "no such file"]),
        ("data.prompt_key=question", ["prompts.jsonl:1", "question"]),
        ("steps.samples_per_prompt=1", ["steps.samples_per_prompt"]),
        pytest.param("rollout.engine=sglang", ["rollout.engine", "sglang"], marks=NO_SGLANG),
        ("reward.function=my:f", ["reward.function", "my"]),
        ("algorithm={name: 'my.rl:Best'}", ["algorithm.name", "my.rl:Best"]),
        ("model.init=nowhere", ["model.init", "nowhere"]),
        ("model.family=gpt2", ["model.family", "gpt2"]),
        ("placement.critic=0", ["placement.critic", "which has no critic"]),
        ("placement.policy=node:1", ["placement.policy.ranks", "nodes 0 to 0, with 1 ranks each"]),
    ],
)
def test_train_refuses_before_any_rank_starts(
    here: Path, override: str, expected: list[str]
) -> None:
    assert_refused(hybridrl(here, "train", "c.yaml", override), *expected)
    assert not (here / "runs").exists()


@pytest.mark.parametrize("text", ["", "not json\n", '{"answer": "2"}\n', '{"prompt": 3}\n'])
def test_train_refuses_prompts_that_are_none(here: Path, text: str) -> None:
    (here / "prompts.jsonl").write_text(text)
    assert_refused(hybridrl(here, "train", "c.yaml"), "prompts.jsonl")
    assert not (here / "runs").exists()


def test_train_refuses_a_run_folder_of_another_identity(here: Path) -> None:
    (here / "runs" / "a").mkdir(parents=True)
    saved = here / "runs" / "a" / "config.yaml"
    saved.write_text(to_yaml(load_config(here / "c.yaml", ["run.seed=5"])))
    before = saved.read_text()
    assert_refused(hybridrl(here, "train", "c.yaml"), "run.seed", "runs/a")
    assert saved.read_text() == before
    assert [path.name for path in (here / "runs" / "a").iterdir()] == ["config.yaml"]


def test_train_reports_all_violations_at_once(here: Path) -> None:
    done = hybridrl(
        here,
        "train",
        "c.yaml",
        "steps.samples_per_prompt=1",
        "train.vpp=2",
        "data.prompts=none.jsonl",
    )
    assert_refused(done, "steps.samples_per_prompt", "train.vpp", "no such file")
    assert len(done.stderr.splitlines()) == 3


def test_unknown_architecture_is_refused(here: Path) -> None:
    other = {**QWEN25_7B, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (here / "model" / "config.json").write_text(json.dumps(other))
    assert_refused(hybridrl(here, "train", "c.yaml"), "GPT2LMHeadModel")


def test_torchrun_rank_checks_the_config_itself(here: Path) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    assert_refused(hybridrl(here, "train", "c.yaml", "train.tp=2", **world), "world size 3")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_world_in_the_shell_of_another_job_is_refused_immediately(command: str, here: Path) -> None:
    """Nobody listens at the address: this process would wait for the other ranks for minutes."""
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    began = time.monotonic()
    done = hybridrl(here, command, "c.yaml", "--world", "1", **job)
    assert_refused(done, "--world: got 1; allowed: 2, because the environment has RANK=1 and")
    assert "unset RANK WORLD_SIZE" in done.stderr and time.monotonic() - began < 30
    done = hybridrl(here, command, "c.yaml", **{**job, "RANK": "2"})
    assert_refused(done, "RANK and WORLD_SIZE in the environment: got '2' and '2'")


def test_usage_errors_have_code_2(here: Path) -> None:
    assert hybridrl(here, "trian", "c.yaml").returncode == 2
    assert hybridrl(here, "train").returncode == 2


def test_eval_and_convert_refuse_what_is_not_there(here: Path) -> None:
    assert_refused(hybridrl(here, "eval", "c.yaml"), "data.eval_prompts")
    assert_refused(hybridrl(here, "eval", "c.yaml", "--checkpoint", "none"), "--checkpoint")
    assert_refused(hybridrl(here, "eval", "c.yaml", "--prompts", "none.jsonl"), "none.jsonl")
    assert_refused(hybridrl(here, "convert", "none", "out", "--to", "hf"), "none")
    assert_refused(hybridrl(here, "convert", "model", "model", "--to", "hf"), "model")
    assert hybridrl(here, "convert", "model", "out", "--to", "gguf").returncode == 2
    assert not (here / "out").exists()


def test_plan_as_json_is_one_object(here: Path) -> None:
    done = hybridrl(here, "plan", "c.yaml", "--world", "4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    added = {"fits", "verdict", "step", "gpu_memory_bytes", "positions", "order", "ranks", "lora"}
    added |= {"assumptions", "images", "optimizer", "trained", "update_positions"}
    assert set(report) == {"cluster", "train", "rollout", "reshard", "memory", "violations", *added}
    assert report["train"] == {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "dp": 4}
    assert report["violations"] == []


def test_plan_as_json_lists_violations(here: Path) -> None:
    done = hybridrl(here, "plan", "c.yaml", "rollout.tpp=3", "train.tp=0", "--json")
    assert done.returncode == 2
    violations = json.loads(done.stdout)["violations"]
    assert {violation["key"] for violation in violations} == {"rollout.tpp", "train.tp"}
    assert all(set(v) == {"key", "value", "allowed", "remedy"} for v in violations)
    done = hybridrl(here, "plan", "c.yaml", "train.tp=4", "--world", "6", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["violations"][0]["allowed"] == "a divisor of the world size 6"


def test_plan_needs_no_data_and_no_tokenizer(here: Path) -> None:
    (here / "prompts.jsonl").unlink()
    (here / "model" / "tokenizer.json").unlink()
    done = hybridrl(here, "plan", "c.yaml", "rollout.engine=vllm", "train.tp=4")
    assert done.returncode == 0, done.stderr
    assert "4 replicas" in done.stdout


def test_check_as_json_is_one_object(here: Path) -> None:
    done = hybridrl(here, "check", "--json")
    report = json.loads(done.stdout)
    found = {item["name"]: item["status"] for item in report["items"]}
    assert found["torch"] == found["megatron-core"] == found["gloo"] == "ok"
    assert done.returncode == (0 if report["ok"] else 1)
    assert report.keys() == {"ok", "items"}
    for item in report["items"]:
        assert item.keys() == {"name", "status", "found", "fix", "tested", "newest"}
        assert bool(item["fix"]) <= (item["status"] == "problem")


def test_check_names_an_apex_that_is_not_nvidias(here: Path) -> None:
    (here / "apex.py").write_text("")
    done = hybridrl(here, "check")
    assert done.returncode == 1
    assert "pip uninstall -y apex" in done.stdout


def report_of(here: Path, world: int, **sections: dict[str, Any]) -> dict[str, Any]:
    content = {
        "run": {"name": "a"},
        "model": {"init": str(here / "model")},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 2},
        **sections,
    }
    report, violations = plan_report(load_config_dict(content), world)
    assert violations == []
    return report


def test_plan_counts_every_byte_of_the_model(here: Path) -> None:
    report = report_of(here, 8, train={"tp": 4, "pp": 2}, rollout={"engine": "vllm"})
    reshard = report["reshard"]
    size = 2 * PARAMETERS
    kinds = (reshard[f"{kind}_bytes"] for kind in ("receive", "local", "alias"))
    for received, local, alias in zip(*kinds, strict=True):
        assert received + local + alias == size and alias > 0  # norms at least
    assert sum(reshard["receive_bytes"]) == sum(reshard["send_bytes"])
    assert report["rollout"]["assignment"] == [[rank, 0] for rank in range(8)]


def test_plan_reads_what_optimizers_own_where_the_gather_is_fused(here: Path) -> None:
    rollout, size = {"engine": "vllm", "tp": 2}, 2 * PARAMETERS
    plain = report_of(here, 4, train={}, rollout=rollout)["reshard"]
    assert sum(plain["receive_bytes"]) == 0  # every rank has whole parameters
    fused = report_of(here, 4, train={"fuse_param_gather": True}, rollout=rollout)["reshard"]
    # Of the half that each rank needs, a quarter of all is its own: half of the half at most.
    for received, local in zip(fused["receive_bytes"], fused["local_bytes"], strict=True):
        assert 0.2 * size < received < 0.5 * size and local >= 0
    assert sum(fused["receive_bytes"]) == sum(fused["send_bytes"])


def test_plan_counts_the_reference_of_those_that_have_one(here: Path) -> None:
    def held(**algorithm: object) -> int:
        samples = 2 if algorithm["name"] == "grpo" else 1
        train = {"share_prompts": False}  # samples would keep copies of keys
        steps = {"samples_per_prompt": samples}
        report = report_of(here, 1, algorithm=algorithm, steps=steps, train=train)
        return int(report["memory"]["train_peak_bytes"])

    without = held(name="sft")
    assert held(name="simpo") == held(name="orpo") == held(name="grpo") == without
    for chosen in ({"name": "dpo"}, {"name": "kto"}, {"name": "grpo", "kl_coef": 0.1}):
        assert held(**chosen) == without + 4 * PARAMETERS  # float32 for the hf engine


OWN_ALGORITHM = """
import sys
from hybridrl.config.needs import Needs

class Critical:
    name, needs = "critical", Needs(values=True, reference=True)
    def advantages(self, batch): return batch
    def denominator(self, batch): return 1.0
    def loss(self, logp_S, entropy_S, micro, denominator): return None
    def value_loss(self, values_S, micro, denominator): return None

class Ending(Critical):
    def __init__(self): sys.exit(0)

class Raising(Critical):
    def __init__(self): raise ValueError("no k")

class Vague(Critical):
    needs = {"values": True}

class Empty(Critical):
    needs = None
"""


def test_plan_counts_the_critic_of_an_algorithm_of_ones_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "own_critic.py").write_text(OWN_ALGORITHM)
    monkeypatch.syspath_prepend(str(here))
    peaks = [
        report_of(here, 1, algorithm=algorithm)["memory"]
        for algorithm in ({"name": "own_critic:Critical"}, {"name": "ppo", "kl_coef": 0.1})
    ]
    assert peaks[0] == peaks[1]
    without = report_of(here, 1)["memory"]["train_peak_bytes"]
    # float32: the reference's weights; the critic's with gradients and moments.
    assert peaks[0]["train_peak_bytes"] == without + (4 + 4 + 4 + 8) * PARAMETERS


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_critic:Ending", "sys.exit(0)"),
        ("own_critic:Missing", "own_critic' has no attribute 'Missing'"),
        ("no_such:Module", "No module named 'no_such'"),
        ("own_critic:Raising", "ValueError: no k"),
        ("own_critic:Vague", "Its needs are {'values': True}, not a hybridrl.config.needs.Needs"),
        ("own_critic:Empty", "Its needs are None, not a hybridrl.config.needs.Needs"),
    ],
)
def test_plan_refuses_an_algorithm_that_cannot_be_made(here: Path, name: str, reason: str) -> None:
    (here / "own_critic.py").write_text(OWN_ALGORITHM)
    done = hybridrl(here, "plan", "c.yaml", f"algorithm={{name: '{name}'}}", "--json")
    assert done.returncode == 2, done.stderr
    (violation,) = json.loads(done.stdout)["violations"]
    assert reason in " ".join(map(str, violation.values())), violation


def test_plan_refuses_a_term_that_needs_more_than_the_policy(here: Path) -> None:
    (here / "own_critic.py").write_text(OWN_ALGORITHM)
    term = "mix={t: {algorithm: {name: 'own_critic:Critical'}, weight: 0.1}}"
    done = hybridrl(here, "plan", "c.yaml", term, "--json")
    assert done.returncode == 2, done.stderr
    (violation,) = json.loads(done.stdout)["violations"]
    assert violation["key"] == "mix.t.algorithm.name", violation


def test_plan_refuses_a_layout_that_cannot_cut_a_reward_model(here: Path) -> None:
    served = write_config(here / "served", num_attention_heads=14, num_key_value_heads=2)
    scorer = f"reward={{function: reward_model, options: {{path: '{served}'}}}}"
    done = hybridrl(here, "plan", "c.yaml", scorer, "train.tp=4", "--world", "4", "--json")
    assert done.returncode == 2, done.stderr
    (violation,) = json.loads(done.stdout)["violations"]
    assert violation["key"].startswith("reward ") and violation["key"].endswith("train.tp")
    assert "divisor of the model's 14 attention heads" in violation["allowed"], violation


def test_plan_counts_the_models_beside_the_policy(here: Path) -> None:
    def held(**sections: dict[str, Any]) -> int:
        return report_of(here, 1, **sections)["memory"]["train_peak_bytes"]

    one = {"steps": {"samples_per_prompt": 1}}
    # A reward model is trained beside a frozen policy.
    sft = held(algorithm={"name": "sft"}, **one)
    # Otherwise pairs copy the keys of their prompts.
    alone = {"train": {"share_prompts": False}}
    assert held(algorithm={"name": "reward_model"}, **one, **alone) == sft + 4 * PARAMETERS
    served = {"function": "reward_model", "options": {"path": str(here / "model")}}
    found = held(reward=served) - held()
    assert 0 < 4 * PARAMETERS - found < 5 * 152064 * 3584  # one score in place of the logits


def test_plan_memory_follows_the_sharding(here: Path) -> None:
    rollout = {"engine": "vllm", "staging_mib": 64}
    one = report_of(here, 1, rollout=rollout)["memory"]
    two = report_of(here, 2, rollout=rollout)["memory"]
    ppo = report_of(here, 1, rollout=rollout, algorithm={"name": "ppo"})["memory"]
    assert one["staging_bytes"] == 64 * 2**20
    assert one["train_peak_bytes"] > 18 * PARAMETERS + GRAPH_BYTES  # 2 + 4 + 12
    # The engine's fused projections are cut otherwise than the trainer's; the rest is shared.
    shared = report_of(here, 1, rollout=rollout)["reshard"]["alias_bytes"][0]
    levels = {
        level: report_of(here, 1, rollout=rollout, train={"optimizer_memory": level})["memory"]
        for level in ("low_precision", "host")
    }
    cut = report_of(here, 2, rollout={**rollout, "tp": 2}, train={"tp": 2})["memory"]
    packed = {**rollout, "tp": 2, "transport": "packed"}
    staged = report_of(here, 2, rollout=packed, train={"tp": 2})["memory"]
    assert staged["rollout_peak_bytes"] - cut["rollout_peak_bytes"] == 64 * 2**20 + GROUP_BYTES
    assert one["rollout_peak_bytes"] > 2 * PARAMETERS + 12 * PARAMETERS + 2 * PARAMETERS - shared
    for level, freed in (("low_precision", 6), ("host", 12)):
        saved = one["rollout_peak_bytes"] - levels[level]["rollout_peak_bytes"]
        assert saved == freed * PARAMETERS, level
    halved = {"optimizer_memory": "host", "gradient_dtype": "bfloat16"}
    fewer = report_of(here, 1, rollout=rollout, train=halved)["memory"]
    saved = levels["host"]["train_peak_bytes"] - fewer["train_peak_bytes"]
    assert saved == 2 * PARAMETERS
    # Half of the optimizer's state; world, data parallel, and that with context parallel.
    assert two["train_peak_bytes"] == one["train_peak_bytes"] - 6 * PARAMETERS + 3 * GROUP_BYTES
    assert ppo["train_peak_bytes"] - one["train_peak_bytes"] == 18 * PARAMETERS
    frozen = report_of(here, 1, rollout=rollout, train={"freeze": ["embeddings"]})["memory"]
    kept = 152064 * 3584
    assert one["train_peak_bytes"] - frozen["train_peak_bytes"] == 16 * kept
    assert one["rollout_peak_bytes"] - frozen["rollout_peak_bytes"] == 12 * kept


def test_the_list_of_commands_breaks_lines_only_at_the_border(here: Path) -> None:
    found = hybridrl(here, "--help", COLUMNS="400", TERMINAL_WIDTH="400").stdout
    commands = found[found.index("Commands") :].splitlines()[1:-1]
    rows = [row.strip("│ ") for row in commands if row.startswith("│")]
    assert len(rows) == 13, found
    assert all(row.endswith(".") for row in rows), rows


def test_help_whose_reader_stops_says_nothing(here: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli.main", "train", "--help"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writes)
    assert done.returncode == 1 and done.stderr == ""


def test_a_terminal_that_closes_at_the_end_does_not_change_the_exit_code(here: Path) -> None:
    program = (
        "import atexit, os, signal\n"
        "from hybridrl.cli.main import main\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGHUP))\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("hybridrl "), done
