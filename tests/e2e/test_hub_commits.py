"""Models and data sets of the hub: a run stays at the commits that it began with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import QUICKSTART, ROOT, run
from fake_hub import FakeHub, fake_hub, settings
from launch import run_ranks
from safetensors.torch import load_file
from small_runs import SMALL, small_run
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl import Trainer
from hybridrl.config.hub import adopted
from hybridrl.config.identity import identity
from hybridrl.config.load import load_config_dict
from hybridrl.data.sets import data_set_rows
from hybridrl.errors import ConfigError, DataError, ModelError
from hybridrl.loop.preflight import model_violations

NAME, REPOSITORY, ROWS = "quickstart-grpo", "org/tiny", "datasets/org/sums"
A_COMMIT = "0123456789" * 4
WORKER = str(Path(__file__).with_name("hub_ranks_worker.py"))
OF_HUB = (
    "model.init=null",
    f"model.path={REPOSITORY}",
    "algorithm.kl_coef=0.1",
    "steps.num_steps=1",
)


def weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Writes a tiny model and returns its weights."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(QUICKSTART / "model", dtype=torch.float32)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copytree(QUICKSTART / "model", folder, dirs_exist_ok=True)
    return load_file(folder / "model.safetensors")


def rows(first: int) -> dict[str, bytes]:
    """Returns the files of a data set whose answers count from `first`."""
    lines = [json.dumps({"prompt": f"1+{i}=", "answer": str(first + i)}) for i in range(8)]
    return {"README.md": b"---\n---\n", "train.jsonl": "\n".join(lines).encode()}


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as served:
        for owner, name, value in settings(served.url, tmp_path / "cache"):
            monkeypatch.setattr(owner, name, value)
        yield served


def reference_is(trainer: Trainer, expected: dict[str, torch.Tensor]) -> bool:
    assert trainer.reference is not None
    own = trainer.reference.model.weights()
    found = next(own[name] for name in own if name.endswith("word_embeddings.weight"))
    table = expected["model.embed_tokens.weight"]
    return torch.equal(found[: len(table)], table)  # more rows pad it


def test_agents_with_a_model_of_the_hub_need_its_chat_template(hub: FakeHub) -> None:
    """And a processor that allows the images, of which the hub has the files too."""
    content = (ROOT / "benchmarks" / "models" / "qwen3-vl-4b.json").read_bytes()
    rules = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}
    files = {"config.json": content, "preprocessor_config.json": json.dumps(rules).encode()}
    hub.commit("org/seeing", {**files, "tokenizer_config.json": b"{}"})
    sections: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"init": "org/seeing"},
        "algorithm": {"name": "grpo"},
        "agent": {"command": "true"},
        "data": {"max_prompt_tokens": 2048, "max_image_pixels": 100},
    }
    _, found = model_violations(load_config_dict(sections), 1)
    assert {one.name for one in found} >= {"data.max_image_pixels", "model.tokenizer"}
    (error,) = (one for one in found if one.name == "model.tokenizer")
    assert "org/seeing, which has no chat template" in str(error)
    hub.commit("org/seeing", {**files, "chat_template.jinja": b"{{ messages }}"})
    _, found = model_violations(load_config_dict(sections), 1)
    assert "model.tokenizer" not in {one.name for one in found}


def test_a_run_stays_at_the_commit_that_it_began_with(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = weights(tmp_path / "a", 0), weights(tmp_path / "b", 1)
    a = hub.commit_folder(REPOSITORY, tmp_path / "a")
    b = hub.commit_folder(REPOSITORY, tmp_path / "b", is_main=False)
    runs = tmp_path / "runs"
    with small_run(runs, *OF_HUB, f"model.tokenizer={REPOSITORY}") as trainer:
        assert reference_is(trainer, first)
        trainer.fit()
    written = yaml.safe_load((runs / NAME / "config.yaml").read_text())
    assert written["model"]["path"] == written["model"]["tokenizer"] == f"{REPOSITORY}@{a}"
    assert identity(trainer.config)["model"]["path"] == f"{REPOSITORY}@{a}"
    assert hub.num_questions(REPOSITORY) == 1

    hub.main[REPOSITORY] = b
    resumed = [*OF_HUB, f"model.tokenizer={REPOSITORY}", "steps.num_steps=2"]
    with small_run(runs, *resumed) as trainer:
        assert reference_is(trainer, first) and not reference_is(trainer, second)
        trainer.fit()
        assert trainer.step == 2
    assert hub.num_questions(REPOSITORY) == 1
    for other in (b, "main"):
        said = f"model.path: got '{REPOSITORY}@{b}'; allowed: '{REPOSITORY}@{a}', with which "
        with (
            pytest.raises(ConfigError, match=said),
            small_run(runs, *resumed, f"model.path={REPOSITORY}@{other}"),
        ):
            pass
    with small_run(runs, *resumed, f"model.path={REPOSITORY}@{a}") as trainer:
        assert reference_is(trainer, first)

    with small_run(tmp_path / "new", *OF_HUB) as trainer:
        assert reference_is(trainer, second)
    go_offline(monkeypatch)
    for folder, expected in ((runs, first), (tmp_path / "newer", second)):
        knobs = resumed if folder == runs else OF_HUB
        num = len(hub.asked)
        with small_run(folder, *knobs) as trainer:
            assert reference_is(trainer, expected)
        assert len(hub.asked) == num


def test_what_the_hub_does_not_have_is_said_in_one_message(hub: FakeHub, tmp_path: Path) -> None:
    weights(tmp_path / "a", 0)
    hub.commit_folder(REPOSITORY, tmp_path / "a")
    hub.commit(ROWS, rows(1))
    cases = {
        "model.path=org/tiny@v9": "model.path: got org/tiny@v9; allowed: a branch, tag or commit of"
        " org/tiny. Correct the revision 'v9' after the '@'.",
        f"model.path={REPOSITORY}@{A_COMMIT}": f"Correct the revision '{A_COMMIT}' after",
        f"model.tokenizer={REPOSITORY}@v9": "model.tokenizer: got org/tiny@v9; allowed: a branch",
        "model.path=org/none": "model.path: got org/none; allowed: an HF directory that exists or",
        f"model.path={REPOSITORY}@": "model.path: got org/tiny@; allowed: an HF directory that",
        "data.prompts=datasets:org/sums@v9:train": "data.prompts.0: got datasets:org/sums@v9:train",
    }
    for knob, said in cases.items():
        with (
            pytest.raises((ModelError, DataError)) as caught,
            small_run(tmp_path / "runs", *OF_HUB, knob),
        ):
            pass
        assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def answers(name: str) -> int:
    return int(str(next(iter(data_set_rows(name)))["answer"]))


def test_a_data_set_stays_at_its_commit(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, runs = hub.commit(ROWS, rows(1)), tmp_path / "runs"
    knobs = ["steps.num_steps=1", "data.prompts=datasets:org/sums:train"]
    with small_run(runs, *knobs) as trainer:
        trainer.fit()
        assert trainer.config.data.prompts == (f"datasets:org/sums@{a}:train",)
    b = hub.commit(ROWS, rows(2))
    assert [answers(f"datasets:org/sums{at}:train") for at in ("", f"@{a}", "@main")] == [2, 1, 2]
    num = hub.num_questions(ROWS)
    knobs[0] = "steps.num_steps=2"
    with small_run(runs, *knobs, "data.eval_prompts=datasets:org/sums:train") as trainer:
        assert int(str(trainer.prompts.take(1)[0].columns["answer"])) < 9
        assert trainer.config.data.eval_prompts == (f"datasets:org/sums@{a}:train",)
    assert hub.num_questions(ROWS) == num
    said = rf"data\.prompts: got .*{b}.*; allowed: .*{a}.*, with"
    with (
        pytest.raises(ConfigError, match=said),
        small_run(runs, *knobs, f"data.prompts=datasets:org/sums@{b}:train"),
    ):
        pass
    go_offline(monkeypatch)  # where datasets itself takes the newest that it has prepared
    assert [answers(f"datasets:org/sums{at}:train") for at in ("", f"@{a}", f"@{b}")] == [2, 1, 2]
    with pytest.raises(DataError, match=f"without commit {A_COMMIT}; allowed: the data set at"):
        answers(f"datasets:org/sums@{A_COMMIT}:train")


@pytest.mark.full
def test_only_one_process_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Main moves right after the first question, as it may between those of two ranks."""
    weights(tmp_path / "a", 0), weights(tmp_path / "b", 1)
    knobs = [QUICKSTART / "grpo.yaml", *SMALL, *OF_HUB]
    with fake_hub() as hub:
        a = hub.commit_folder(REPOSITORY, tmp_path / "a")
        hub.moves[REPOSITORY] = hub.commit_folder(REPOSITORY, tmp_path / "b", is_main=False)
        with monkeypatch.context() as of_command:
            of_command.setenv("HF_ENDPOINT", hub.url)
            of_command.setenv("HF_HOME", str(tmp_path / "cache"))
            run("train", *knobs, f"run.dir={tmp_path / 'own'}", "--world", "1")
        written = yaml.safe_load((tmp_path / "own" / NAME / "config.yaml").read_text())
        assert written["model"]["path"] == f"{REPOSITORY}@{a}"
        assert hub.num_questions(REPOSITORY) == 1

        hub.main[REPOSITORY], hub.moves[REPOSITORY] = a, hub.main[REPOSITORY]
        arguments = [str(tmp_path), hub.url, *map(str, knobs), f"run.dir={tmp_path / 'torchrun'}"]
        run_ranks(2, WORKER, arguments, 120)
        assert hub.num_questions(REPOSITORY) == 2
        assert hub.asked.count(f"/api/models/{REPOSITORY}/revision/v9") == 1
    for rank in range(2):
        path, refusal = (tmp_path / f"rank_{rank}").read_text().splitlines()
        assert path == f"{REPOSITORY}@{a}"
        assert refusal.startswith("model.path: got org/tiny@v9; allowed: a branch, tag or commit")


def config_of(**sections: Any) -> Any:
    content = {"run": {"name": "a"}, "model": {"path": "o/m"}, "algorithm": {"name": "grpo"}}
    return load_config_dict({**content, **sections})


def test_a_commit_is_adopted_only_from_the_same_repository_in_the_same_place() -> None:
    saved = config_of(
        model={"path": f"o/m@{A_COMMIT}"}, data={"prompts": [f"datasets:o/d@{A_COMMIT}:train"]}
    )
    for path, prompts, expected in (
        ("o/m", "datasets:o/d:train", [f"o/m@{A_COMMIT}", f"datasets:o/d@{A_COMMIT}:train"]),
        ("o/n", "datasets:o/d:test", ["o/n", "datasets:o/d:test"]),
        ("o/m@v1", "datasets:o/d@v1:train", ["o/m@v1", "datasets:o/d@v1:train"]),
    ):
        config = config_of(model={"path": path}, data={"prompts": prompts})
        assert [str(name) for name in adopted(config, saved).values()] == expected
