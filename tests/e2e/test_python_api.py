"""The Python interface as a user's script meets it: Trainer, and its parts in another loop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import FRESH, NO_EVALUATION
from fork_starts import COLD
from refusals import QUICKSTART, TESTS

import hybridrl
from hybridrl.errors import UserError

ROOT = TESTS.parent
CUSTOM_LOOP = ROOT / "examples" / "custom_loop.py"
BEST_OF_N = ROOT / "examples" / "best_of_n.py"
MAX_LOOP_LINES, MAX_BEST_OF_N_LINES = 40, 80


def python(*arguments: str | Path, cwd: Path, is_cold: bool = True) -> str:
    """Runs a script in one process, started as by a user unless told otherwise; returns its
    stdout.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{TESTS}"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment | ({COLD: "1"} if is_cold else {}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_package_lists_what_it_exports_and_hides_no_name() -> None:
    assert {"Trainer", "__version__"} <= set(dir(hybridrl))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rewards", "reward"),
        ("reward_funcs", "reward"),
        ("train_dataset", "prompts"),
        ("processing_class", "tokenizer"),
        ("promts", "prompts"),
        ("learning_rate", "configuration"),
    ],
)
def test_a_wrong_argument_of_a_trainer_names_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=name) as raised:
        hybridrl.Trainer.from_config({"run": {"name": "a"}}, **{name: []})
    assert raised.value.name == name and meant in raised.value.remedy


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    """What api_session.py says of itself."""
    script = TESTS / "e2e" / "api_session.py"
    found: dict[str, Any] = json.loads(python(script, QUICKSTART, folder, cwd=folder))
    return found


