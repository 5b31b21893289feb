"""Secrets and other values from the environment: used, and not written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hybridrl.config.identity import (
    check_run_folder,
    identity,
    run_folder,
    saved_config,
    write_config,
)
from hybridrl.config.interpolation import HIDDEN, shown_command
from hybridrl.config.load import load_config, load_config_dict, to_yaml
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.services.report.html_page import write_report

TEXT = """
run: {name: a, dir: DIR}
model: {init: m}
algorithm: {name: grpo}
train: {tp: "${rollout.tp}"}
rollout: {tp: 1}
data:
  prompts: ["${oc.env:SET}/train.jsonl", b.jsonl]
  eval_prompts: ${oc.env:SET}/held.jsonl
reward:
  functions:
    server:
      function: remote
      options:
        url: http://${oc.env:HOST}/
        headers: {Authorization: "Bearer ${oc.env:KEY}", X-Team: literal-secret}
    own:
      function: package.module:f
      options: {api_key: "${oc.env:KEY}", depth: 3}
"""


@pytest.fixture()
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (("KEY", "s3cret"), ("SET", "/sets"), ("HOST", "judge")):
        monkeypatch.setenv(name, value)
    made = tmp_path / "c.yaml"
    made.write_text(TEXT.replace("DIR", str(tmp_path)))
    return made


def started(file: Path) -> Config:
    """Returns the configuration of a run that has begun."""
    config = load_config(file)
    run_folder(config).mkdir()
    write_config(config)
    return config


def test_config_yaml_of_a_full_disk_stays_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = started(file)
    kept = run_folder(config) / "config.yaml"
    before = kept.read_text()

    def write_half(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_config(config)
    assert kept.read_text() == before


def test_what_is_used_and_what_is_written(file: Path) -> None:
    config = started(file)
    options = config.reward.functions["server"].options
    assert options["headers"]["Authorization"] == "Bearer s3cret"
    assert options["url"] == "http://judge/"
    assert config.data.prompts == ("/sets/train.jsonl", "b.jsonl") and config.train.tp == 1
    (run_folder(config) / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    write_report(run_folder(config))
    for kept in run_folder(config).rglob("*.*"):
        text = kept.read_text()
        assert "s3cret" not in text and "literal-secret" not in text, kept
    kept = yaml.safe_load((run_folder(config) / "config.yaml").read_text())
    assert kept["data"]["prompts"] == ["${oc.env:SET}/train.jsonl", "b.jsonl"]
    assert kept["data"]["eval_prompts"] == "${oc.env:SET}/held.jsonl"
    assert kept["train"]["tp"] == "${rollout.tp}"
    server = kept["reward"]["functions"]["server"]["options"]
    assert server["headers"]["Authorization"] == "Bearer ${oc.env:KEY}"
    assert server["url"] == "http://${oc.env:HOST}/"
    again = saved_config(config)
    assert again is not None and again.data == config.data and again.train == config.train


def test_an_override_is_written_as_it_was_given(file: Path) -> None:
    config = load_config(file, ["model.init=${oc.env:SET}/m", "data.prompts=[c.jsonl]"])
    assert config.model.init == "/sets/m"
    kept = yaml.safe_load(to_yaml(config))
    assert kept["model"]["init"] == "${oc.env:SET}/m"
    assert kept["data"]["prompts"] == ["c.jsonl"], "it took the place of an interpolation"


def test_a_renewed_key_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = started(file)
    monkeypatch.setenv("KEY", "renewed")
    monkeypatch.setenv("HOST", "another-judge")
    config = load_config(file)
    assert config.reward.functions["server"].options["headers"]["Authorization"] == "Bearer renewed"
    check_run_folder(config)
    assert identity(before) == identity(config)
    # Neither the file nor its reader needs the variable any more.
    monkeypatch.delenv("KEY")
    check_run_folder(config)


def test_another_data_file_is_refused_under_the_same_text(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(file)
    monkeypatch.setenv("SET", "/other")
    with pytest.raises(ConfigError) as caught:
        check_run_folder(load_config(file))
    (violation,) = caught.value.violations
    assert violation.name == "data.prompts.0" and "${oc.env:SET}" in violation.value


def test_another_option_is_refused(file: Path) -> None:
    config = started(file)
    with pytest.raises(ConfigError, match="reward.functions"):
        check_run_folder(load_config(file, ["reward.functions.own.options.depth=4"]))
    (run_folder(config) / "interpolated.json").write_text("[" * 10**5)
    with pytest.raises(ConfigError, match="interpolated.json"):
        check_run_folder(config)


def test_an_error_shows_what_was_written(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["train.tp=${oc.env:KEY}"])
    assert "${oc.env:KEY}" in str(caught.value) and "s3cret" not in str(caught.value)


@pytest.mark.parametrize("text", ["cost ${ (.*)", r"\${a}", r"a\\${b}", "$", "${oc.env:NONE}"])
def test_a_literal_text_reads_back_equal(text: str, tmp_path: Path) -> None:
    """From Python nothing is interpolated."""
    content = {"run": {"name": "a"}, "model": {"init": "m"}, "algorithm": {"name": "grpo"}}
    config = load_config_dict({**content, "reward": {"extract": text}})
    (tmp_path / "kept.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "kept.yaml").reward.extract == text
    assert "digest" not in json.dumps(config.model_dump(mode="json"))


def test_an_escaped_interpolation_is_text(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {name: a}\nmodel: {init: m}\nalgorithm: {name: grpo}\n"
        "reward: {extract: 'cost \\${x} (.*)'}\n"
    )
    config = load_config(file)
    assert config.reward.extract == "cost ${x} (.*)"
    (tmp_path / "kept.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "kept.yaml").reward.extract == config.reward.extract


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("reward.options.headers.Authorization=Bearer k", "reward.options.headers.Authorization="),
        ("+reward.parts.0.options.headers={X: k}", "+reward.parts.0.options.headers="),
        ("reward.options={url: u, headers: {X: k}}", "reward.options="),
        ("reward={options: {headers: {X: k}}}", "reward="),
    ],
)
def test_logged_commands_have_no_headers(word: str, shown: str) -> None:
    said = shown_command(["train", "a.yaml", word, "--resume", "newest"])
    assert said == f"train a.yaml {shown}{HIDDEN} --resume newest"


def test_logged_commands_have_all_else() -> None:
    words = ["train", "reward.options.headers.X=${oc.env:KEY}", "data.headers=2", "steps.lr=1e-3"]
    assert shown_command(words) == " ".join(words)
