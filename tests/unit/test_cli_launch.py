"""The launcher: what ranks get, how their end becomes the command's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridrl.errors import UserError
from hybridrl.metrics.trackers import CLOSE_S
from hybridrl.parallel.failure import Failure
from hybridrl.services.launch import local_ranks as launch_module
from hybridrl.services.launch.local_ranks import (
    LEAVE_S,
    Share,
    caught_signals,
    is_launched,
    is_rank,
    launch,
    launch_run,
    run_ranks,
)
from hybridrl.services.launch.rank_log import TEE

PROGRAM = """
import ctypes, os, signal, socket, sys, time
from pathlib import Path
from hybridrl.services.launch.local_ranks import die_with_launcher
from hybridrl.services.launch.rank_log import write_stacks_on_signal
from hybridrl.errors import UserError
from hybridrl.parallel.failure import Failure, PeerError, report
die_with_launcher()
write_stacks_on_signal()
rank, logs = int(os.environ["RANK"]), Path(os.environ["HYBRIDRL_LOG_DIR"])
(logs / f"rank_{rank}.phase").write_text("update\\n")
(logs / f"rank_{rank}.pid").write_text(str(os.getpid()))
what = sys.argv[1]
if what == "env":
    keys = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    print(rank, *(os.environ[key] for key in keys), os.environ["MASTER_PORT"].isdigit(), flush=True)
    print(f"note {rank}", file=sys.stderr)
elif what == "port":
    try:
        socket.socket().bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        is_taken = False
    except OSError:
        is_taken = True
    print(rank, is_taken, "HYBRIDRL_STORE_FD" in os.environ, file=sys.stderr)
    (logs / f"rank_{rank}.looked").touch()
    while not (logs / "rank_1.looked").exists():  # while rank 0 holds it
        time.sleep(0.05)
elif what == "vanish":
    from hybridrl.parallel import failure
    failure.begin()
    if rank == 1:
        os._exit(0)
    failure.end()
elif what == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "crash" and rank == 1:
    ctypes.string_at(0)
elif what == "refuse" and rank == 1:
    report(Failure.of(UserError("train.tp", 3, "2", "Set it.")))
    os._exit(2)
elif what == "refuse" and rank == 0:
    time.sleep(0.2)
    os._exit(1)
elif what == "peer" and rank < 2:
    time.sleep(0.3 * rank)
    # What one's own error says does not make it another's.
    own = RuntimeError("boom; in its log stands: hybridrl.parallel.groups.PeerError: no")
    try:
        raise (PeerError("rank 1 failed in the part", 1), own)[rank]
    except RuntimeError as error:
        report(Failure.of(error))
    os._exit(1)
elif what == "silent" and rank == 1:
    os._exit(3)
elif what == "silent":
    time.sleep(0.2)
    report(Failure.of(RuntimeError("Connection closed by peer")))
    os._exit(1)
elif what == "lost" and rank == 0:
    print("something of a library", file=sys.stderr, flush=True)
    while not (logs / "rank_1.pid").exists():
        time.sleep(0.05)
    report(Failure.of(PeerError("rank 1 on host h gave no sign of life", 1, is_lost=True)))
    os._exit(1)
elif what == "lost" and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
elif what == "fill":
    os.write(2, b"x" * 8000 + b"\\n")
    time.sleep(600 * rank)
    report(Failure.of(OSError(28, "No space left on device")))
    os._exit(1)
elif what == "raise" and rank == 1:
    raise RuntimeError("boom")
elif what == "unsaved":
    def fail(*_):
        if rank == 1:
            report(Failure.of(UserError("disk", "full", "room", "Make some.")))
            os._exit(2)
        os._exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, fail)
    (logs / f"rank_{rank}.ready").touch()
    time.sleep(600)
elif what == "talks":
    for _ in range(100):
        os.write(2, b"x" * 9999 + b"\\n")
