"""A run with adapters, from a base model to a PEFT directory and to merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART, run
from peft import PeftModel
from safetensors.torch import load_file
from small_runs import SMALL, small_run
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config.load import load_config
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text

PROMPTS = [tuple(range(3, 3 + length)) for length in (2, 5, 9)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An HF directory of random weights, with the quickstart's tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "base"
    config = AutoConfig.from_pretrained(QUICKSTART / "model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in (QUICKSTART / "model").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.dist
def test_adapters_are_trained_converted_evaluated_and_continued(base: Path, tmp_path: Path) -> None:
    """PEFT computes with the directory what the engine computed, and merges the same weights."""
    knobs = ["model.init=null", f"model.path={base}", "rollout.engine=hf", "steps.num_steps=2"]
    knobs += ["train.learning_rate=0.05"]
    with small_run(tmp_path, *knobs, "run.name=a", "lora.rank=4", "lora.alpha=8") as trainer:
        trainer.fit()
        trainer.reshard()
        sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
        asked = [Request(i, prompt, i, sampling) for i, prompt in enumerate(PROMPTS)]
        expected = [list(done.tokens) for done in generate(trainer.engine, asked)]
    folder, peft, merged = tmp_path / "a", tmp_path / "peft", tmp_path / "merged"
    checkpoint = folder / "checkpoints" / "step_2"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["lora"]["rank"] == 4 and state["lora"]["base"]["path"] == str(base)
    sizes = [
        sum(file.stat().st_size for file in one.rglob("*") if file.is_file())
        for one in (checkpoint / "policy", base)
    ]
    assert sizes[0] < sizes[1], "the checkpoint contains the base"

    run("convert", folder, peft, "--to", "peft")
    moved = base.rename(tmp_path / "moved")
    refused = run("convert", folder, merged, "--to", "hf", expect=2)
    assert "with --base" in refused
    output = run("convert", folder, merged, "--to", "hf", "--base", moved)
    assert "rounding merged weights to float32 loses" in output
    moved.rename(base)

    oracle = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    oracle = PeftModel.from_pretrained(oracle, peft).eval()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        whole = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            best = oracle(whole).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == tokens
    weights = load_file(merged / "model.safetensors")
    wanted = oracle.merge_and_unload().state_dict()
    changed = load_file(base / "model.safetensors")
    assert any(not torch.equal(weights[name], changed[name]) for name in weights)
    for name, one in weights.items():
        # One rounding of W + s B A in fp32; PEFT adds the products in another order.
        assert torch.allclose(one, wanted[name], rtol=1e-6, atol=1e-7), name

    limits = ["data.eval_limit=8", "rollout.max_new_tokens=4"]
    sets = ["--prompts", QUICKSTART / "heldout.jsonl", "--json"]
    for what in (peft, checkpoint):
        own = ["reward.function=exact_match"] if what == peft else []
        found = json.loads(run("eval", what, *limits, *own, *sets).splitlines()[-1])
        assert found["num_prompts"] == 8
        assert found["adapter"] == (str(peft) if what == peft else None)
    continued = [*knobs, f"lora.path={peft}", "run.name=b"]
    config = load_config(QUICKSTART / "grpo.yaml", [*SMALL, *continued])
    file, said = peft / "adapter_config.json", "trained on org/other"
    assert said not in plan_text(plan_report(config, 1)[0])
    content = json.loads(file.read_text()) | {"base_model_name_or_path": "org/other"}
    file.write_text(json.dumps(content))
    assert said in plan_text(plan_report(config, 1)[0])
    with small_run(tmp_path, *continued) as trainer:
        trainer.fit()
    assert said in (tmp_path / "b" / "logs" / "rank_0.log").read_text()
    state = json.loads((tmp_path / "b" / "checkpoints" / "step_2" / "state.json").read_text())
    assert state["lora"]["rank"] == 4


@pytest.mark.dist
@pytest.mark.parametrize("full", ["[]", "[embeddings, norms]"])
def test_reference_is_the_model_before_training(base: Path, tmp_path: Path, full: str) -> None:
    """Also if some parts are trained completely, so that turning adapters off is not enough."""
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    knobs = ["model.init=null", f"model.path={base}", "rollout.engine=hf", "steps.num_steps=2"]
    knobs += ["train.learning_rate=0.05", "algorithm.kl_coef=0.01", f"lora.full={full}"]
    tokens = (5, 9, 3, 7, 11, 4)
    prompts = [Prompt(0, "", tokens[:2], {}, tokens[2:])]
    with small_run(tmp_path, *knobs, "run.name=r", "lora.rank=4") as trainer:
        trainer.fit()
        batch = TrainBatch.supervised(prompts, Producer.here("the test"))
        found, now = (role.logprobs(batch, 1.0) for role in (trainer.reference, trainer.policy))
    with torch.no_grad():
        logp_SV = before(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = torch.stack([logp_SV[at - 1, tokens[at]] for at in range(2, len(tokens))])
    assert float((found[2:].cpu() - expected).abs().max()) < 1e-5
    assert float((now[2:].cpu() - expected).abs().max()) > 1e-2, "nothing was learned"
