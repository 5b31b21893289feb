"""Programs as responses: scored by their tests, and bombs of every kind contained."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batches import rollout_batch

from hybridrl.config.schema import RewardConfig, ScorerConfig
from hybridrl.errors import DataError, UserError
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.contain import DEVICES, REFUSED
from hybridrl.rewards.functions import find_reward
from hybridrl.rewards.outcome import Noted
from hybridrl.rewards.sandbox import Code, run_program

LIMITS = {"time_s": 2, "memory_mib": 256, "disk_mib": 4, "processes": 8}


@pytest.fixture(scope="module")
def code() -> Code:
    try:
        return Code(time_s=2)
    except UserError as error:
        if "not contained: unshare" in str(error):
            pytest.skip(f"no namespaces here: {error}")
        raise


ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
READS_MARK = """
import os, re
for name in os.listdir("."):
    for found in re.findall("[0-9a-f]{32}", open(name).read()):
        print()
        print(found, flush=True)
os._exit(0)
"""
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
DOUBLE = "print(2 * int(input()))"
PAIRS = [{"input": "3\n", "output": "6"}, {"input": "4", "output": "8\n\n"}]


@pytest.mark.parametrize(
    ("response", "tests", "expected"),
    [
        (ADD, "\n".join(ASSERTS), 1),
        (ADD, ASSERTS, 1),
        (ADD.replace("+", "-"), ASSERTS, 0),
        ("def add(a, b): return a + b", ASSERTS, 1),
        ("```py\n1/0\n```\n" + ADD, ASSERTS, 1),  # the last block counts
        ("def add(a, b): return", ASSERTS, 0),
        ("not a program", ASSERTS, 0),
        ("", ASSERTS, 0),
        ("\0", ASSERTS, 0),
        ("#" * 200_000, "assert True", 1),
        (ADD, "#" * 200_000 + "\nassert add(1, 2) == 3", 1),
        (DOUBLE, PAIRS, 1),
        ("print(6)", PAIRS, 0),
        (DOUBLE + "; raise SystemExit(1)", PAIRS, 0),
        # Programs that would be right for never being asked.
        ("import sys; sys.exit(0)", ASSERTS, 0),
        ("import os; os._exit(0)", ASSERTS, 0),
        ("if False:\n  '''", ASSERTS, 0),
        ("print = lambda *a: None\ndef add(a, b): return a + b", ASSERTS, 1),
        ("import sys; sys.exit(97)", ASSERTS, 0),  # the code of what could not be contained
        (READS_MARK, ASSERTS, 0),
        ("import builtins; builtins.AssertionError = 1; add = None", ASSERTS, 0),
    ],
)
def test_a_program_is_right_if_its_tests_pass(code, response, tests, expected):
    found = code("", response, {"tests": tests})
    assert found == expected
    assert not isinstance(found, Noted)


def test_a_program_may_score_the_share_of_tests():
    some = find_reward(ScorerConfig(function="code", options={"partial": True, "tests_key": "t"}))
    wrong_once = "def add(a, b): return abs(a) + b"
    assert some("", wrong_once, {"t": ASSERTS}) == 0.5
    assert some("", "print(6)", {"t": PAIRS}) == 0.5


@pytest.mark.parametrize("tests", [None, [], 3, [3], [{"input": ""}]])
def test_a_row_without_tests_is_refused(code, tests):
    with pytest.raises(DataError, match="a text of asserts"):
        code("", ADD, {"tests": tests})


BOMBS = {
    "fork": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "threads": "import threading as t\nwhile True: t.Thread(target=t.Event().wait).start()",
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(3600)",
    "catch": "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
    " except (OSError, ValueError): pass\nwhile True: pass",
    "memory": "x = bytearray(1 << 34)",
    "list": "x = []\nwhile True: x.append('a' * 100000)",
    "file": "f = open('big', 'wb')\nwhile True: f.write(b'0' * 65536)",
    "files": "for i in range(99): open(f'b{i}', 'wb').write(b'0' * (1 << 20))",
    "output": "while True: print('x' * 10000)",
}


# What a program prints that tries to get memory which none of its other limits counts.
HOARDS = {
    "memory file": "import os\nos.memfd_create('x')",
    "shared memory": "call(libc.shmget, 0, ctypes.c_size_t(1 << 30), 0o1600)",
    "messages": "call(libc.msgget, 0, 0o1600)",
    "message queue": "call(libc.mq_open, b'/x', 0o102, 0o600, None)",
    "io_uring": "call(libc.syscall, 425, 4, ctypes.create_string_buffer(256))",
    "socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "buffers": "import socket\nsocket.socketpair()[0].setsockopt(1, socket.SO_SNDBUF, 1 << 30)",
    "datagrams": "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)",
    "pipe": "import fcntl\nfcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "pages": "call(libc.vmsplice, os.pipe()[1], (ctypes.c_size_t * 2)(1 << 12, 1), 1, 0)",
    "splice": "call(libc.splice, os.pipe()[0], None, os.pipe()[1], None, 1, 0)",
    "tee": "call(libc.tee, os.pipe()[0], os.pipe()[1], 1, 0)",
    "sendfile": "os.sendfile(os.pipe()[1], os.open('main.py', 0), 0, 1)",
    "namespace": "call(libc.unshare, 0x10020000)",
    "namespace of a child": "call(libc.syscall, CLONE, 0x10000000 | 17, 0, 0, 0, 0)",
}
CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
def call(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


@pytest.mark.skipif(os.uname().machine not in REFUSED, reason="no table of calls")
@pytest.mark.parametrize("way", HOARDS)
def test_memory_that_no_limit_counts_is_refused(code, way):
    ended = run_program(f"{CALLS}\n{HOARDS[way]}", "", LIMITS)
    wanted = "Errno 24]" if way == "message queue" else "Errno 1]"
    assert ended.code == 1 and wanted in ended.error, ended


def test_threads_and_processes_work_within_the_limits(code):
    program = (
        "import subprocess, sys, threading\n"
        "thread = threading.Thread(target=lambda: print('thread', flush=True))\n"
        "thread.start(); thread.join()\n"
        "subprocess.run([sys.executable, '-c', 'print(2)'], check=True)\n"
    )
    ended = run_program(program, "", {**LIMITS, "memory_mib": 256})
    assert (ended.code, ended.output.split()) == (0, ["thread", "2"]), ended


FILLS = """
import socket
keep, held = [], 0
try:
    while True:
        pair = socket.socketpair()
        keep += pair
        for end in pair:
            end.setblocking(False)
            try:
                while True: held += end.send(bytes(65536))
            except BlockingIOError: pass