elif what == "closes":
    def close(*_):
        time.sleep(1.5 * (rank == 0))  # its trackers
        os._exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, close)
    (logs / f"rank_{rank}.ready").touch()
    if sys.argv[2:] and rank == 1:
        while not (logs / "rank_0.ready").exists():
            time.sleep(0.05)
        [os.kill(int((logs / f"rank_{one}.pid").read_text()), signal.SIGTERM) for one in (0, 1)]
    time.sleep(600)
elif what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1:
        time.sleep(0.5)
        os._exit(3)
    time.sleep(600)
else:
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    file = tmp_path / "ranks.py"
    file.write_text(PROGRAM)
    return [str(file)]


def is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_launch_gives_ranks_their_environment(
    tmp_path: Path,
    program: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(["env"], 3, tmp_path / "logs", program) == 0
    time.sleep(0.2)
    out, err = capfd.readouterr()
    assert out == "0 0 3 3 127.0.0.1 1 True\n"
    assert err == "note 0\n"
    assert "2 2 3 3 127.0.0.1 1 True\nnote 2\n" in (tmp_path / "logs" / "rank_2.log").read_text()
    assert "note 0" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_the_port_of_the_job_is_taken_before_any_rank_asks(
    tmp_path: Path, program: list[str]
) -> None:
    assert launch(["port"], 2, tmp_path / "logs", program) == 0
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in range(2)]
    assert "0 True True\n" in logs[0] and "1 True False\n" in logs[1]


