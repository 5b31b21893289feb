"""Copies of the training state in host memory: which is used, who has which files, and room."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from small_runs import small_run

from hybridrl.checkpoint import begun_copy, memory_copies, memory_folders
from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.manifest import (
    Ancestor,
    FileEntry,
    Manifest,
    read_manifest,
    verify_all,
)
from hybridrl.checkpoint.memory_folders import (
    RUN_ID,
    HostFiles,
    files_of_host,
    host_folder,
    make_host_folder,
    renew_copy,
    run_id,
    usable,
)
from hybridrl.loop.copying import COST, WAITING_COST, every_steps

NAME = "quickstart-grpo"
FIVE, SIX = Ancestor(step=5, order=2), Ancestor(step=6, order=3)
KNOBS = (
    "run.max_restarts=1",
    "checkpoint.copy_every=1",
    "steps.num_steps=5",
    "train.learning_rate=1e-3",
    "checkpoint.keep=9",
)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory_folders, "MEMORY", folder)
    yield folder


def manifest(
    step: int, lineage: list[Ancestor], unfinished: Ancestor | None = None, **sizes: int
) -> Manifest:
    files = {name: FileEntry(bytes=size, pieces=[]) for name, size in sizes.items()}
    return Manifest(step=step, order=0, lineage=lineage, files=files, unfinished=unfinished)


def test_a_copy_is_used_if_hosts_have_all_of_it_together() -> None:
    base = Ancestor(step=5, order=2)
    found = {step: manifest(step, [base], a=3, b=4) for step in (7, 8)}
    hosts = [
        HostFiles((0, 1), {7: {"a": 3, "b": 4}, 8: {"a": 3}}, found),
        HostFiles((2, 3), {7: {"b": 4}, 8: {"b": 3}}, {}),  # b was being received
    ]
    steps = [(step, writers) for step, _, writers in usable(hosts, base)]
    assert [step for step, _ in steps] == [7]
    assert steps[0][1]["a"] in (0, 1) and steps[0][1]["b"] not in (steps[0][1]["a"],)
    hosts[1] = HostFiles((2, 3), {7: {"b": 4}, 8: {"b": 4}}, {})
    assert [step for step, _, _ in usable(hosts, base)] == [8, 7]
    assert next(iter(usable(hosts, base)))[2]["b"] in (2, 3)


@pytest.mark.parametrize(
    ("newest", "lineage", "is_used"),
    [
        (Ancestor(step=5, order=2), [Ancestor(step=5, order=2)], True),
        (Ancestor(step=5, order=2), [Ancestor(step=6, order=3), Ancestor(step=5, order=2)], True),
        (Ancestor(step=7, order=2), [Ancestor(step=7, order=2)], False),  # is as new
        (Ancestor(step=5, order=4), [Ancestor(step=5, order=2)], False),  # the user went back
        (None, [Ancestor(step=5, order=2)], False),  # the user removed checkpoints
        (None, [], True),  # the run has none yet
    ],
)
def test_a_copy_is_used_if_it_comes_after_the_newest_checkpoint(
    newest: Ancestor | None, lineage: list[Ancestor], is_used: bool
) -> None:
    hosts = [HostFiles((0,), {7: {"a": 1}}, {7: manifest(7, lineage, a=1)})]
    assert bool(list(usable(hosts, newest))) == is_used


@pytest.mark.parametrize(
    ("newest", "lineage", "is_used"),
    [
        (None, [SIX], True),  # it was never complete
        (SIX, [SIX], True),
        (FIVE, [SIX, FIVE], True),
        (None, [SIX, FIVE], False),  # the user removed checkpoints
    ],
)
def test_a_copy_is_used_if_a_checkpoint_before_it_was_never_complete(
    newest: Ancestor | None, lineage: list[Ancestor], is_used: bool, tmp_path: Path
) -> None:
    manifest(7, lineage, SIX, a=1).write(tmp_path)
    found, _ = read_manifest(tmp_path)
    given = list(usable([HostFiles((0,), {7: {"a": 1}}, {7: found})], newest))
    assert bool(given) == is_used
    for _, told, _ in given:  # no checkpoint is named that is not there
        assert told.unfinished is None
        assert told.lineage == ([] if newest is None else lineage[lineage.index(newest) :])


def test_copies_take_their_share_of_the_time() -> None:
    assert every_steps(0.01, 1.0, COST) == 1 and every_steps(1.0, 1.0, COST) == 34
    for share in (COST, WAITING_COST):
        for cost in (0.001, 0.06, 0.07, 5.0):
            assert cost / (every_steps(cost, 2.0, share) * 2.0) <= share


def test_folders_of_runs_that_are_gone_are_removed(tmp_path: Path) -> None:
    numbers = {}
    for name in ("gone", "anew", "kept"):
        numbers[name] = run_id(tmp_path / name)
        make_host_folder(tmp_path / name, numbers[name])
    (tmp_path / "gone" / RUN_ID).unlink()
    (tmp_path / "anew" / RUN_ID).write_text("0123\n")
    make_host_folder(tmp_path / "kept", numbers["kept"])
    assert {name: host_folder(one).exists() for name, one in numbers.items()} == {
        **{"gone": False, "anew": False, "kept": True}
    }
    assert run_id(tmp_path / "kept") == numbers["kept"]


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, memory: Path) -> None:
    root = memory / f"hybridrl-{os.getuid()}"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="that only this user can access"):
        make_host_folder(tmp_path / "run", "1")
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="that only this user can access"):
        make_host_folder(tmp_path / "run", "1")


def old_copy(folder: Path, step: int) -> dict[str, bytes]:
    """Makes a complete copy of a host; returns its files."""
    names = ("policy/__0_0.distcp", "policy/.metadata", "hf/config.json", "state.json")
    files = {name: f"{name} of step {step}".encode() for name in names}
    for name, content in files.items():
        (folder / f"step_{step}" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"step_{step}" / name).write_bytes(content)
    sizes = {name: len(content) for name, content in files.items()}
    manifest(step, [], **sizes).write(folder / f"step_{step}")
    return files


@pytest.mark.parametrize("done", range(7))
def test_a_copy_that_is_written_over_counts_no_more(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, ended = run_id(tmp_path / "run"), 0
    make_host_folder(tmp_path / "run", number)
    folder = host_folder(number)
    before = {step: old_copy(folder, step) for step in (2, 3)}
    inode = (folder / "step_2/policy/__0_0.distcp").stat().st_ino

    def counted(real: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal ended
            ended += 1
            if ended > done:
                raise KeyboardInterrupt  # as if the process were killed there
            return real(*args, **given)

        return call

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        for name in ("unlink", "rename"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        renew_copy(number, 4, 3, ("policy", "critic"))
    found = files_of_host(number, (0,))
    assert 3 in found.manifests and 4 not in found.manifests
    for step in found.manifests:
        assert all((folder / f"step_{step}" / n).read_bytes() == c for n, c in before[step].items())
    if done < 6:  # two of the manifest, a name, and three files are given up
        assert ended == done + 1
        return
    assert ended == 6 and not (folder / "step_2").exists()
    kept = [path for path in (folder / "step_4").rglob("*") if path.is_file()]
    assert [(path.name, path.stat().st_ino) for path in kept] == [("__0_0.distcp", inode)]
    assert (folder / "step_4" / "critic").is_dir()


def stop_after(trainer: Any, step: int) -> None:
    """Makes a run fail after a step, as if killed; copies are complete when their step is."""
    real, real_seal = trainer.journal.log, trainer.checkpoints.copies.seal

    def seal(evaluations: Any) -> None:
        real_seal(evaluations)
        trainer.checkpoints.copies._copies._begun._thread.join()

    trainer.checkpoints.copies.seal = seal

    def log(number: int, metrics: dict[str, float]) -> None:
        real(number, metrics)
        if number == step:
            raise SystemError("lost")

    trainer.journal.log = log


def lose(folder: Path, step: int, *knobs: str) -> Path:
    """Begins a run that is lost when a step is in its records; returns the folder of its copies."""
    with small_run(folder, *KNOBS, *knobs) as trainer:
        stop_after(trainer, step)
        with pytest.raises(SystemError, match="lost"):
            trainer.fit()
        copies = host_folder(run_id(folder / NAME))
        trainer.checkpoints.copies._copies._end_copy()  # type: ignore[union-attr]  # unsealed
    return copies


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / NAME / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The records of a run that nothing ends, which leaves no copies."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "memory").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_folders, "MEMORY", folder / "memory")
        with small_run(folder, *KNOBS) as trainer:
            trainer.fit()
    assert not list((folder / "memory").iterdir())
    return records(folder)


@pytest.mark.parametrize("num_hosts", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_goes_on_from_its_newest_copy(
    num_hosts: int, unbroken: list[dict[str, float]], tmp_path: Path
) -> None:
    copies = lose(tmp_path, 4)
    # That of step 4 was not sealed before the loss, as the first of the two was.
    assert steps_in(copies) == [3, 4] and not (copies / "step_4" / "manifest.json").exists()
    with small_run(tmp_path, *KNOBS, "checkpoint.every=1") as trainer:
        trainer.checkpoints.copies._copies._hosts *= num_hosts  # type: ignore[union-attr]
        trainer.fit()
    # Parts of several hosts are written together; that of one host is read where it lies.
    steps = steps_in(tmp_path / NAME / "checkpoints")
    assert steps == ([3, *steps[1:]] if num_hosts > 1 else [4, *steps[1:]])
    folder = tmp_path / NAME / "checkpoints" / f"step_{steps[0]}"
    found = Checkpoint.open(folder)
    verify_all(folder, found.manifest)
    assert found.manifest.order == 1 and not found.manifest.lineage
    assert not list((tmp_path / "memory").iterdir())
    for ours, theirs in zip(records(tmp_path), unbroken, strict=True):
        assert all(ours[key] == theirs[key] for key in ("policy/loss", "policy/grad_norm"))


def test_a_copy_is_written_over_the_one_before_the_last(tmp_path: Path) -> None:
    files: dict[int, dict[str, int]] = {}
    held: list[IO[bytes]] = []  # or a new file might get an old one's number
    stale = "policy/__7_0.distcp"
    with small_run(tmp_path, *KNOBS) as trainer:
        real = trainer.checkpoints.copies.seal

        def seal(evaluations: Any) -> None:
            real(evaluations)
            begun = trainer.checkpoints.copies._copies._begun  # type: ignore[union-attr]
            if trainer.step == 5 or begun is None:
                return
            begun._thread.join()
            folder = host_folder(run_id(tmp_path / NAME)) / f"step_{trainer.step}"
            found = read_manifest(folder)[0]
            verify_all(folder, found)
            sharded = sorted(folder.rglob("*.distcp"))
            files[trainer.step] = {
                path.relative_to(folder).as_posix(): path.stat().st_ino for path in sharded
            }
            assert set(files[trainer.step]) == {n for n in found.files if n.endswith(".distcp")}
            held.extend(path.open("ab") for path in sharded)
            before = folder.with_name(f"step_{trainer.step - 1}")
            if before.exists():
                for path in before.rglob("*.distcp"):  # the next copy writes it shorter
                    with path.open("ab") as file:
                        file.write(b"\0" * 9999)
                (before / stale).write_bytes(b"of another layout")

        trainer.checkpoints.copies.seal = seal  # type: ignore[method-assign]
        trainer.fit()
    for file in held:
        file.close()
    assert sorted(files) == [1, 2, 3, 4] and len(files[1]) > 1
    assert files[3] == files[1] and files[4] == files[2]
    assert not set(files[1].values()) & set(files[2].values())


@pytest.mark.full
def test_a_copy_that_was_gone_on_from_stays_until_the_next_is_complete(tmp_path: Path) -> None:
    copies = lose(tmp_path, 4)
    with small_run(tmp_path, *KNOBS) as trainer:
        stop_after(trainer, 4)
        trainer.checkpoints.copies.seal = lambda evaluations: None  # type: ignore[method-assign]
        with pytest.raises(SystemError, match="lost"):
            trainer.fit()
        trainer.checkpoints.copies._copies._end_copy()  # type: ignore[union-attr]
        assert steps_in(copies) == [3, 4]
    with small_run(tmp_path, *KNOBS) as trainer:
        trainer.fit(until=3)  # nothing to do, but that no checkpoint has it
    assert steps_in(tmp_path / NAME / "checkpoints") == [3]
    starts = json.loads((tmp_path / NAME / "run.json").read_text())["starts"]
    assert [one["after_step"] for one in starts] == [0, 3]
    with small_run(tmp_path, *KNOBS) as trainer:
        trainer.fit()
    starts = json.loads((tmp_path / NAME / "run.json").read_text())["starts"]
    assert starts[-1]["after_step"] == 3 and not copies.exists()


def damage(file: Path) -> None:
    """Flips a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("num_hosts", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_damaged_copy_is_named_and_the_one_before_is_taken(
    num_hosts: int, tmp_path: Path
) -> None:
    with small_run(tmp_path, *KNOBS) as trainer:
        seal = trainer.checkpoints.copies.seal

        def end_with_two_copies(evaluations: Any) -> None:
            seal(evaluations)
            trainer.checkpoints.copies._copies._begun._thread.join()  # type: ignore[union-attr]
            if trainer.step == 4:
                raise SystemError("lost")

        trainer.checkpoints.copies.seal = end_with_two_copies  # type: ignore[method-assign]
        with pytest.raises(SystemError, match="lost"):
            trainer.fit()
    copies = host_folder(run_id(tmp_path / NAME))
    file = next((copies / "step_4" / "policy").glob("*.distcp"))
    damage(file)
    with small_run(tmp_path, *KNOBS) as trainer:
        trainer.checkpoints.copies._copies._hosts *= num_hosts  # type: ignore[union-attr]
        trainer.fit()
    starts = json.loads((tmp_path / NAME / "run.json").read_text())["starts"]
    assert starts[-1]["after_step"] == 3
    said = (tmp_path / NAME / "logs" / "rank_0.log").read_text()
    assert f"step 4 was found in host memory but is not used: {file}" in said
    assert "step 3 was found in host memory" in said


@pytest.mark.full
def test_a_damaged_copy_is_passed_over(tmp_path: Path) -> None:
    copies = lose(tmp_path, 4, "checkpoint.every=2")
    damage(next((copies / "step_3" / "policy").glob("*.distcp")))
    with small_run(tmp_path, *KNOBS) as trainer:
        trainer.fit(until=3)
    starts = json.loads((tmp_path / NAME / "run.json").read_text())["starts"]
    assert starts[-1]["after_step"] == 2  # of the checkpoint


@pytest.mark.parametrize("way", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_a_host_without_room_says_so_and_trains(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "none":
        monkeypatch.setattr(memory_copies, "free_bytes", lambda reserved: 1000)
    else:
        real = begun_copy.write_digested

        def write(file: Path, content: bytes) -> FileEntry:
            if "step_2" in str(file):
                raise OSError(28, "No space left on device")
            return real(file, content)

        monkeypatch.setattr(begun_copy, "write_digested", write)
    with small_run(tmp_path, *KNOBS) as trainer:
        trainer.fit()
        assert (
            trainer.checkpoints.copies._copies is not None
            and trainer.checkpoints.copies._copies.is_off
        )
    said = (tmp_path / NAME / "logs" / "rank_0.log").read_text()
    assert "no copies of the state in host memory" in said
    assert ("but copies need" if way == "none" else "No space left on device") in said
    assert not list((tmp_path / "memory").iterdir())
    assert len(records(tmp_path)) == 5


def test_a_copy_whose_thread_fails_does_not_count_and_the_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = begun_copy.write_digested, dict[int, list[int]]()

    def write(file: Path, content: bytes) -> FileEntry:
        if "step_3" in str(file):
            raise MemoryError("no memory")
        return real(file, content)

    monkeypatch.setattr(begun_copy, "write_digested", write)
    with small_run(tmp_path, *KNOBS, "steps.num_steps=6") as trainer:
        real_seal = trainer.checkpoints.copies.seal

        def seal(evaluations: Any) -> None:
            real_seal(evaluations)
            copies = trainer.checkpoints.copies._copies
            assert copies is not None and copies._begun is not None
            copies._begun._thread.join(60)
            seen[trainer.step] = sorted(files_of_host(copies._number, (0,)).manifests)

        trainer.checkpoints.copies.seal = seal  # type: ignore[method-assign]
        trainer.fit()
    # That of step 2 stays while 3 fails and 4 is written over what is left of it.
    assert {step: seen[step] for step in (2, 3, 4, 5)} == {2: [1, 2], 3: [2], 4: [2, 4], 5: [4, 5]}
    said = (tmp_path / NAME / "logs" / "rank_0.log").read_text()
    failure = "a copy of the state in host memory failed; the copy of step 2 is kept (rank 0 on"
    assert failure in said
    assert "MemoryError: no memory" in said
    assert not list((tmp_path / "memory").iterdir())


def test_copies_of_other_runs_stay_unless_they_are_certainly_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that does not answer, or that this container lacks, is no reason."""
    runs = {name: tmp_path / name / "runs" / "run" for name in ("away", "stale", "mount", "kept")}
    numbers = {name: run_id(folder) for name, folder in runs.items()}
    for name, folder in runs.items():
        make_host_folder(folder, numbers[name])
    runs["away"].parents[1].rename(tmp_path / "gone")  # run.dir cannot be read
    # Another file system is where that of run.dir was: an empty mount point, for example.
    runs["mount"].parent.rename(tmp_path / "elsewhere")
    runs["mount"].parent.mkdir()
    device = host_folder(numbers["mount"]) / memory_folders.DEVICE
    device.write_text(str(int(device.read_text()) + 1))
    real = Path.read_text

    def read_text(path: Path, *given: Any, **named: Any) -> str:
        if path == runs["stale"] / RUN_ID:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read_text)
        make_host_folder(runs["kept"], numbers["kept"])
        with pytest.raises(OSError, match="Stale"):  # and gets no other number
            run_id(runs["stale"])
    assert all(host_folder(number).exists() for number in numbers.values())
    assert run_id(runs["stale"]) == numbers["stale"]
