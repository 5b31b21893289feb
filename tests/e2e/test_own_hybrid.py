"""A user's own recurrent layers: the family in the guide trains, in every layout with the same
losses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import QUICKSTART, records, run
from documented import ROOT

CODE = ROOT / "tests" / "own_hybrid.py"


def test_the_guide_shows_the_family_that_is_tested() -> None:
    page = (ROOT / "docs" / "guides" / "hybrid_layers.md").read_text()
    assert f"```python\n{CODE.read_text()}```" in page


@pytest.mark.full
@pytest.mark.dist
def test_a_users_recurrent_layers_train_and_continue_in_another_layout(tmp_path: Path) -> None:
    model = shutil.copytree(QUICKSTART / "model", tmp_path / "model") / "config.json"
    kind = {"architectures": ["OwnForCausalLM"], "model_type": "own", "own_width": 64}
    model.write_text(json.dumps(json.loads(model.read_text()) | kind))
    config = (
        "train",
        QUICKSTART / "sft.yaml",
        f"model.init={model.parent}",
        "model.family=own_hybrid:FAMILY",
        "rollout.engine=scripted",
        "steps.prompts_per_step=16",
        "steps.num_steps=4",
        "steps.stop_at_accuracy=null",
        "steps.eval_every=0",
        "data.eval_prompts=null",
        "log.tensorboard=false",
        "checkpoint.every=2",
        "checkpoint.keep=9",
    )
    run(*config, f"run.dir={tmp_path}")
    expected = records(tmp_path / "quickstart-sft")
    assert expected[3]["policy/loss"] < expected[0]["policy/loss"]
    copy = tmp_path / "one" / "quickstart-sft"
    shutil.copytree(tmp_path / "quickstart-sft", copy)
    shutil.rmtree(copy / "checkpoints" / "step_4")
    run(*config, f"run.dir={tmp_path / 'one'}", "train.tp=1", "train.pp=1", "--world", "1")
    for ours, theirs in zip(records(copy)[2:], expected[2:], strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(ours[name] / theirs[name] - 1) < 1e-4, (ours["step"], name)
