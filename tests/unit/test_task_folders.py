"""Task folders in Harbor's format, and the sandbox in which their commands run."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_agent_runners import task_of

from hybridrl.agents.connectors import harbor
from hybridrl.agents.task_sandbox import Bubbles


def can_isolate() -> bool:
    if shutil.which("bwrap") is None:
        return False
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


needs_bwrap = pytest.mark.skipif(not can_isolate(), reason="bubblewrap cannot isolate here")


@needs_bwrap
def test_commands_see_only_their_own_files_and_end_with_their_processes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "put" / "inner").mkdir(parents=True)
    (tmp_path / "put" / "inner" / "file").write_text("content")

    async def check() -> None:
        place = Bubbles("/app", ["/logs"], {"MINE": "yes"})
        try:
            await place.put(tmp_path / "put", "/app")
            ended = await place.run(["bash", "-c", "pwd; cat inner/file; echo $MINE; exit 3"], 10)
            assert (ended.code, ended.output) == (3, "/app\ncontentyes\n")
            for command in (
                f"cat {secret}",
                "ls /root/.ssh /work /home/*",
                "touch /usr/x",
                "touch /etc/x",
                "mount -o remount,rw,bind /usr",
                "mount -t tmpfs none /usr",
                "unshare --user --map-root-user true",
                f"ls {Path(__file__).parent}",
                "ls -d /opt || ls -d /var || ls -d /run || ls -d /data || ls -d /srv",
                "cat /etc/shadow || ls /etc/ssl/private",
                "cat < /dev/tcp/127.0.0.1/1",
                "[ $(ls /proc | grep -c '^[0-9]') -gt 5 ]",
                "env | grep -i token",
            ):
                assert (await place.run(["bash", "-c", command], 10)).code, command
            began = time.monotonic()
            left = "(sleep 30; echo late > /logs/late) & sleep 30"
            late = await place.run(["bash", "-c", f"echo begun; {left}"], 1.0)
            assert (late.code, late.output) == (None, "begun\n")
            await place.run(["bash", "-c", "sleep 30 & echo $! > /logs/child"], 10)
            assert time.monotonic() < began + 15
            # Links that lead out of the sandbox are neither read nor written through.
            links = (
                f"ln -s {secret} /logs/link; ln -sfn {tmp_path} /app/inner; ln -s {secret} /app/f"
            )
            await place.run(["bash", "-c", links], 10)
            assert await place.get("/logs/link") is None
            assert await place.get("/app/inner/secret") is None
            await place.put(tmp_path / "put", "/app")
            await place.put(tmp_path / "put" / "inner" / "file", "/app/f")
            assert await place.get("/app/inner/file") == await place.get("/app/f") == b"content"
            assert secret.read_text() == "secret"
            for path in ("/usr/x", "relative", "/app/../../etc/x", "/other/x"):
                with pytest.raises(ValueError, match="allowed: a path in"):
                    await place.get(path)
            with pytest.raises(ValueError, match="folder of the sandbox"):
                Bubbles("/usr/app")
        finally:
            root = place._root
            await place.close()
        assert not root.exists()

    asyncio.run(check())


@needs_bwrap
def test_commands_cannot_keep_anything_in_folders_that_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")

    async def check() -> None:
        place = Bubbles("/home/me/app", ["/logs"])
        try:
            for command in (
                "mkdir -p /logs/v/reward.txt && echo 9 > /logs/v/x && chmod 555 /logs/v /logs",
                "mkdir -p ~/.local ~/$(printf 'd/%.0s' {1..1500}) && touch ~/.bashrc /tmp/x",
                "echo kept > kept && chmod 0 /home/me/app /home/me ~/.local /tmp",
            ):
                ended = await place.run(["bash", "-c", command], 10)
                assert ended.code == 0, ended.output
            await place.clear(["/logs/v"])
            seen = "find /logs /home /tmp; cat kept; touch /logs/v/x"
            ended = await place.run(["bash", "-c", seen], 10)
            names = "/logs /logs/v /home /home/me /home/me/app"
            assert ended.output.split() == [*names.split(), "/home/me/app/kept", "/tmp", "kept"]
            gone = "cd /; rm -rf /home/me /logs/v; ln -s /usr /home/me; ln -s v /logs/v"
            await place.run(["bash", "-c", gone], 10)
            assert await place.get("/logs/v") is None  # a link to itself
            await place.clear(["/logs/v"])
            ended = await place.run(["find", "/home", "/logs"], 10)
            assert ended.output.split() == ["/home", "/home/me", "/home/me/app", "/logs", "/logs/v"]
            await place.run(["mkdir", "-p", "/logs/v/file/deep"], 10)
            assert await place.get("/logs/v/file") is None
            await place.put(tmp_path / "file", "/logs/v/file")
            assert await place.get("/logs/v/file") == b"content"
        finally:
            await place.close()
        assert not place._root.exists()

    asyncio.run(check())


def test_a_sandbox_without_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="install bubblewrap"):
        Bubbles("/app")


def task_folder(folder: Path, dockerfile: str = "FROM ubuntu\nWORKDIR /app\nCOPY . /app\n") -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "instruction.md").write_text("Write the sum of the numbers to /app/sum.txt.")
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 20.0\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "numbers.txt").write_text("1\n2\n3\n")
    (folder / "tests" / "test.sh").write_text(
        'if [ "$(cat /app/sum.txt)" = 6 ]; then echo 1 > /logs/verifier/reward.txt\n'
        "else echo 0.25 > /logs/verifier/reward.txt; fi\n"
    )
    return folder


class Scripted:
    """A client of a model that calls the shell with the given commands, then answers."""

    def __init__(self, *commands: Any, limit: str | None = None) -> None:
        self.limit = limit
        self.commands, self.seen = list(commands), list[str]()
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages: list[Any], **_: Any) -> Any:
        self.seen.append(messages[-1]["content"])
        calls = None
        if not self.commands and self.limit:
            error = ValueError("refused")
            error.code = self.limit  # type: ignore[attr-defined]
            raise error
        if self.commands:
            function = SimpleNamespace(name="shell", arguments=self.commands.pop(0))
            calls = [SimpleNamespace(id="call", function=function)]
        message = SimpleNamespace(
            tool_calls=calls, model_dump=lambda exclude_none: {"role": "assistant", "content": ""}
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def played(folder: Path, client: Scripted, **options: Any) -> float:
    task = SimpleNamespace(
        **{**vars(task_of(0)), "columns": {"task": str(folder)}, "client": lambda: client}
    )
    return asyncio.run(harbor.play(task, **options))


def shell(command: str) -> str:
    return json.dumps({"command": command})


@needs_bwrap
def test_the_tests_of_a_task_give_the_reward(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "task")
    (row,) = harbor.rows(str(tmp_path))
    assert row == {"prompt": (folder / "instruction.md").read_text(), "task": str(folder)}
    right = Scripted(shell("ls; ls /tests"), "not json", shell("echo 6 > sum.txt; exit 2"))
    assert played(folder, right) == 1.0
    assert right.seen[1].splitlines() == ["Dockerfile", "numbers.txt", "", "[exit 0]"]
    assert "Call the tool shell" in right.seen[2] and right.seen[3] == "\n[exit 2]"
    assert played(folder, Scripted()) == 0.25
    # An agent cannot write the reward or the tests itself.
    forged = "mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.txt; echo 9 > /logs/x"
    planted = (
        "ln -s /dev/null /tests/test.sh; echo 'echo 9 > /logs/verifier/reward.json' > /tests/y"
    )
    assert played(folder, Scripted(shell(forged), shell(planted))) == 0.25
    stale = "cd /logs; mkdir -p verifier; echo 9 > verifier/reward.txt; chmod 555 verifier . /tests"
    hostile = "mkdir -p /logs/verifier/reward.txt/x; chmod 0 /app /home /tmp; ln -s . ~/.local"
    assert played(folder, Scripted(shell(stale))) == 0.25
    assert played(folder, Scripted(shell(stale), shell(hostile))) == 0.25
    slow = Scripted(shell("echo a; sleep 20"))
    played(folder, slow, command_timeout_s=0.5)
    assert slow.seen[1] == "a\n\n[took longer than 0.5 s]"
    (folder / "tests" / "test.sh").write_text("echo nothing to see\n")
    with pytest.raises(ValueError, match="wrote no reward; output: nothing to see"):
        played(folder, Scripted())
    reward = 'echo \'{"speed": 0.5, "size": 1}\' > /logs/verifier/reward.json\n'
    (folder / "tests" / "test.sh").write_text(reward)
    assert played(folder, Scripted()) == 1.5


@needs_bwrap
def test_files_are_copied_as_the_dockerfile_says(tmp_path: Path) -> None:
    text = "FROM x\nWORKDIR /data\nENV A=1 B='2 3'\nCOPY numbers.txt ./in/\nCOPY sub /data/sub\n"
    folder = task_folder(tmp_path / "task", text)
    (folder / "environment" / "sub").mkdir()
    (folder / "environment" / "sub" / "deep.txt").write_text("deep")
    client = Scripted(shell("pwd; echo $A $B; cat in/numbers.txt sub/deep.txt"))
    played(folder, client)
    assert client.seen[1] == "/data\n1 2 3\n1\n2\n3\ndeep\n[exit 0]"


@needs_bwrap
def test_calls_that_cannot_be_run_and_limits_leave_a_reward(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "task")
    wrong = [shell(text) for text in ("echo \0", "\ud800", "x" * (1 << 18))]
    client = Scripted(*wrong, "[" * 100_000, shell("echo ok"))
    assert played(folder, client) == 0.25
    assert all(text.startswith("The command cannot be run: ") for text in client.seen[1:4])
    assert "Call the tool shell" in client.seen[4] and client.seen[5] == "ok\n\n[exit 0]"
    right = shell("echo 6 > sum.txt")
    assert played(folder, Scripted(right, limit="context_length_exceeded")) == 1.0
    with pytest.raises(ValueError, match="refused"):
        played(folder, Scripted(right, limit="other"))
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 1.0\n")
    slow = Scripted(right, shell("sleep 20"), shell("echo 5 > sum.txt"))
    assert played(folder, slow) == 1.0 and len(slow.commands) == 1


@needs_bwrap
def test_dockerfiles_are_followed_as_docker_does(tmp_path: Path) -> None:
    text = (
        "FROM x\n# don't fail\nENV A=/x:$PATH \\\n  # another's comment\n  B=${HOME}/b\n"
        'WORKDIR /data\nCOPY numbers.txt /data/in/one\nCOPY /numbers.txt /data\nCMD ["it\'s"]\n'
    )
    folder = task_folder(tmp_path / "task", text)
    client = Scripted(shell("echo $A $B; find . -type f; cat in/one"))
    played(folder, client)
    seen = "/x:/usr/local/bin:/usr/bin:/bin /home/b\n./in/one\n./numbers.txt\n1\n2\n3\n"
    assert sorted(client.seen[1].split()) == sorted([*seen.split(), "[exit", "0]"])


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("COPY /etc/hostname /app/", "a file or folder of"),
        ("COPY ../../other /app/", "a file or folder of"),
        ("COPY link /app/", "a file or folder of"),
        ("COPY deep/secret /app/", "a file or folder of"),
        ("COPY *.txt /app/", "a file or folder of"),
        ("ENV A=$OTHER", r"'\$OTHER' is not \$NAME"),
        ("ENV A='$PATH'", r"'\$PATH' is not \$NAME"),
        ("ENV A=${PATH:-x}", r"'\$' is not \$NAME"),
        ("ENV A='x", "No closing quotation"),
    ],
)
def test_wrong_lines_of_a_dockerfile_are_named(tmp_path: Path, line: str, allowed: str) -> None:
    folder = task_folder(tmp_path / "task", f"FROM x\n{line}\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("secret")
    (folder / "environment" / "link").symlink_to(tmp_path / "other" / "secret")
    (folder / "environment" / "deep").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=rf"Dockerfile: got .*{allowed}"):
        played(folder, Scripted())


def test_tasks_that_need_an_image_or_lack_files_are_refused(tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "task", "FROM x\nRUN apt-get install \\\n  cowsay\n")
    with pytest.raises(ValueError, match="got 'RUN apt-get install    cowsay'.*option sandbox"):
        played(folder, Scripted())
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ValueError, match=r"no tests/test.sh"):
        played(folder, Scripted())
    (folder / "task.toml").write_text("not toml")
    with pytest.raises(ValueError, match="Harbor's format"):
        played(folder, Scripted())
