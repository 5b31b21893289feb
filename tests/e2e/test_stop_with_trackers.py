"""A stop while rank 0 has a tracker that takes long to end the run: nobody kills it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from command_line import QUICKSTART, ROOT, start
from small_runs import SMALL

# More than the launcher gives ranks that hang, and than a rank may be silent.
TAKES_S, SILENT_S = 12.0, 5.0
WANDB = f"""
import time
from pathlib import Path
from types import SimpleNamespace as Some

def Settings(**given): return None
class Artifact:
    def __init__(self, name, type): pass
    def add_file(self, path): pass
def init(dir, **given):
    from hybridrl.parallel import heartbeat
    heartbeat._CURRENT[0].watch.silent_s = {SILENT_S}
    def finish(exit_code):
        Path(dir, "closing").touch()
        time.sleep({TAKES_S})
        Path(dir, "closed").touch()
    return Some(id="r1", define_metric=lambda *a, **k: None, log=lambda *a: None,
                log_artifact=lambda one: None, finish=finish)
"""


@pytest.mark.dist
@pytest.mark.full
def test_rank_0_closes_its_trackers_after_the_other_ranks_have_ended(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    paths = [str(tmp_path / "modules"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    knobs = [*SMALL, "steps.num_steps=100000", "log.wandb=project", f"run.dir={tmp_path}"]
    run = start(
        ["train", QUICKSTART / "grpo.yaml", *knobs, "--world", "2"],
        {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    folder = tmp_path / "quickstart-grpo"
    try:
        deadline = time.monotonic() + 120
        steps = folder / "metrics.jsonl"
        while not ((folder / "wandb_id").exists() and steps.stat().st_size):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=90)
    finally:
        run.kill()
    assert run.returncode == 143, said[-4000:]
    assert (folder / "closed").exists(), said[-4000:]
    assert list((folder / "checkpoints").iterdir())