def test_launch_ends_all_when_a_rank_is_killed(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert launch(["kill"], 3, tmp_path / "logs", program) == 1
    assert time.monotonic() - start < 30
    message = capfd.readouterr().err
    assert "rank 1 on host" in message and "SIGKILL" in message and "phase 'update'" in message
    assert not any(is_alive(file) for file in (tmp_path / "logs").glob("*.pid"))


def test_launch_fails_where_a_rank_ends_before_its_command_with_code_0(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(["vanish"], 2, tmp_path / "logs", program) == 1
    message = capfd.readouterr().err
    assert "rank 1 on host" in message and "ended too early, for example by os._exit(0)" in message
    assert launch(["env"], 2, tmp_path / "logs", program) == 0


def test_launch_logs_where_a_rank_was_when_native_code_crashed(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(["crash"], 2, tmp_path / "logs", program) == 1
    assert "SIGSEGV" in capfd.readouterr().err
    log = (tmp_path / "logs" / "rank_1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log and "in string_at" in log


def test_launch_kills_ranks_that_ignore_sigterm(
    tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "KILL_AFTER_S", 1.0)
    start = time.monotonic()
    assert launch(["stubborn"], 2, tmp_path / "logs", program) == 1
    assert 1 < time.monotonic() - start < 20
    assert not is_alive(tmp_path / "logs" / "rank_0.pid")


def test_launch_passes_on_a_users_mistake_once(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(["refuse"], 3, tmp_path / "logs", program) == 2
    assert capfd.readouterr().err == "train.tp: got 3; allowed: 2. Set it.\n"


def test_launch_shows_the_traceback_of_the_rank_that_failed(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(["raise"], 2, tmp_path / "logs", program) == 1
    message = capfd.readouterr().err
    assert "RuntimeError: boom" in message and "rank 1 on host" in message


def test_launch_names_the_rank_that_failed_first_in_every_log(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(["peer"], 3, tmp_path / "logs", program) == 1
    message = capfd.readouterr().err
    said = message.splitlines()[0]
    assert said.startswith("hybridrl: rank 1 on host") and "  | Traceback" in message
    assert "in phase 'update': RuntimeError: boom; in" in said
    of_a_peer = "PeerError: rank 1 failed in the part"
    assert of_a_peer not in message
    logs = {rank: (tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 2)}
    assert all(log.endswith(said + "\n") for log in logs.values())
    assert "Traceback" in logs[0] and of_a_peer in logs[0]
    assert "in <module>" in logs[2]  # where it was


def test_launch_blames_a_rank_that_ended_without_a_word_not_those_whose_connections_broke(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(["silent"], 3, tmp_path / "logs", program) == 1
    said = capfd.readouterr().err.splitlines()[0]
    assert "rank 1 on host" in said and "ended with code 3 in phase 'update'" in said, said


def test_launch_names_the_rank_that_all_have_lost_and_ends_it_though_it_is_stopped(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert launch(["lost"], 3, tmp_path / "logs", program) == 1
    assert time.monotonic() - start < 9  # without the grace, and the wait for one that is stopped
    said = capfd.readouterr().err
    assert "hybridrl: rank 1 on host h gave no sign of life; the other ranks were ended" in said
    assert f"Its log is {tmp_path / 'logs' / 'rank_1.log'}" in said and "Traceback" not in said
    assert not is_alive(tmp_path / "logs" / "rank_1.pid")


def test_launch_refuses_a_full_disk_before_any_rank_starts(
    tmp_path: Path, program: list[str]
) -> None:
    (tmp_path / "rank_1.log").symlink_to("/dev/full")
    with pytest.raises(UserError, match="rank_1.log: got No space left on device"):
        launch(["sleep"], 2, tmp_path, program)
    assert not (tmp_path / "rank_0.pid").exists() or not is_alive(tmp_path / "rank_0.pid")


def test_launch_says_one_message_of_a_disk_that_is_full_later(
    tmp_path: Path, program: list[str]
) -> None:
    code = (
        "import resource, sys; from pathlib import Path; "
        "from hybridrl.services.launch.local_ranks import launch; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "  # as a disk: a write fails
        f"sys.exit(launch(['fill'], 2, Path({str(tmp_path)!r}), {program!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr.replace("  | Traceback", ""), done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("hybridrl:"))
    assert "rank 0 on host" in said and "No space left on device" in said, said
    assert said.endswith("(logs are incomplete: File too large)"), said
    assert done.stderr.count("x" * 8000) == 1  # the console has all


def test_launch_forgets_errors_of_an_earlier_start(
    tmp_path: Path, program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    Failure("error", "stale").write(logs / "rank_1.error")
    (logs / "rank_1.phase").write_text("stale")
    for name in ("rank_0", "rank_0_1", "rank_5_3"):
        (logs / f"{name}.agents").write_text("{}")
    assert launch(["kill"], 2, logs, program) == 1
    assert "stale" not in capfd.readouterr().err and not [*logs.glob("*.agents")]
    for name in ("rank_1", "rank_1_2", "rank_10_2"):  # of other hosts, which start later
        (logs / f"{name}.agents").write_text("{}")
    launch_module._make_log_dir(logs, Share(first=1, count=1, world_size=11))
    assert [one.name for one in logs.glob("*.agents")] == ["rank_10_2.agents"]


def test_a_rank_is_heard_to_the_end_whose_launcher_has_no_stderr_any_more(
    tmp_path: Path, program: list[str]
) -> None:
    """Else it would wait for ever with a full pipe."""
    code = (
        "import sys; from pathlib import Path; "
        "from hybridrl.services.launch.local_ranks import launch; "
        f"sys.exit(launch(['talks'], 1, Path({str(tmp_path)!r}), {program!r}))"
    )
    reads, writes = os.pipe()
    os.close(reads)
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=writes)
    os.close(writes)
    try:
        assert launcher.wait(20) == 0
    finally:
        launcher.kill()
    assert (tmp_path / "rank_0.log").read_text().count("x") == 100 * 9999


@pytest.mark.parametrize("by_themselves", [False, True])
def test_a_rank_that_closes_its_trackers_at_a_stop_is_waited_for(
    by_themselves: bool, tmp_path: Path, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "KILL_AFTER_S", 0.5)
    monkeypatch.setattr(launch_module, "GRACE_S", 0.5)

    def stop(received: list[int]) -> None:
        def tell() -> None:
            while len(list(tmp_path.glob("*.ready"))) < 2:
                time.sleep(0.05)
            received.append(signal.SIGTERM)

        if not by_themselves:
            threading.Thread(target=tell, daemon=True).start()

    command = [*program, "closes", *["itself"] * by_themselves]
    outcome = run_ranks(command, Share.whole(2), tmp_path, steer=stop)
    assert [rank.code for rank in outcome.ranks] == [143, 143] and not outcome.culprits
    assert LEAVE_S > CLOSE_S


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", [*STOPS, signal.SIGKILL])
def test_ranks_end_with_the_launcher(tmp_path: Path, program: list[str], number: int) -> None:
    logs = tmp_path / "logs"
    code = (
        "import sys; from pathlib import Path; "
        "from hybridrl.services.launch.local_ranks import launch; "
        f"sys.exit(launch(['sleep'], 2, Path({str(logs)!r}), {program!r}))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    files = [logs / "rank_0.pid", logs / "rank_1.pid"]
    deadline = time.monotonic() + 20
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(number)
    meant = signal.SIGTERM if number == signal.SIGHUP else number
    assert launcher.wait(timeout=30) == (-number if number == signal.SIGKILL else 128 + meant)
    deadline = time.monotonic() + 5
    while any(is_alive(file) for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(file) for file in files)


def test_a_rank_that_could_not_save_at_a_signal_says_why(
    tmp_path: Path, program: list[str]
) -> None:
    logs = tmp_path / "logs"
    code = (
        "import sys; from pathlib import Path; "
        "from hybridrl.services.launch.local_ranks import launch; "
        f"sys.exit(launch(['unsaved'], 2, Path({str(logs)!r}), {program!r}))"
    )
    command = [sys.executable, "-c", code]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(list(logs.glob("*.ready"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.terminate()
    _, told = launcher.communicate(timeout=30)
    assert launcher.returncode == 2
    assert told.splitlines() == ["disk: got full; allowed: room. Make some."]


def test_only_a_user_asks_twice_and_nohup_is_obeyed() -> None:
    """Shells and the system send SIGHUP several times, seconds apart."""
    with caught_signals() as received:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(launch_module.SAME_SIGNAL_S + 0.1)
        os.kill(os.getpid(), signal.SIGHUP)
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] * 2
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with caught_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert received == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_under_torchrun_the_log_goes_on_where_the_console_is_gone(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    log = tmp_path / "rank_0.log"
    copy = subprocess.Popen(["sh", "-c", TEE, str(log)], stdin=subprocess.PIPE, stdout=writes)
    os.close(writes)
    assert copy.stdin is not None
    copy.stdin.write(b"before\n")
    copy.stdin.flush()
    assert os.read(reads, 100) == b"before\n"
    os.close(reads)
    copy.send_signal(signal.SIGUSR1)  # of a scheduler, to all processes
    copy.stdin.write(b"x" * 200_000)
    copy.stdin.close()
    copy.wait(10)
    assert log.read_bytes() == b"before\n" + b"x" * 200_000


def test_torchrun_ranks_are_ranks_but_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "HYBRIDRL_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)
    assert not is_rank()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank() and not is_launched()
    monkeypatch.setenv("HYBRIDRL_LAUNCHER_PID", "7")
    assert is_launched()


def test_a_users_mistake_leaves_the_logs_of_a_new_run_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        (folder / "config.yaml").write_text("the configuration that has the mistake")
        (folder / "rollouts").mkdir(exist_ok=True)
        with (folder / "logs" / "rank_0.log").open("a") as log:
            log.write("a traceback\n")
        return 2

    folder = tmp_path / "runs" / "mine"
    monkeypatch.setattr(launch_module, "launch", fail)
    for start in (1, 2):  # the second is as new as the first
        assert launch_run([], 1, folder) == 2
        assert [path.name for path in folder.iterdir()] == ["logs"]
        assert (folder / "logs" / "rank_0.log").read_text() == "a traceback\n" * start


def test_a_users_mistake_leaves_a_folder_that_was_there_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("of an earlier start")
    monkeypatch.setattr(launch_module, "launch", lambda *_, **__: 2)
    assert launch_run([], 1, tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "logs"}
