"""Chats of several turns, learned in layouts that cut a batch otherwise: the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_tokenizers import MARKED, byte_tokenizer
from command_line import QUICKSTART, ROOT, run
from transformers import AutoModelForCausalLM, Qwen3Config

ROWS = ROOT / "tests" / "data"
CLOSE = 1e-5  # fp32 sums in another order, after two updates
LAYOUTS = {
    "one": ("--world", "1"),
    "dp": ("--world", "2"),
    "cp": ("train.cp=2", "--world", "2"),
    "tp": ("train.tp=2", "--world", "2"),
}


@pytest.mark.full
@pytest.mark.dist
def test_chats_of_several_turns_have_the_same_losses_in_every_layout(tmp_path: Path) -> None:
    tokenizer, model = byte_tokenizer(MARKED), tmp_path / "model"
    tokenizer.save_pretrained(model)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=2, **sizes)  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    sources = ",".join(str(ROWS / f"{name}.jsonl") for name in ("ultrachat", "sharegpt"))
    knobs = (
        "model.init=null",
        f"model.path={model}",
        f"run.dir={tmp_path}",
        f"data.prompts=[{sources},{ROWS / 'function_calling.jsonl'}]",
        f"data.validation={ROWS / 'ultrachat.jsonl'}",
        "data.eval_prompts=null",
        "data.chat_template=true",
        "data.max_prompt_tokens=500",
        "data.max_response_tokens=300",
        "rollout.max_new_tokens=8",
        "train.micro_batch_tokens=1024",
        "train.tp=1",
        "train.pp=1",
        "steps.prompts_per_step=4",
        "steps.num_epochs=1",
        "steps.eval_every=1",
        "steps.stop_at_accuracy=null",
        "log.tensorboard=false",
    )
    found = {}
    for name, layout in LAYOUTS.items():
        run("train", QUICKSTART / "sft.yaml", *knobs, f"run.name={name}", *layout)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        found[name] = [record[key] for record in records for key in ("policy/loss", "eval/loss")]
    assert len(found["one"]) == 6
    for name, losses in found.items():
        assert losses == pytest.approx(found["one"], abs=CLOSE), name
