"""What `hybridrl init` and `hybridrl examples` write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_cli import QWEN25_7B
from typer.testing import CliRunner

from hybridrl.cli import init as starting
from hybridrl.cli.init import examples_folder
from hybridrl.cli.main import app
from hybridrl.config.algorithm import ALGORITHM_NAMES
from hybridrl.config.load import load_config
from hybridrl.config.starter import Start, starter_text
from hybridrl.errors import UserError
from hybridrl.services.planner.plan_report import plan_report

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"

TAUGHT = ("on_policy_distillation", "distillation", "gkd")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the config.json of a 7B model, and with rows."""
    row = {"prompt": "1+1=", "answer": "2", "response": "2", "label": True}
    (tmp_path / "train.jsonl").write_text(json.dumps({**row, "chosen": "2", "rejected": "3"}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN25_7B))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("task", ALGORITHM_NAMES)
def test_starter_of_every_algorithm_passes_plan(here: Path, task: str) -> None:
    teacher = ["--teacher", "model"] if task in TAUGHT else []
    done = CliRunner().invoke(app, ["init", task, "model", "--engine", "hf", *teacher])
    assert (done.exit_code, done.output.splitlines()[0]) == (0, f"wrote {task}.yaml")
    config = load_config(here / f"{task}.yaml")
    assert config.algorithm.name == task
    _, violations = plan_report(config, 8)
    assert violations == []


def test_starter_knows_chats_by_the_template(here: Path) -> None:
    runner = CliRunner()
    runner.invoke(app, ["init", "grpo", "model", "--output", "base.yaml"])
    (here / "model" / "chat_template.jinja").write_text("")
    runner.invoke(app, ["init", "grpo", "model", "--output", "chat.yaml"])
    data = {
        name: yaml.safe_load(Path(name).read_text())["data"] for name in ("base.yaml", "chat.yaml")
    }
    assert not data["base.yaml"]["chat_template"] and "system_prompt" not in data["base.yaml"]
    assert data["chat.yaml"]["chat_template"] and "system_prompt" not in data["chat.yaml"]


def test_starter_takes_a_reward_of_ones_own(here: Path) -> None:
    arguments = ["init", "grpo", "model", "--reward", "my_rewards:score"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert yaml.safe_load(Path("grpo.yaml").read_text())["reward"] == {
        "function": "my_rewards:score"
    }


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        (["grp", "model"], "TASK", "Did you mean 'grpo'?"),
        (["gpro", "model"], "TASK", "Did you mean 'grpo'?"),
        (["gkd", "model"], "--teacher", "gkd learns from a teacher"),
        (["grpo", "model", "--teacher", "model"], "--teacher", "grpo does not use a teacher"),
        (["grpo", "model", "--engine", "vlm"], "--engine", "allowed: hf, vllm, sglang."),
        (["grpo", "model", "--output", "model"], "model", "or pass another path with --output"),
        (["grpo", "modle"], "MODEL", "modle (no such folder)"),
        (["gkd", "model", "--teacher", "./none"], "--teacher", "./none (no such folder)"),
        (["grpo", "."], "MODEL", "no config.json in it"),
        (["grpo", "model", "--prompts", "trian.jsonl"], "--prompts", "Did you mean 'train.jsonl'?"),
        (["grpo", "model", "--prompts", "datasets:a"], "--prompts", "datasets:NAME"),
        (["grpo", "model", "--reward", "maths"], "--reward", "Did you mean 'math'?"),
        (["sft", "model", "--reward", "math"], "--reward", "sft learns from given responses"),
        (["grpo", "model/config.json"], "MODEL", "Pass its folder"),
    ],
)
def test_init_refuses(here: Path, arguments: list[str], name: str, said: str) -> None:
    error = CliRunner().invoke(app, ["init", *arguments]).exception
    assert isinstance(error, UserError) and error.name == name
    assert said in str(error)
    assert {path.name for path in here.iterdir()} == {"model", "train.jsonl"}


