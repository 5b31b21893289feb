"""Data files that are damaged, endless or meant to do harm, and overrides that cannot be used: each
ends in one short message of the command, never in a traceback, a crash or a wait.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from command_line import FRESH, QUICKSTART
from pyarrow import parquet

from hybridrl.cli import main, train
from hybridrl.config.schema import DataConfig
from hybridrl.data.prompts import load_prompts
from hybridrl.environments.parsers import Hermes
from hybridrl.errors import DataError, UserError
from hybridrl.metrics.sinks import RolloutDump

ROW = '{"prompt": "1+1=", "answer": "2"}\n'
SMALL = (
    *FRESH,
    f"data.prompts={QUICKSTART / 'train.jsonl'}",
)
LONG = "n" * 300
NINES = "9" * 5000


def row(value: str) -> str:
    return ROW + f'{{"prompt": "a", "answer": "2", "x": {value}}}\n'


def table(path: Path, column: pa.Array) -> None:
    texts = [str(number) for number in range(len(column))]
    parquet.write_table(pa.table({"prompt": texts, "answer": texts, "x": column}), path)


BAD_UTF8 = pa.StringArray.from_buffers(
    2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xff\xfe")
)
# Text of a data file, or its last column, and what the message says.
FILES: dict[str, tuple[str | pa.Array, list[str]]] = {
    "nested": (row("[" * 100_000 + "]" * 100_000), [":2: got", "nested too deeply", "at most 64"]),
    "nested less": (row("[" * 900 + "]" * 900), [":2: got", "nested too deeply"]),
    "digits": (row(NINES), [":2: got", "more than 4300 digits"]),
    "half pair": (row('"\\ud800"'), [":2: got", "half of a surrogate pair"]),
    "long name": (f'{{"{LONG}": "a"}}\n' * 2, [":1: got no column 'prompt' among ['nnn"]),
    "UTF-8": (BAD_UTF8, [".parquet:2: got column 'x': 'utf-8' codec", "texts in UTF-8"]),
    "date": (pa.array([0, 10**9], pa.date32()), [".parquet:2: got column 'x'", "to 9999"]),
}


def message(*arguments: str) -> str:
    """Runs a command up to the start of its ranks; returns what its user is told."""
    with pytest.raises(UserError) as caught:
        main.app(list(arguments), standalone_mode=False)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900 and text.encode()
    return text


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "launch_run", lambda *_: 0)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_data_file_is_refused_by_file_and_row(name: str, tmp_path: Path) -> None:
    content, parts = FILES[name]
    path = tmp_path / f"data.{'jsonl' if isinstance(content, str) else 'parquet'}"
    if isinstance(content, str):
        path.write_text(content)
    else:
        table(path, content)
    told = message("train", str(QUICKSTART / "grpo.yaml"), *SMALL, f"data.prompts={path}")
    for part in parts:
        assert part in told


OVERRIDES = {
    "run.seed=!!bool x": "run.seed: got '!!bool x'",
    f"run.{LONG}=1": "unknown key",
    f"run.name={LONG}": "run.name: got 'nnn",
    f"run.dir={LONG}": "run.dir: got 'nnn",
    'run.dir="a\\x00b"': "contain no NUL",
    f"data.prompts={LONG}": "no such file",
    f"data.prompts={LONG}.parquet": "no such file",
    f"model.init={LONG}": "model.init: got nnn",
    "model.init=~nobody-of-this-name/model": "model.init: got ~nobody",
    f"reward.function={LONG}:f": "reward.function: got nnn",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text[:24]))
def test_a_hostile_override_is_refused_by_its_key(override: str) -> None:
    told = message("train", str(QUICKSTART / "grpo.yaml"), *SMALL, override)
    assert OVERRIDES[override] in told


@pytest.mark.parametrize("command", [["plan"], ["report"], ["convert", "--to", "hf", "x"]])
def test_a_long_path_on_the_command_line_is_refused(command: list[str]) -> None:
    assert message(*command, LONG).startswith("x" if "convert" in command else LONG)


class Letters:
    """A tokenizer of one token a letter, which counts them; spaces give none, # is unknown."""

    eos_token_id = 1

    def __init__(self) -> None:
        self.num_read = 0

    def __call__(self, text, *, add_special_tokens):
        self.num_read += sum(map(len, text))
        if any("#" in one for one in text):
            raise Exception("WordLevel error: Missing [UNK] token from the vocabulary")  # noqa: TRY002
        return {"input_ids": [[ord(c) for c in one if c != " "] for one in text]}


def loaded(rows, **limits):
    letters = Letters()
    config = DataConfig(prompts=("unused.jsonl",), max_prompt_tokens=8, on_bad_row="stop")
    return load_prompts(config, letters, rows, **limits), letters.num_read


def test_a_huge_prompt_is_left_out_without_reading_all_of_it() -> None:
    begun = time.monotonic()
    rows = [{"prompt": "a"}, {"prompt": "b" * 50_000_000}, {"prompt": "c" * 9}]
    found, num_read = loaded(rows)
    assert [prompt.text for prompt in found.prompts] == ["a"] and num_read < 200_000
    assert found.left_out.places == [("prompts[1]", 100_000), ("prompts[2]", 9)]
    assert "100000 tokens or more" in found.report() and time.monotonic() - begun < 2
    with pytest.raises(DataError, match="first has 100000 tokens or more"):
        loaded(rows[1:])
    rows = [{"prompt": "a", "response": text} for text in ("b" * 50_000_000, "b" * 9, "b")]
    found, num_read = loaded(rows, max_response_tokens=4)
    assert found.left_out.places == [("prompts[0]", 100_001), ("prompts[1]", 10)]
    assert num_read < 200_000


def test_a_huge_prompt_of_few_tokens_is_kept_whole() -> None:
    text = " " * 500_000 + "ab"
    (prompt,) = loaded([{"prompt": text}])[0].prompts
    assert (prompt.text, prompt.tokens) == (text, (97, 98))


def test_a_call_that_a_model_writes_is_bounded_and_a_response_can_be_dumped(tmp_path) -> None:
    for bad in ('{"name": "f", "arguments": {"x": "\\ud800"}}', "[" * 900, NINES):
        (call,) = Hermes().calls(f"<tool_call>{bad}</tool_call>")
        assert call.error is not None and call.error.encode() and len(call.error) < 400
    RolloutDump(tmp_path, 1).write(1, [{"response": "\ud800é"}])
    assert "\\ud800é" in (tmp_path / "step_000001.jsonl").read_text(encoding="utf-8")
