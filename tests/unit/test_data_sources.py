"""Parquet files and data sets, chats, weights of sources, and prompts held out."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT

from hybridrl.config.load import load_config, load_config_dict
from hybridrl.config.schema import DataConfig
from hybridrl.data.forms import validate_file
from hybridrl.data.mixture import hold_out, prompt_source
from hybridrl.data.prompts import load_prompts
from hybridrl.data.rows import raw_rows
from hybridrl.errors import ConfigError, DataError
from hybridrl.rewards.functions import check_rewards

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id: int | None = 1
    chat_template: str | None = None

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [[ord(c) for c in t] for t in text]}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        (text,), _ = render_jinja_template(
            [messages], chat_template=self.chat_template, add_generation_prompt=True
        )
        return text


class Chatting(Letters):
    chat_template = TEMPLATE


ROWS = [{"prompt": f"p{i}", "answer": str(i), "extra": {"a": [i]}} for i in range(5)]


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(source, tokenizer=None, **changes):
    config = DataConfig.model_validate({"prompts": source, "max_prompt_tokens": 60, **changes})
    return config, load_prompts(config, tokenizer or Letters())


def columns(prompts):
    return [(p.prompt_id, p.text, dict(p.columns)) for p in prompts]


def test_parquet_and_data_sets_give_what_jsonl_gives(tmp_path):
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    jsonl = write(tmp_path / "rows.jsonl", ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    _, expected = loaded(jsonl)
    for source in ("rows.parquet", "set"):
        _, found = loaded(str(tmp_path / source))
        assert columns(found.prompts) == columns(expected.prompts)
        assert validate_file(str(tmp_path / source), DataConfig(), required=["answer"]) == 5
    in_memory = load_prompts(DataConfig(), Letters(), datasets.Dataset.from_list(ROWS))
    assert columns(in_memory.prompts) == columns(expected.prompts)


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": ""}]), path)
    with pytest.raises(DataError, match="not empty") as caught:
        validate_file(str(path), DataConfig(on_bad_row="stop"))
    assert caught.value.name == f"{path}:2"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="a parquet file"):
        validate_file(str(path), DataConfig())
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="no rows"):
        validate_file(str(path), DataConfig())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("datasets:openai/gsm8k", r"datasets:NAME\[@REVISION\]\[:CONFIG\]:SPLIT"),
        ("missing.parquet", "no such file"),
    ],
)
def test_a_source_that_cannot_be_is_refused(name, said):
    with pytest.raises(DataError, match=said):
        list(raw_rows([name]))


def test_a_data_set_with_splits_names_them(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "all")
    with pytest.raises(DataError, match=f"{tmp_path}/all/train, {tmp_path}/all/test"):
        list(raw_rows([str(tmp_path / "all")]))
    assert validate_file(str(tmp_path / "all" / "test"), DataConfig()) == 5


def test_prompts_become_chats(tmp_path):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "d"}]
    path = write(tmp_path / "r.jsonl", [{"prompt": "1+1="}, {"prompt": turns}, {"prompt": own}])
    _, found = loaded(path, Chatting(), chat_template=True)
    assert [p.text for p in found.prompts] == [
        "<user>1+1=<assistant>",
        "<user>a<assistant>b<user>c<assistant>",
        "<system>mine<user>d<assistant>",
    ]
    assert found.prompts[0].tokens == tuple(map(ord, "<user>1+1=<assistant>"))
    assert found.prompts[1].columns["messages"] == turns
    _, found = loaded(path, Chatting(), chat_template=True, system_prompt="S")
    assert [p.text[:12] for p in found.prompts] == ["<system>S<us"] * 2 + ["<system>mine"]
    assert validate_file(path, DataConfig()) == 3


def test_what_is_no_chat_is_refused(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match="a tokenizer that has no chat template"):
        loaded(path, Letters(), chat_template=True)
    path = write(tmp_path / "r.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "user"}]}])
    with pytest.raises(DataError, match="role.*content") as caught:
        loaded(path, Chatting(), chat_template=True, on_bad_row="stop")
    assert caught.value.name == f"{path}:2"

    class Strict(Letters):
        chat_template = "{{ raise_exception('roles must alternate') }}"

    path = write(tmp_path / "r.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match="roles must alternate") as caught:
        loaded(path, Strict(), chat_template=True)
    assert caught.value.name == f"{path}:1"


@pytest.fixture
def mixed(tmp_path):
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(size)])
        for name, size in (("a", 3), ("b", 50), ("c", 7))
    ]
    config, found = loaded(paths, weights=[2, 1, 0.5])
    return lambda seed=0: prompt_source(found, config, seed)


def test_weights_are_the_shares_of_sources(mixed):
    source = mixed()
    assert len(source) == 60
    for num in (7, 70, 700):
        counts = Counter(prompt.text[0] for prompt in mixed().take(num))
        assert counts == {"a": num * 4 / 7, "b": num * 2 / 7, "c": num / 7}
    taken = Counter(prompt.text for prompt in source.take(105))
    assert {taken[f"a{i}"] for i in range(3)} == {20}  # each source in epochs of its own
    assert {taken[f"b{i}"] for i in range(50)} == {0, 1}
    assert {taken[f"c{i}"] for i in range(7)} == {2, 3}
    assert source.epoch == 105 / 60


def test_a_mixture_resumes_anywhere(mixed):
    whole = [prompt.text for prompt in mixed().take(200)]
    for cut in (0, 1, 6, 59, 60, 127):
        first, second = mixed(), mixed()
        assert [prompt.text for prompt in first.take(cut)] == whole[:cut]
        state = json.loads(json.dumps(first.state()))
        second.take(13)
        second.load_state(state)
        assert [prompt.text for prompt in second.take(200 - cut)] == whole[cut:]
    with pytest.raises(DataError, match="differ from the checkpoint"):
        mixed(seed=1).load_state(mixed().state())


def test_a_weighted_source_of_long_prompts_is_refused(tmp_path):
    paths = [
        write(tmp_path / "a.jsonl", [{"prompt": "a"}]),
        write(tmp_path / "b.jsonl", [{"prompt": "b" * 61}]),
    ]
    config, found = loaded(paths, weights=[1, 1])
    with pytest.raises(DataError, match="b.jsonl: got no prompt that is short enough"):
        prompt_source(found, config, 0)


def test_held_out_prompts_are_a_stable_share(tmp_path):
    rows = [{"prompt": f"prompt {i % 500}"} for i in range(1000)]
    _, found = loaded(write(tmp_path / "r.jsonl", rows))
    kept, held = hold_out(found, 0.2)
    assert 0.15 < len(held) / 1000 < 0.25
    assert len(kept.prompts) == len(kept.sources) == 1000 - len(held)
    assert not {p.text for p in kept.prompts} & {p.text for p in held}
    assert Counter(p.text for p in held).most_common()[-1][1] == 2
    _, more = loaded(write(tmp_path / "r.jsonl", [{"prompt": "new"}, *rows]))
    assert {p.text for p in hold_out(more, 0.2)[1]} - {"new"} == {p.text for p in held}


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.999999])
def test_a_share_of_a_small_file_leaves_prompts_for_both_parts(tmp_path, share):
    _, found = loaded(write(tmp_path / "r.jsonl", [{"prompt": f"prompt {i}"} for i in range(8)]))
    kept, held = hold_out(found, share)
    assert kept.prompts and held
    assert len(kept.prompts) + len(held) == 8
    assert 1 in (len(kept.prompts), len(held))


def test_a_share_of_equal_prompts_is_refused(tmp_path):
    _, found = loaded(write(tmp_path / "r.jsonl", [{"prompt": "one"}, {"prompt": "one"}]))
    with pytest.raises(DataError, match=r"data\.eval_share.*2 equal prompts"):
        hold_out(found, 0.5)


MINIMAL = {"run": {"name": "a"}, "model": {"init": "m"}, "algorithm": {"name": "grpo"}}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"prompts": ["a", "b"], "weights": [1]}, "2 numbers, one per source, instead of 1"),
        ({"prompts": "a", "weights": [0]}, "a list of finite numbers above 0"),
        ({"prompts": "a", "weights": 1.0}, "a list of finite numbers above 0"),
        ({"system_prompt": "x"}, "null unless chat_template is true"),
        (
            {"eval_share": 0.1, "eval_prompts": "a"},
            r"^data\.eval_share: got 0\.1; allowed: 0 if eval_prompts is set\. ",
        ),
        ({"eval_share": 1.0}, "less than 1"),
    ],
)
def test_wrong_sections_are_refused(section, said):
    with pytest.raises(ConfigError, match=said):
        load_config_dict({**MINIMAL, "data": section})


def test_weights_may_be_numbers_of_numpy():
    section = {"prompts": ["a", "b"], "weights": list(np.array([1.0, 3.0]))}
    assert load_config_dict({**MINIMAL, "data": section}).data.weights == (1.0, 3.0)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K beside this checkout")
def test_the_gsm8k_example_reads_the_published_files(tmp_path, monkeypatch):
    config = load_config(ROOT / "examples" / "gsm8k" / "grpo.yaml")
    assert check_rewards(config.reward) == []
    shutil.copytree(GSM8K, tmp_path / "data" / "gsm8k")
    monkeypatch.chdir(tmp_path)
    data = config.data.model_copy(update={"max_prompt_tokens": 10_000})
    found = load_prompts(data, Chatting())
    assert len(found.prompts) == 7473
    first = found.prompts[0]
    assert first.text.startswith("<system>Solve") and "<user>Natalia sold" in first.text
    assert str(first.columns["answer"]).endswith("#### 72")
    assert len(load_prompts(data, Chatting(), data.eval_prompts, limit=256).prompts) == 256
