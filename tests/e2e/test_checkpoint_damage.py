"""Damaged checkpoints are found, named, and gone around: real checkpoints of a run, one rank."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART
from small_runs import SMALL, files_of_at_most, small_run
from typer.testing import CliRunner

from hybridrl import Trainer
from hybridrl.checkpoint.folders import newest_checkpoint, open_checkpoint
from hybridrl.checkpoint.manifest import MANIFEST, MANIFEST_DIGEST, entry_of, read_manifest
from hybridrl.cli import main, train
from hybridrl.errors import CheckpointError, UserError
from hybridrl.loop.preflight import validate_conversion

STEPS = ("steps.num_steps=6", "checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 2, 4 and 6 of a run."""
    folder = tmp_path_factory.mktemp("saved")
    with small_run(folder, *STEPS) as trainer:
        trainer.fit()
    return folder / "quickstart-grpo" / "checkpoints"


@pytest.fixture(scope="module")
def trainer(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A trainer with a run folder of its own, which loads what a test has damaged."""
    with small_run(tmp_path_factory.mktemp("loads"), *STEPS) as made:
        yield made


def copied(source: Path, target: Path) -> Path:
    """Copies a folder of which most files will only be read."""
    return shutil.copytree(source, target, copy_function=os.link)


def own(file: Path) -> Path:
    """Makes a linked file one of its own."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    return file


def flip(file: Path, place: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def zeros(file: Path) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    file.write_bytes(content)


def a_digit(file: Path) -> None:
    content = file.read_text()
    place = content.index('"step": 6') + len('"step": ')
    file.write_text(content[:place] + "4" + content[place + 1 :])


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        f"a bit of {name} at {place}": (name, lambda file, place=place: flip(file, place))
        for name in (
            "policy/__0_0.distcp",
            "policy/__0_1.distcp",
            "policy/.metadata",
            "policy/common.pt",
            "policy/metadata.json",
            "rng_rank_0.safetensors",
            "state.json",
            "hf/config.json",
            MANIFEST,
            MANIFEST_DIGEST,
        )
        for place in (0.0, 0.5, 1.0)
        if name != MANIFEST_DIGEST or place < 1  # its last character ends the line
    },
    "4 KiB of zeros": ("policy/__0_1.distcp", zeros),
    "a file of another step": (
        "policy/__0_0.distcp",
        lambda file: shutil.copy(file.parents[2] / "step_2" / "policy" / file.name, file),
    ),
    "one digit": ("state.json", a_digit),
    "cut short": ("policy/__0_0.distcp", lambda file: os.truncate(file, 100)),
    "gone": ("rng_rank_0.safetensors", Path.unlink),
    "a folder": ("state.json", lambda file: (file.unlink(), file.mkdir())),
    "a pipe": ("policy/common.pt", lambda file: (file.unlink(), os.mkfifo(file))),
    "an empty manifest": (MANIFEST, lambda file: file.write_text("{}")),
    "a manifest of another step": (
        MANIFEST,
        lambda file: shutil.copy(file.parents[1] / "step_2" / MANIFEST, file),
    ),
    "no manifest": (MANIFEST, Path.unlink),
    "a manifest that is deep": (MANIFEST, lambda file: file.write_text("[" * 10**6)),
    "a manifest that is no text": (MANIFEST, lambda file: file.write_bytes(b"\xff\xfe{")),
    "no digest of the manifest": (MANIFEST_DIGEST, Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_the_newest_whole_checkpoint(
    saved: Path, trainer: Trainer, tmp_path: Path, damage: str
) -> None:
    name, spoil = DAMAGES[damage]
    copied(saved, tmp_path / "c")
    spoil(own(tmp_path / "c" / "step_6" / name))
    flip(own(tmp_path / "c" / "step_4" / "policy" / "__0_0.distcp"))
    with pytest.raises(CheckpointError) as caught:
        trainer.load_checkpoint(tmp_path / "c")
    message = str(caught.value)
    named = MANIFEST if name == MANIFEST_DIGEST and "of the manifest" not in damage else name
    assert str(tmp_path / "c" / "step_6" / named) in message, message
    assert f"{tmp_path / 'c' / 'step_2'}: train with --resume previous" in message, message
    assert newest_checkpoint(tmp_path / "c") == tmp_path / "c" / "step_6"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": None}, "prompts"),
        ({"step": "six"}, "step"),
        ({"step": -1}, "step"),
        ({"prompts": {"epoch": 0, "index": 10**9}}, "index"),
        ({"prompts": {"epoch": 0, "index": 1.5}}, "index"),
        ({"num_updates": {}}, "policy"),
        ({"num_updates": {"policy": -3}}, "num_updates"),
        ({"seconds": "long"}, "seconds"),
        ({"dtype": "Tensor"}, "dtype"),
        ("[" * 10**5, "state.json"),
        ("[1]", "state.json"),
        ("\x00", "state.json"),
    ],
)
def test_a_malformed_state_is_one_message(
    saved: Path, trainer: Trainer, tmp_path: Path, change: object, named: str
) -> None:
    """In a checkpoint without digests, as versions before them wrote."""
    folder = copied(saved / "step_6", tmp_path / "c" / "step_6")
    state = json.loads((folder / "state.json").read_text())
    if isinstance(change, dict):
        state |= {k: v for k, v in change.items() if v is not None}
        if isinstance(change.get("prompts"), dict):
            fingerprint = json.loads((saved / "step_6" / "state.json").read_text())["prompts"]
            state["prompts"] |= {"fingerprint": fingerprint["fingerprint"]}
        state = {k: v for k, v in state.items() if change.get(k, 0) is not None}
    text = change if isinstance(change, str) else json.dumps(state)
    own(folder / "state.json").write_text(text)
    as_before_digests(folder)
    with pytest.raises(UserError, match=named):
        trainer.load_checkpoint(folder)


