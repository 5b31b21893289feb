"""Rotary positions that go by lengths: which factors a run has, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import QUICKSTART, small_run
from tiny_models import longrope
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from hybridrl.config.load import load_config_dict
from hybridrl.errors import ModelError
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import read_model
from hybridrl.models.megatron.rotary_positions import rotary_frequencies

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# As Phi-3.5-mini has it on disk, and Phi-4-mini.
PHI35: dict[str, Any] = {
    **SIZES,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attention_bias": False,
    "original_max_position_embeddings": 32,
    "rope_scaling": {"type": "longrope", **longrope(8)},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
}
PHI4_MINI = {
    **PHI35,
    "rope_scaling": {"type": "longrope", **longrope(6)},
    "partial_rotary_factor": 0.75,
    "full_attn_mod": None,
    "tie_word_embeddings": True,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


@pytest.mark.parametrize("config", [PHI35, PHI4_MINI])
def test_longrope_is_transformers_of_sequences_as_long_as_the_longest(config: Any) -> None:
    """Bit for bit, on both sides of the original length, also with too long a window."""
    fields = {key: value for key, value in config.items() if key != "auto_map"}
    theirs = Phi3RotaryEmbedding(Phi3Config(**json.loads(json.dumps(fields))))
    found = []
    for longest in (31, 32, 33, 128):
        theirs(torch.zeros(1, 1), torch.arange(longest)[None])
        settled = at_length(config, longest)
        family, shape = read_model(None, settled)
        rotary = family.model_keywords(settled)["rotary"]
        found.append(rotary_frequencies(rotary, int(shape.head_dim * rotary.share)))
        assert torch.equal(found[-1], theirs.inv_freq)
        assert rotary.magnitude == theirs.attention_scaling > 1
        assert shape.window is None
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_magnitude_of_a_part_of_each_head_is_not_in_the_softmax() -> None:
    family, shape = read_model(None, PHI4_MINI)
    keywords = family.transformer_config(PHI4_MINI)
    assert "softmax_scale" not in keywords and keywords["apply_rope_fusion"] is False
    whole = family.transformer_config(PHI35)
    magnitude = family.model_keywords(PHI35)["rotary"].magnitude
    assert whole["softmax_scale"] == pytest.approx(magnitude**2 * shape.head_dim**-0.5)


def test_a_settled_config_is_the_same_in_every_forward_and_what_transformers_takes() -> None:
    long, short = (at_length(PHI35, longest)["rope_scaling"] for longest in (33, 32))
    for one, key in ((long, "long_factor"), (short, "short_factor")):
        assert one["short_factor"] == one["long_factor"] == PHI35["rope_scaling"][key]
    fields = {key: value for key, value in at_length(PHI35, 33).items() if key != "auto_map"}
    theirs = Phi3RotaryEmbedding(Phi3Config(**json.loads(json.dumps(fields))))
    before = theirs.inv_freq.clone()
    theirs(torch.zeros(1, 1), torch.arange(100)[None])
    assert torch.equal(theirs.inv_freq, before)
    written = {**PHI35, "rope_parameters": PHI35["rope_scaling"]}
    assert at_length(written, 33)["rope_parameters"] == at_length(written, 33)["rope_scaling"]
    assert PHI35["rope_scaling"]["short_factor"] != PHI35["rope_scaling"]["long_factor"]
    early = {**PHI35, "rope_scaling": {**longrope(8), "rope_type": "su"}}
    assert at_length(early, 33)["rope_scaling"] == {**long, "rope_type": "longrope"}
    assert read_model(None, early)


def test_dynamic_is_plain_up_to_the_models_positions() -> None:
    config = {**LLAMA, "rope_parameters": {**DYNAMIC, "rope_theta": 5000.0}}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
    settled = at_length(config, 128)
    assert settled["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    rotary = read_model(None, settled)[0].model_keywords(settled)["rotary"]
    for length in (5, 128):
        theirs(torch.zeros(1, 1), torch.arange(length)[None])
        assert torch.equal(rotary_frequencies(rotary, 16), theirs.inv_freq)
    theirs(torch.zeros(1, 1), torch.arange(129)[None])
    assert not torch.equal(rotary_frequencies(rotary, 16), theirs.inv_freq)
    with pytest.raises(ModelError, match="dynamic, with sequences of up to 129 tokens; allowed"):
        at_length(config, 129)
    with pytest.raises(ValueError, match="need the length of the longest"):
        at_length(config, None)
    assert at_length(LLAMA, None) is LLAMA


def changed(**scaling: Any) -> dict[str, Any]:
    return {**PHI35, "rope_scaling": {**PHI35["rope_scaling"], **scaling}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (changed(short_factor=None), "rope_scaling.short_factor is missing"),
        (changed(long_factor=[1.0] * 7), "long_factor: got 7 numbers; allowed: a list of 8"),
        (changed(long_factor=8), "long_factor: got 8; allowed: a list of 8"),
        (changed(short_factor=[1.0] * 7 + [0]), "short_factor.7: got 0"),
        (changed(short_factor=[1.0] * 7 + ["1"]), "short_factor.7: got"),
        (changed(factor=8.0), "factor: got 8.0; allowed: 4, computed"),
        (changed(attention_factor=1.0), "attention_factor: got 1.0; allowed: .* computed"),
        (
            changed(short_mscale=1.1),
            "short_mscale: got 1.1; allowed: no such key with rope_type long",
        ),
        (changed(original_max_position_embeddings=64), "embeddings: got 64; allowed: the same as"),
        ({**PHI35, "original_max_position_embeddings": 256}, "got 256; allowed: from 2 to"),
        ({**PHI35, "original_max_position_embeddings": 1}, "got 1; allowed: from 2 to"),
        ({**PHI35, "partial_rotary_factor": 0.7}, "partial_rotary_factor|a list of 5"),
        ({**PHI35, "original_max_position_embeddings": None}, "got 4096; allowed: from 2"),
        ({**LLAMA, "rope_scaling": PHI35["rope_scaling"]}, "got longrope; allowed: default, lin"),
    ],
)
def test_longrope_that_engines_and_transformers_would_compute_otherwise_is_refused(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_model(None, config)


@pytest.mark.parametrize(("most", "longest"), [(None, 30), (15, 30), (50, 60)])
def test_the_longest_sequence_may_be_an_evaluations(most: int | None, longest: int) -> None:
    config = load_config_dict(
        {
            "run": {"name": "longest"},
            "model": {"path": "model"},
            "data": {"prompts": "rows.jsonl", "max_prompt_tokens": 10},
            "rollout": {"engine": "hf", "max_new_tokens": 20},
            "algorithm": {"name": "grpo"},
            "eval": {"max_new_tokens": most},
        }
    )
    assert config.longest_sequence() == longest


@pytest.mark.dist
@pytest.mark.parametrize(("original", "factors"), [(8, "long_factor"), (32, "short_factor")])
def test_engine_and_trainer_of_a_run_turn_alike(
    original: int, factors: str, tmp_path: Path
) -> None:
    """Prompts of 6 tokens and responses of up to 12: sequences lie on both sides of 8."""
    model = {**PHI35, "vocab_size": 15, "original_max_position_embeddings": original}
    model |= {"initializer_range": 0.4, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(model))
    knobs = (
        f"model.init={tmp_path}",
        f"model.tokenizer={QUICKSTART / 'model'}",
        "rollout.engine=hf",
        "rollout.max_new_tokens=12",
        "steps.num_steps=1",
    )
    with small_run(tmp_path, *knobs) as trainer:
        settled = trainer.source.computed_config["rope_scaling"]
        assert settled["short_factor"] == settled["long_factor"] == PHI35["rope_scaling"][factors]
        assert trainer.source.hf_config["rope_scaling"] == PHI35["rope_scaling"]
        trainer.fit()
        lines = (trainer.journal.folder / "metrics.jsonl").read_text().splitlines()
        log = (trainer.journal.folder / "logs" / "rank_0.log").read_text()
    assert json.loads(lines[-1])["mismatch/logprob_diff_max"] < 1e-4
    assert f"longrope's {factors.partition('_')[0]}" in log
