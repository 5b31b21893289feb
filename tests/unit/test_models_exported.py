"""What exported config.json files, model cards and folders say; without ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import byte_tokenizer

from hybridrl.errors import ModelError
from hybridrl.loop.exports import declare_turn_end
from hybridrl.models.hf.directory import write_side_files
from hybridrl.models.hf.exported_config import exported_config
from hybridrl.models.score_token import score_notices, score_token

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}


def tokenizer_files(folder: Path, pad: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    added = [{"id": 3, "content": "<eos>"}, {"id": 7, "content": "<pad>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def test_a_language_model_keeps_its_config_and_gets_a_name_if_it_has_none() -> None:
    assert exported_config(QWEN, "lm", None) == QWEN
    nameless = {k: v for k, v in QWEN.items() if k != "architectures"}
    assert exported_config(nameless, "lm", None) == QWEN
    own = {"model_type": "mine", "architectures": ["Mine"]}
    assert exported_config(own, "lm", None) == own


def test_a_value_head_is_a_sequence_classifier_with_the_tokenizers_padding(tmp_path: Path) -> None:
    for pad in ("<pad>", {"content": "<pad>"}):
        found = exported_config(QWEN, "value", tokenizer_files(tmp_path, pad))
        assert found["architectures"] == ["Qwen3ForSequenceClassification"]
        assert found["num_labels"] == 1 and found["pad_token_id"] == 7
    assert exported_config({**QWEN, "pad_token_id": 2}, "value", tmp_path)["pad_token_id"] == 2
    assert exported_config(QWEN, "value", None).get("pad_token_id") is None
    # A class that transformers has not is not named.
    assert "architectures" not in exported_config({"model_type": "mine"}, "value", None)


def test_an_end_token_is_no_padding_of_a_value_head(tmp_path: Path) -> None:
    """transformers would pass over it and read the score one token early."""
    config = {**QWEN, "eos_token_id": 3, "pad_token_id": 3, "vocab_size": 9}
    folder = tokenizer_files(tmp_path, "<eos>")
    found = exported_config(config, "value", folder)
    assert found["pad_token_id"] == 7 and found["hybridrl_score_token"] == "last"
    out = tmp_path / "out"
    out.mkdir()
    write_side_files(out, found, "float32", folder)
    assert json.loads((out / "tokenizer_config.json").read_text())["pad_token"] == "<pad>"
    # A tokenizer without a spare token: none is named, and transformers takes one text at a time.
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 3, "content": "<eos>"}]}')
    assert exported_config(config, "value", folder)["pad_token_id"] is None
    # A language model keeps what it has.
    assert exported_config(config, "lm", folder) == config


def test_older_exports_are_recognized_and_read_where_they_were_trained() -> None:
    new = exported_config(QWEN, "value", None)
    old = {key: value for key, value in new.items() if key != "hybridrl_score_token"}
    foreign = {**QWEN, "id2label": {"0": "LABEL_0"}}
    assert [score_token(one) for one in (new, old, foreign)] == ["last", "before_last", "last"]
    (notice,) = score_notices(old, "judge")
    assert "judge looks like" in notice and "hybridrl_score_token" in notice
    assert score_notices(new, "judge") == score_notices(foreign, "judge") == []
    padded = {**foreign, "eos_token_id": [2, 1], "pad_token_id": 1}
    assert "before the end token" in score_notices(padded, "judge")[0]
    with pytest.raises(ModelError, match="last or before_last"):
        score_token({**new, "hybridrl_score_token": "first"})


def test_an_export_names_the_token_with_which_the_chat_template_ends_a_turn(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**QWEN, "eos_token_id": 3, "bos_token_id": 1})
    )
    declare_turn_end(tmp_path)  # without a tokenizer
    assert not (tmp_path / "generation_config.json").exists()
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for content in (None, {"eos_token_id": 3, "top_k": 20}, {"eos_token_id": [3, end]}):
        if content is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(content))
        declare_turn_end(tmp_path)
        found = json.loads((tmp_path / "generation_config.json").read_text())
        assert found == {**(content or {"bos_token_id": 1}), "eos_token_id": [3, end]}