def as_before_digests(folder: Path) -> None:
    """Makes a checkpoint one of hybridrl before digests."""
    (folder / MANIFEST_DIGEST).unlink()
    (folder / MANIFEST).unlink()
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps(sizes))


def test_a_checkpoint_without_digests_loads_and_says_so(
    saved: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(saved / "step_6", tmp_path / "step_6")
    as_before_digests(folder)
    said: list[str] = []
    monkeypatch.setattr(trainer.store, "_notify", said.append)
    trainer.load_checkpoint(folder)
    assert trainer.step == 6 and any("no digests" in line for line in said)
    for name, what in (
        ("policy/__0_0.distcp", "policy"),
        ("policy/common.pt", "common.pt"),
        ("policy/metadata.json", "metadata.json"),
        ("policy/.metadata", ".metadata"),
        ("rng_rank_0.safetensors", "rng"),
    ):
        damaged = copied(folder, tmp_path / what / "step_6")
        content = bytearray((damaged / name).read_bytes())
        content[:4096] = bytes(min(4096, len(content)))
        own(damaged / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=what):
            trainer.load_checkpoint(damaged)


def sealed_anew(folder: Path) -> None:
    """Gives a checkpoint the digests of what it holds now, as a stranger could."""
    manifest, _ = read_manifest(folder)
    files = {name: entry_of(folder / name) for name in manifest.files}
    # Sharded files keep the pieces that their index names.
    files |= {name: entry for name, entry in manifest.files.items() if name.endswith("distcp")}
    manifest.model_copy(update={"files": files}).write(folder)


class Malicious:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.made),))


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_strangers_checkpoint_runs_nothing(
    saved: Path, trainer: Trainer, tmp_path: Path, name: str
) -> None:
    folder, made = copied(saved / "step_6", tmp_path / "step_6"), tmp_path / "made"
    file = own(folder / "policy" / name)
    if name == ".metadata":
        file.write_bytes(pickle.dumps(Malicious(made)))
    else:
        torch.save({"optimizer": Malicious(made)}, file)
    sealed_anew(folder)
    with pytest.raises(CheckpointError, match=name):
        trainer.load_checkpoint(folder)
    assert not made.exists()


