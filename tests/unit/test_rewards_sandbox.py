"""Programs as responses: scored by their tests, and bombs of every kind contained."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from other_user import run_as_user

from hybridrl.errors import UserError
from hybridrl.rewards.outcome import Noted
from hybridrl.services.sandbox import code_reward as sandbox
from hybridrl.services.sandbox.code_reward import Code, run_program
from hybridrl.services.sandbox.contain import DEVICES, FIRST_UID, LINKS

LIMITS = {"time_s": 2, "memory_mib": 256, "disk_mib": 4, "processes": 8}


@pytest.fixture(scope="module")
def code() -> Code:
    try:
        return Code()
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


def descendants_left() -> list[str]:
    """Returns processes of sandboxes that this process started, as far as they can be told."""
    found = []
    first = FIRST_UID + 2 * (os.getpid() * 1024 % (1 << 29))
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = (folder / "status").read_text()
                uid = folder.stat().st_uid
            except OSError:
                continue
            is_start = (
                f"PPid:\t{os.getpid()}\n" in status and "hybridrl.services.sandbox.contain" in line
            )
            is_own = os.geteuid() != 0 and "main.py" in line.split()
            if is_start or is_own or first <= uid < first + 2048:
                found.append(f"{uid} {line}")
    return found


def left_after(most_s: float) -> list[str]:
    until = time.monotonic() + most_s
    while (left := descendants_left()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_contained_and_leaves_nothing(code, bomb, tmp_path):
    began = time.monotonic()
    ended = run_program(BOMBS[bomb], "", LIMITS)
    assert ended.is_limited, ended
    assert ended.code != 0
    assert time.monotonic() - began < LIMITS["time_s"] + 5
    assert not left_after(3)


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


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", str(Path(__file__).parent), ""])
def test_no_file_outside_can_be_written(code, place):
    """Where /tmp and /dev/shm are there at all, they are the program's own folder."""
    ended = run_program(f"open('{place}/hybridrl-evil', 'w').write('x')", "", LIMITS)
    if place not in ("/tmp", "/dev/shm"):
        assert "Read-only file system" in ended.error or "No such file" in ended.error
    assert not Path(f"{place}/hybridrl-evil").exists()


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
    assert listed.output.split() == ["False", *str(sorted([*DEVICES, *LINKS])).split()]


def test_only_python_and_what_an_option_names_can_be_read():
    """Not what everybody may read, either."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "words")
        file.write_text("a word")
        program = f"print(open({str(file)!r}).read())"
        pairs = [{"input": "", "output": "a word"}]
        assert Code()("", program, {"tests": pairs}) == 0
        assert Code(readable=[folder])("", program, {"tests": pairs}) == 1
        link = Path(folder, "link")
        link.symlink_to("words")
        program = program.replace(str(file), str(link))
        assert Code(readable=[str(link)])("", program, {"tests": pairs}) == 1
        tests = f"assert f({str(file)!r}) == open({str(file)!r}).read()"
        reads = "def f(path): return open(path).read()"
        assert Code(readable=[str(file)])("", reads, {"tests": tests}) == 1
    ended = run_program("import os; print(*os.listdir('/'), *os.listdir('/etc'))", "", LIMITS)
    assert not {"home", "var", "run", "boot", "mnt", "opt", "srv", "shadow"} & set(
        ended.output.split()
    )


def test_a_sandbox_that_cannot_start_is_no_wrong_answer(code, monkeypatch):
    shutil.rmtree(sandbox._code_folder().name)
    monkeypatch.setattr(sandbox, "CONTAINED", ())
    with pytest.raises(sandbox.SandboxError, match="not contained: No module"):
        code("", ADD, {"tests": ASSERTS})
    monkeypatch.undo()
    shutil.rmtree(sandbox._code_folder().name)
    assert code("", ADD, {"tests": ASSERTS}) == 1  # a folder that is gone is made again


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
    assert not left_after(3)


AS_USER = """
import json
from hybridrl.services.sandbox.code_reward import run_program
limits = {LIMITS}
found = [run_program(*one) for one in (
    ("import os; print(os.getuid(), os.getpid(), os.listdir('.'))", "", limits),
    ("print(2 * int(input()))", "4", limits),
    ("def add(a, b): return a + b", "", limits, "assert add(1, 2) == 3"),
    ("def add(a, b): return a - b", "", limits, "assert add(1, 2) == 3"),
    ("import os; os._exit(0)", "", limits, "assert add(1, 2) == 3"),
    ({FORK}, "", limits),
    ({MEMORY}, "", limits),
)]
print(json.dumps([(one.code, one.output, one.is_limited) for one in found]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_privileges_can_contain_too(code):
    script = AS_USER.replace("{LIMITS}", str(LIMITS))
    for name in ("fork", "memory"):
        script = script.replace(f"{{{name.upper()}}}", repr(BOMBS[name]))
    done = run_as_user(script)
    if "not contained: unshare" in done.stderr:
        pytest.skip("this kernel lets users make no namespaces")
    assert done.returncode == 0, done.stderr
    listed, doubled, right, wrong, left, fork, memory = json.loads(done.stdout)
    assert listed[:2] == [0, "1000 2 ['main.py']\n"]
    assert (doubled[1], right[0], wrong[0], left[0]) == ("8\n", 0, 1, 1)
    assert fork[2] and memory[2] and not left[2]


def test_root_of_a_container_with_few_users_can_contain_too(code):
    """Where root may not become a user of the program's own."""
    unshare = shutil.which("unshare")
    script = (
        "from hybridrl.services.sandbox.code_reward import run_program\n"
        f"ended = run_program('import os; print(os.getuid())', '', {LIMITS})\n"
        "print(ended.output, ended.error)"
    )
    if unshare is None:
        pytest.skip("no unshare here")
    done = subprocess.run(
        [unshare, "--user", "--map-root-user", "--mount", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr:
        pytest.skip("this kernel lets users make no namespaces")
    assert done.stdout.split() == ["1000"], done