@pytest.mark.parametrize(
    ("task", "row", "found", "needed"),
    [
        ("dpo", {"prompt": "a", "answer": "b"}, "no column 'chosen'", "'chosen' and 'rejected'"),
        ("reward_model", {"chosen": "a"}, "no column 'prompt'", "'prompt', 'chosen' and 'rej"),
        ("sft", {"prompt": "a", "answer": "b"}, "no column 'response'", "'prompt' and 'respo"),
        ("kto", {"prompt": "a", "response": "b"}, "no column 'label'", "column 'label' in"),
        ("grpo", {"prompt": "a"}, "no column 'answer'", "column 'answer' in"),
        ("grpo", {"text": "a"}, "no column 'prompt'", "column 'prompt' in"),
        ("dpo", {"prompt": "a", "chosen": "", "rejected": "b"}, "chosen = ''", "not empty"),
    ],
)
def test_init_refuses_rows_that_the_task_cannot_use(
    here: Path, task: str, row: dict[str, str], found: str, needed: str
) -> None:
    Path("rows.jsonl").write_text(f"\n{json.dumps(row)}\n" * 2)
    error = CliRunner().invoke(app, ["init", task, "model", "--prompts", "rows.jsonl"]).exception
    assert isinstance(error, UserError) and error.name == "rows.jsonl:2"
    assert found in str(error.value) and needed in error.allowed
    assert found.startswith("chosen") or all(repr(name) in str(error.value) for name in row)
    assert ("in the file that is written" in error.remedy) == found.startswith("no column")
    assert not Path(f"{task}.yaml").exists()


def test_init_takes_rows_of_other_forms_and_some_bad_ones(here: Path) -> None:
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [pair[0], {"role": "assistant", "content": "c"}]
    rows = [{"prompt": "no pair"}, {"chosen": pair, "rejected": other}]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        CliRunner().invoke(app, ["init", "dpo", "model", "--prompts", "pairs.jsonl"]).exit_code == 0
    )
    own = ["init", "grpo", "model", "--prompts", "own.jsonl", "--reward", "my_rewards:score"]
    Path("own.jsonl").write_text('{"prompt": "a"}')  # such a reward may need no answer
    assert CliRunner().invoke(app, own).exit_code == 0
    images = {"prompt": "<image> a", "answer": "b", "images": ["one.png"]}
    Path("images.jsonl").write_text(json.dumps(images))
    Path("one.png").touch()
    hub = ["init", "grpo", "org/model", "--prompts", "images.jsonl", "--output", "hub.yaml"]
    assert CliRunner().invoke(app, hub).exit_code == 0


def test_examples_are_copied_once_and_load_where_they_lie(here: Path) -> None:
    assert CliRunner().invoke(app, ["examples"]).exit_code == 0
    copied = {path.relative_to(here / "examples") for path in (here / "examples").rglob("*.yaml")}
    source = examples_folder()
    assert copied == {path.relative_to(source) for path in source.rglob("*.yaml")}
    assert load_config("examples/quickstart/sft.yaml").model.init == "examples/quickstart/model"
    again = CliRunner().invoke(app, ["examples"]).exception
    assert isinstance(again, UserError) and again.name == "examples"


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("sft", {"prompt", "response"}),
        ("dpo", {"prompt", "chosen", "rejected"}),
        ("kto", {"prompt", "response", "label"}),
        ("grpo", {"prompt", "answer"}),
    ],
)
def test_starter_has_the_columns_that_an_algorithm_reads(task: str, columns: set[str]) -> None:
    data = yaml.safe_load(starter_text(Start(task, "model", "train.jsonl", "hf")))["data"]
    assert {value for key, value in data.items() if key.endswith("_key")} == columns


@pytest.mark.parametrize(("num_gpus", "engine"), [(0, "hf"), (8, "vllm")])
def test_starter_takes_the_engine_that_fits_the_host(
    here: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, engine: str
) -> None:
    monkeypatch.setattr(starting, "num_local_gpus", lambda: num_gpus)
    assert CliRunner().invoke(app, ["init", "grpo", "model"]).exit_code == 0
    assert load_config("grpo.yaml").rollout.engine == engine


def test_starter_of_a_model_without_weights_has_a_rate_for_fresh_ones(here: Path) -> None:
    runner, sections = CliRunner(), []
    for name in ("fresh.yaml", "trained.yaml"):
        assert runner.invoke(app, ["init", "sft", "model", "--output", name]).exit_code == 0
        sections.append(yaml.safe_load(Path(name).read_text()))
        (here / "model" / "model.safetensors").write_bytes(b"")
    fresh, trained = sections
    assert fresh["model"] == {"init": "model"} and trained["model"] == {"path": "model"}
    assert fresh["train"]["learning_rate"] > 10 * trained["train"]["learning_rate"]


