"""Ranks that are lost are started again, or fewer of them; errors of their own end a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.cli.elastic import ElasticLaunch, LocalJob
from hybridrl.parallel.failure import Failure

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