def test_a_strangers_checkpoint_does_not_choose_code(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(saved / "step_6", tmp_path / "step_6")
    (folder / "evil.py").write_text("import os; os.mkdir('made')")
    state = own(folder / "state.json")
    state.write_text(state.read_text().replace('"family": "qwen3"', '"family": "step_6.evil:F"'))
    sealed_anew(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for family in (None, "qwen3", "other:F"):
        with pytest.raises(CheckpointError, match="--family step_6.evil:F"):
            validate_conversion(folder, tmp_path / "out", "hf", 1, 1, family)
    assert not (tmp_path / "made").exists()


def test_resume_previous_goes_around_damage(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quickstart-grpo"
    shutil.copytree(saved.parent, folder)
    flip(folder / "checkpoints" / "step_6" / "policy" / "__0_0.distcp")
    with small_run(tmp_path, *STEPS) as trainer:
        with pytest.raises(CheckpointError, match="--resume previous"):
            trainer.fit()
        trainer.fit(resume="previous")
        assert trainer.step == 6
    # The damaged checkpoint was written anew.
    checkpoint, state = open_checkpoint(folder)
    assert state.step == 6 and [a.step for a in checkpoint.manifest.lineage] == [4, 2]
    with (
        small_run(tmp_path / "none", *STEPS) as trainer,
        pytest.raises(CheckpointError, match="no undamaged"),
    ):
        trainer.fit(resume="previous")


def test_what_lies_in_the_way_is_named(tmp_path: Path) -> None:
    root = tmp_path / "quickstart-grpo" / "checkpoints"
    root.parent.mkdir()
    root.write_text("")
    with small_run(tmp_path, *STEPS) as trainer:
        with pytest.raises(CheckpointError, match="checkpoints: got a file"):
            trainer.fit()
        root.unlink()
        root.mkdir()
        (root / "step_8").write_text("")
        with pytest.raises(CheckpointError, match="step_8: got a file"):
            trainer.fit()
        (root / "step_8").unlink()
        (root / "step_2.partial").write_text("")  # what hybridrl itself makes, it may remove
        trainer.fit()
    assert sorted(path.name for path in root.iterdir()) == ["step_2", "step_4", "step_6"]


def test_a_full_disk_is_one_message_and_leaves_whole_checkpoints(tmp_path: Path) -> None:
    with small_run(tmp_path, *STEPS) as trainer:
        trainer.fit(until=2)
        trainer.train_step()
        with files_of_at_most(1 << 20), pytest.raises(CheckpointError) as caught:
            trainer.save_checkpoint()
        assert "step_3" in str(caught.value) and "GB are free" in str(caught.value)
        open_checkpoint(tmp_path / "quickstart-grpo" / "checkpoints" / "step_2")
        trainer.save_checkpoint()


def test_the_command_line_refuses_damage_before_ranks_start(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "quickstart-grpo"
    copied(saved.parent, folder)
    own(folder / "checkpoints" / "step_6" / MANIFEST).write_text("{}")
    launched: list[list[str]] = []
    monkeypatch.setattr(
        train, "launch_run", lambda arguments, *others: launched.append(arguments) or 0
    )
    command = ["train", str(QUICKSTART / "grpo.yaml"), *SMALL, f"run.dir={tmp_path}", *STEPS]
    refused = CliRunner().invoke(main.app, command)
    assert isinstance(refused.exception, CheckpointError) and not launched
    assert "manifest.json" in str(refused.exception) and "step_4" in str(refused.exception)
    assert CliRunner().invoke(main.app, [*command, "--resume", "previous"]).exit_code == 0
    assert launched[0][-2:] == ["--resume", "previous"]
    assert CliRunner().invoke(main.app, [*command, "--resume", "latest"]).exit_code == 2