def test_scripts_of_the_documentation_run_and_show_no_librarys_warnings(tmp_path: Path) -> None:
    guides = ROOT / "docs" / "guides"
    (script,) = re.findall(r"```python\n(.*?)```", (guides / "python.md").read_text(), re.DOTALL)
    own = (guides / "own.md").read_text()
    (algorithm,) = re.findall(r"```python\n([^`]*class MedianGrpo.*?)```", own, re.DOTALL)
    (section,) = re.findall(r"```yaml\n(algorithm:.*?)```", own, re.DOTALL)
    (tmp_path / "median_grpo.py").write_text(algorithm)
    small = {
        '"path": "Qwen/Qwen2.5-0.5B-Instruct"': f'"init": "{QUICKSTART / "model"}"',
        'f"What is {a} + {b}?"': 'f"{a}+{b}="',
        "What is 17 + 25?": "17+25=",
        '"chat_template": True, "eval_share": 0.05': '"eval_share": 0.01',
        '"max_new_tokens": 64': '"max_new_tokens": 4',
        '"num_steps": 20': '"num_steps": 2',
    }
    for shown, used in small.items():
        assert shown in script
        script = script.replace(shown, used)
    # The algorithm of one's own learns from the same rows, in the same process.
    script += (
        f"import yaml\nconfig |= yaml.safe_load({section!r})\n"
        "config['run'] = {'name': 'median'}\n"
        "trainer = Trainer.from_config(config, prompts=rows, reward=correct)\n"
        "print(type(trainer.algorithm).__name__, trainer.fit(num_steps=1))\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), COLD: "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("nanobind|megatron|Apex", done.stderr), done.stderr
    assert "accuracy_after" in done.stdout and "MedianGrpo {" in done.stdout
    (first,) = metrics(tmp_path / "runs" / "sums")[:1]
    assert {"reward/correct/mean", "reward/short/mean"} <= first.keys()
    saved = {path.name for path in (tmp_path / "sums-hf").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved


def test_trainer_fits_from_a_file_with_overrides(told: dict[str, Any], folder: Path) -> None:
    summary = told["summary"]
    assert {"accuracy_before", "accuracy_after", "seconds"} <= summary.keys()
    assert 0 <= summary["accuracy_after"] <= 1
    assert told["step"] == 1
    run = folder / "quickstart-grpo"
    assert [record["step"] for record in metrics(run)] == [1]
    assert json.loads((run / "summary.json").read_text()) == summary


def test_trainer_takes_objects_in_place_of_sections(told: dict[str, Any], folder: Path) -> None:
    assert told["changed"] == told["num_weights"]
    assert told["num_called"] == 4 * 4 * 2  # steps, prompts, samples
    assert sorted(told["encoded"]) == [f"{a}{b}+11=" for a in range(3) for b in range(3)]
    for prompt, response, tag in told["called"]:
        assert prompt[0] == str(tag)
        assert re.fullmatch(r"[\d+=,]{0,4}", response)
    rewards = [sum(c.isdigit() for c in r) / max(len(r), 1) for _, r, _ in told["called"]]
    assert metrics(folder / "objects")[0]["reward/mean"] == pytest.approx(sum(rewards) / 8)


def test_load_checkpoint_goes_on_as_if_nothing_had_happened(
    told: dict[str, Any], folder: Path
) -> None:
    assert told["loaded_step"] == 2
    assert told["differing"] == []
    assert told["newest_step"] == 4
    one, other = metrics(folder / "objects"), metrics(folder / "resumed")
    assert [record["step"] for record in other] == [3, 4]
    for key in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/learning_rate"):
        assert [r[key] for r in one[2:]] == [r[key] for r in other]


def test_mistakes_are_exceptions_that_can_be_mended(told: dict[str, Any], folder: Path) -> None:
    kind, text = told["layout"]
    assert kind == "ConfigError" and "train.tp * train.pp * train.cp" in text
    kind, text = told["samples"]
    assert kind == "ConfigError" and "steps.samples_per_prompt" in text
    kind, text = told["tokenizer"]
    assert kind == "ModelError" and "model.tokenizer" in text
    kind, text = told["weights"]
    assert kind == "CheckpointError" and "no weights" in text
    assert not (folder / "refused").exists()
    assert told["last"]["seconds"] > 0


def test_the_memory_table_follows_what_was_decided(told: dict[str, Any]) -> None:
    """Its columns, training and rollout: gradients leave until there is room for both phases."""
    before, after = (
        {line[:34].strip(): line[34:].split() for line in table.splitlines()}
        for table in told["tables"]
    )
    assert before["policy gradients"][1] == "-" and before["engine weights"][1] != "-"
    assert "-" not in after["policy gradients"]
    assert before.keys() == after.keys()


EASY = [
    *FRESH,
    f"data.prompts={QUICKSTART / 'train.jsonl'}",
    *NO_EVALUATION,
    "train.learning_rate=3e-3",
    "train.warmup_steps=0",
    "steps.prompts_per_step=16",
    "steps.samples_per_prompt=4",
    "steps.num_steps=8",
    "reward.function=scripted_reward:digits",  # the first steps can learn this one
    "reward.isolated=false",
    "reward.extract=null",
]


def test_custom_loop_trains(tmp_path: Path) -> None:
    assert len(CUSTOM_LOOP.read_text().splitlines()) <= MAX_LOOP_LINES
    # A reward of the user's, in the folder where they stand and not beside the script.
    (tmp_path / "my_reward.py").write_text((TESTS / "scripted_reward.py").read_text())
    own = "reward.function=my_reward:digits"
    printed = python(CUSTOM_LOOP, QUICKSTART / "grpo.yaml", *EASY, own, cwd=tmp_path)
    line = r"^step (\d+) kept (\d+) reward ([\d.]+) loss (-?[\d.]+)$"
    steps = re.findall(line, printed, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == list(range(1, 9))
    assert all(0 <= int(kept) <= 64 and int(kept) % 4 == 0 for _, kept, _, _ in steps)
    rewards = [float(reward) for _, _, reward, _ in steps]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1


def test_best_of_n_distils_the_best_samples(tmp_path: Path) -> None:
    """Of its samples alone: the mean reward follows the best of four."""
    assert len(BEST_OF_N.read_text().splitlines()) <= MAX_BEST_OF_N_LINES
    printed = python(BEST_OF_N, QUICKSTART / "grpo.yaml", *EASY, cwd=tmp_path, is_cold=False)
    line = r"^step (\d+) kept (\d+) reward ([\d.]+) loss ([\d.]+)$"
    steps = re.findall(line, printed, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == list(range(1, 9))
    assert all(0 < int(kept) <= 16 for _, kept, _, _ in steps)
    rewards, losses = ([float(values[i]) for values in steps] for i in (2, 3))
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
    assert losses[-1] < losses[0]