def test_starter_of_a_model_with_images_has_room_for_one(here: Path) -> None:
    """Sizes are those of the nested decoder; a tower with random weights is trained."""
    content = json.loads((MODELS / "qwen3-vl-4b.json").read_text())
    found = []
    for positions in (262144, 1000):
        content["text_config"]["max_position_embeddings"] = positions
        (here / "model" / "config.json").write_text(json.dumps(content))
        found.append(yaml.safe_load(starter_of("sft")))
    assert [one["data"]["max_prompt_tokens"] for one in found] == [2048, 500]
    assert [one["train"]["freeze"] for one in found] == [[], []]
    (here / "model" / "model.safetensors").write_bytes(b"")
    assert "freeze" not in yaml.safe_load(starter_of("sft"))["train"]


def test_starter_trains_qwen3_5_with_images_if_rows_have_some(here: Path) -> None:
    recipe = MODELS.parents[1] / "examples" / "recipes" / "models" / "qwen3.5-4b" / "config.json"
    content = json.loads(recipe.read_text())
    assert "vision_config" in content
    file = here / "model" / "config.json"
    file.write_text(recipe.read_text())
    text = CliRunner().invoke(app, ["init", "grpo", "model"])
    key = "model.family=qwen3_5"
    assert text.exit_code == 0 and f"reads images too: {key}" in " ".join(text.output.split())
    assert "family" not in yaml.safe_load(Path("grpo.yaml").read_text())["model"]
    Path("one.png").touch()
    rows = here / "train.jsonl"
    rows.write_text(json.dumps({**json.loads(rows.read_text()), "images": ["one.png"]}))
    said = CliRunner().invoke(app, ["init", "grpo", "model", "--output", "images.yaml"])
    assert said.exit_code == 0 and key not in said.output
    found = load_config("images.yaml")
    assert found.model.family == "qwen3_5" and found.data.max_prompt_tokens == 2048
    assert found.train.freeze == ()  # a tower with random weights
    del content["vision_config"]  # a text model in a wrapper
    file.write_text(json.dumps(content))
    bare = CliRunner().invoke(app, ["init", "grpo", "model", "--output", "bare.yaml"]).exception
    assert isinstance(bare, UserError) and bare.name == "train.jsonl:1"
    rows.write_text('{"prompt": "a", "answer": "b"}')
    bare = CliRunner().invoke(app, ["init", "grpo", "model", "--output", "bare.yaml"])
    assert bare.exit_code == 0 and "images" not in bare.output


def starter_of(task: str) -> str:
    assert CliRunner().invoke(app, ["init", task, "model"]).exit_code == 0
    text = Path(f"{task}.yaml").read_text()
    Path(f"{task}.yaml").unlink()
    return text


@pytest.mark.parametrize(("task", "tiny", "small"), [("sft", 1e-4, 2e-5), ("grpo", 1e-4, 1e-5)])
def test_starter_of_a_small_model_has_a_higher_rate(
    here: Path, task: str, tiny: float, small: float
) -> None:
    (here / "model" / "model.safetensors").write_bytes(b"")
    found = []
    for width in (64, 512, 3584):
        shape = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 1000}
        heads = {"num_attention_heads": width // 32, "num_key_value_heads": 1}
        (here / "model" / "config.json").write_text(json.dumps({**QWEN25_7B, **shape, **heads}))
        assert CliRunner().invoke(app, ["init", task, "model"]).exit_code == 0
        found.append(load_config(f"{task}.yaml").train.learning_rate)
        Path(f"{task}.yaml").unlink()
    unknown = starter_text(Start(task, "a/b", "train.jsonl", "hf"))
    assert found == [tiny, small, yaml.safe_load(unknown)["train"]["learning_rate"]]


def test_starter_holds_out_rows_to_evaluate_on() -> None:
    for task in ("grpo", "sft", "dpo", "kto", "reward_model", "distillation"):
        teacher = "model" if task in TAUGHT else None
        text = starter_text(Start(task, "model", "train.jsonl", "hf", teacher=teacher))
        content = yaml.safe_load(text)
        assert content["data"]["eval_share"] > 0 and content["steps"]["eval_every"] > 0, task