except OSError: print(len(keep), held)
"""
LOOP = """
import asyncio, multiprocessing, shutil, subprocess
async def main():
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("/bin/cat", stdin=pipe, stdout=pipe)
    print((await child.communicate(b"x" * 200_000))[0].count(b"x"))
    print(await asyncio.to_thread(str, "thread"))
asyncio.run(main())
ours, theirs = multiprocessing.Pipe()
def answer(): theirs.send("child")
child = multiprocessing.get_context("fork").Process(target=answer)
child.start()
print(ours.recv())
child.join()
print(shutil.copy("main.py", "copy"))
"""


def test_what_event_loops_and_copies_need_is_there(code):
    ended = run_program(LOOP, "", {**LIMITS, "time_s": 20})
    assert (ended.code, ended.output.split()) == (0, ["200000", "thread", "child", "copy"]), ended


def test_pairs_of_sockets_hold_little(code):
    """Few descriptors, each with the host's default buffer."""
    ended = run_program(FILLS, "", {**LIMITS, "time_s": 20})
    count, held = map(int, ended.output.split())
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    assert 0 < count < 64
    assert held < 64 * 2 * default  # the last message may go over what was left


def descendants_left() -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "main.py" in line.split() or f"contain.py {os.getpid()}" in line:
                found.append(line)
    return found


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_contained_and_leaves_nothing(code, bomb, tmp_path):
    began = time.monotonic()
    ended = run_program(BOMBS[bomb], "", LIMITS)
    assert ended.is_limited, ended
    assert ended.code != 0
    assert time.monotonic() - began < LIMITS["time_s"] + 5
    until = time.monotonic() + 3
    while (left := descendants_left()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


NETWORK = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
    "datagram": "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "s.sendto(b'x', ('127.0.0.1', PORT))",
    "abstract": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0hybridrl-test')",
}


@pytest.mark.parametrize("way", NETWORK)
def test_nothing_outside_can_be_reached(code, way):

    server, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind("\0hybridrl-test")
    abstract.listen()
    with server, abstract:
        program = NETWORK[way].replace("PORT", str(server.getsockname()[1]))
        ended = run_program(program, "", LIMITS)
        assert ended.code == 1, ended
        assert "Error" in ended.error
        # The same outside gets through.
        namespace: dict[str, object] = {}
        exec(program, namespace)


@pytest.mark.parametrize(
    "place",
    ["/tmp/hybridrl-evil", "/dev/shm/hybridrl-evil", str(Path(__file__).parent / "evil"), "/evil"],
)
def test_no_file_outside_can_be_written(code, place):
    ended = run_program(f"open({place!r}, 'w').write('x')", "", LIMITS)
    assert ended.code == 1, ended
    assert "Read-only file system" in ended.error or "No such file" in ended.error
    assert not Path(place).exists()


