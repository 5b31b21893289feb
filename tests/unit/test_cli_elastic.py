"""Ranks that are lost are started again, or fewer of them; errors of their own end a run."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from hybridrl.parallel.failure import Failure
from hybridrl.services.launch.local_ranks import Share, run_ranks
from hybridrl.services.launch.rank_ends import lost_ranks
from hybridrl.services.launch.restarts import ElasticLaunch, LocalJob

# A start is one line of `starts`; what its rank 1 does is the start's letter in the argument.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
logs = Path(os.environ["HYBRIDRL_LOG_DIR"]); folder = logs.parent
rank, size, plan = os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1]
starts = folder / "starts"
if rank == "0":
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    with starts.open("a") as file:
        print(size, *sys.argv[2:], file=file)
    what = plan[number]
    if what != "k":  # gets as far as training
        noted = json.dumps({"starts": [{"after_step": 0}] * (number + 1)})
        (folder / "run.json").write_text(noted)
    if what == "s":  # takes a step, and saves it
        step = number + 1
        (folder / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\\n")
    if what in "xl":  # says an error of its own and aborts; says that rank 1 is silent
        (logs / "rank_0.error").write_text(Path(__file__).with_name(what).read_text())
    if what == "l":
        sys.exit(1)
    if what == "x":
        os.kill(os.getpid(), signal.SIGABRT)
    if what in "skb":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "e":
        sys.exit(1)
    if what == "t":
        sys.exit(143)
    if what == "m":
        sys.exit(2)
"""


@pytest.mark.parametrize(
    ("plan", "sizes", "code"),
    [
        ("d", [4], 0),
        ("skd", [4, 4, 2], 0),  # comes back, then not: the next smaller that fits
        ("bksd", [4, 2, 2, 4], 0),  # begins and takes no step: as if it had not; then all again
        ("kkkk", [4, 2, 2, 2], 1),  # nothing smaller fits, and three restarts are all
        ("se", [4, 4], 1),
        ("st", [4, 4], 143),
        ("m", [4], 2),
        ("e", [4], 1),
        ("x", [4], 1),
        ("ld", [4, 2], 0),
    ],
)
def test_ranks_that_are_lost_are_started_again(
    plan: str, sizes: list[int], code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(PROGRAM)
    Failure("error", "RuntimeError: own").write(tmp_path / "x")
    Failure("lost", "rank 1 is silent", culprit=1).write(tmp_path / "l")
    launch = ElasticLaunch(3, LocalJob(4, lambda size: size == 2, [str(program)]))
    assert launch([plan, "--resume", "previous"], 4, tmp_path / "logs") == code
    starts = (tmp_path / "starts").read_text().splitlines()
    assert [int(line.split()[0]) for line in starts] == sizes
    assert starts[0].endswith("--resume previous")
    assert all(line.endswith("--resume newest") for line in starts[1:])
    said = capfd.readouterr().err
    assert said.count("(run.max_restarts)") == len(sizes) - 1


# Rank 0 is killed while both were asked to save and end; rank 1 says what that does to it.
KILLED_IN_STOP = """
import os, signal, sys, time
from pathlib import Path
rank, logs = os.environ["RANK"], Path(os.environ["HYBRIDRL_LOG_DIR"])
def asked(number, frame):
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    (logs / "rank_1.error").write_text(Path(__file__).with_name("x").read_text())
    os._exit(1)
signal.signal(signal.SIGTERM, asked)
(logs / f"ready_{rank}").touch()
time.sleep(60)
"""


def test_a_rank_that_is_killed_while_ranks_save_is_lost(tmp_path: Path) -> None:
    program, logs = tmp_path / "ranks.py", tmp_path / "logs"
    program.write_text(KILLED_IN_STOP)
    Failure("error", "RuntimeError: Connection closed by peer").write(tmp_path / "x")

    def steer(received: list[int]) -> None:
        def ask() -> None:
            while len(list(logs.glob("ready_*"))) < 2:
                time.sleep(0.05)
            received.append(signal.SIGTERM)

        threading.Thread(target=ask, daemon=True).start()

    outcome = run_ranks([str(program)], Share.whole(2), logs, steer=steer)
    assert lost_ranks(outcome) == [0] and outcome.stopped_by == signal.SIGTERM
    assert sorted(outcome.culprits) == [0, 1]


# Rank 1 of the first start holds a gigabyte, which the kernel frees page by page, and is killed;
# ranks of the second say whether it is gone once they have waited for it.
HOLDING = """
import os, signal, sys, time
from pathlib import Path
from hybridrl.services.launch.leaving import wait_for_gate
rank, held = os.environ["RANK"], Path(os.environ["HYBRIDRL_LOG_DIR"]) / "held"
if sys.argv[1] == "previous":  # the first start
    if rank == "1":
        memory = b"x" * (1 << 30)
        held.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
wait_for_gate()
print(rank, "there" if Path("/proc", held.read_text()).exists() else "gone", file=sys.stderr)
"""


def test_ranks_wait_until_what_killed_ranks_hold_is_free(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(HOLDING)
    launch = ElasticLaunch(1, LocalJob(2, lambda size: True, [str(program)]))
    assert launch(["previous"], 2, tmp_path / "logs") == 0
    said = capfd.readouterr().err + (tmp_path / "logs" / "rank_1.log").read_text()
    assert "0 gone" in said and "there" not in said
    last = ElasticLaunch(0, LocalJob(2, lambda size: True, [str(program)]))
    assert last(["previous"], 2, tmp_path / "logs") == 1
    pid = (tmp_path / "logs" / "held").read_text()
    assert not Path("/proc", pid).exists()  # the command ends when its ranks are gone