def test_neither_sockets_nor_devices_nor_files_of_others_are_in_sight(code):
    """A read-only file system is no bar to a socket that everybody may write to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o777)
        path = f"{folder}/socket"
        server.bind(path)
        server.listen()
        os.chmod(path, 0o777)
        connects = f"import socket\nsocket.socket(socket.AF_UNIX).connect({path!r})"
        subprocess.run([sys.executable, "-c", connects], check=True)
        limits = {"time_s": 10, "memory_mib": 256, "disk_mib": 1, "processes": 4}
        assert "PermissionError" in run_program(connects, "", limits).error
        listed = run_program(
            f"import os; print(os.path.exists({folder!r}), sorted(os.listdir('/dev')))", "", limits
        )
    assert listed.output.split() == ["False", *str(sorted(DEVICES)).split()]


def test_a_program_sees_no_environment_and_no_other_process(code, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "5ecret")
    program = (
        "import os, pathlib\n"
        "print(sorted(os.environ), os.getpid(), os.geteuid() == OUTSIDE)\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/environ'):\n"
        "  try: assert b'5ecret' not in p.read_bytes(), p\n"
        "  except OSError: pass\n"
        "try: os.kill(1, 9)\n"
        "except OSError as error: print(type(error).__name__)\n"
        "caps = open('/proc/self/status').read().split('CapEff:')[1].split()[0]\n"
        "assert int(caps, 16) == 0, caps\n"
        "for space in ('net', 'mnt', 'pid', 'ipc'):\n"
        "  print(os.readlink('/proc/self/ns/' + space))\n"
    ).replace("OUTSIDE", "0")
    ended = run_program(program, "", LIMITS)
    assert ended.code == 0, ended
    assert "SECRET_TOKEN" not in ended.output
    assert "False" in ended.output
    for space in ("net", "mnt", "pid", "ipc"):
        assert f"{space}:[" in ended.output
        assert os.readlink(f"/proc/self/ns/{space}") not in ended.output


def test_a_daemon_does_not_outlive_its_program(code):
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0:\n"
        "    for file in (0, 1, 2): os.close(file)\n"
        "    time.sleep(3600)\n"
        "  os._exit(0)\n"
        "print('gone')\n"
    )
    ended = run_program(program, "", LIMITS)
    assert (ended.code, ended.output) == (0, "gone\n")
    time.sleep(0.2)
    assert not descendants_left()


class Texts:
    """A tokenizer that finds a bomb in the first response, the right program in all others."""

    def __init__(self) -> None:
        self.first: list[int] | None = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.first = self.first or list(token_ids)
        return BOMBS["list"] if list(token_ids) == self.first else DOUBLE


@pytest.fixture
def scorer(code: Code) -> Iterator[Scorer]:
    options = {"time_s": 5, "tests_key": "answer", "memory_mib": 128}
    made = Scorer(RewardConfig(function="code", options=options, workers=3), Texts())
    yield made
    made.close()


def test_limits_are_counted_beside_the_reward(scorer):
    from dataclasses import replace

    batch = rollout_batch()
    prompts = tuple(replace(prompt, columns={"answer": PAIRS}) for prompt in batch.prompts)
    scored = scorer.score(replace(batch, prompts=prompts))
    assert scored is not None
    assert scored.reward_B.tolist() == [0, 1, 1, 1, 1, 1]
    assert scorer.take_counts() == {"reward/code/errors": 0, "reward/code/limits": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_privileges_can_contain_too(code, tmp_path):
    """The script itself, as nobody, with an interpreter that everybody may read."""

    from hybridrl.rewards import contain

    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no interpreter for everybody")
    script, folder = Path("/var/tmp/hybridrl-contain.py"), Path("/var/tmp/hybridrl-contain")
    script.write_text(Path(contain.__file__).read_text())
    folder.mkdir(exist_ok=True)
    os.chown(folder, 65534, 65534)
    program = (
        "import os, socket\n"
        "print(os.listdir('.'))\n"
        "try: socket.create_connection(('127.0.0.1', 9), 1)\n"
        "except OSError as error: print(error.errno)\n"
        "try:\n"
        "  while os.fork() or True: pass\n"
        "except OSError as error: print(error.errno)\n"
        "try: open('/var/tmp/evil', 'w')\n"
        "except OSError as error: print(error.errno, flush=True)\n"
    )
    try:
        done = subprocess.run(
            [python, "-I", script, '{"number": 1, ' + str(LIMITS)[1:].replace("'", '"')]
            + [program, folder],
            check=False,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=20,
        )
    finally:
        script.unlink()
        folder.rmdir()
    if "not contained: unshare" in done.stderr:
        pytest.skip("this kernel lets users make no namespaces")
    lines = done.stdout.split()
    refused = "1" if os.uname().machine in REFUSED else "101"  # no sockets, or no network for them
    assert {"['main.py']", refused, "11", "30"} <= set(lines), done


def test_a_host_that_cannot_contain_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="no namespaces on darwin"):
        Code()
