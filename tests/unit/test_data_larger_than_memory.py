"""A source is read, tokenized and mapped in memory that does not grow with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Prints by how many MiB the process has grown at most since its imports.
PROGRAM = """
import sys
from pathlib import Path
from hybridrl.config.data import DataConfig
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import PromptSource, Reading

class Few:
    eos_token_id = 1

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [[7] * 100 for _ in text]}

def peak():
    # Not of getrusage, which counts what the process that forked this one held.
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

before = peak()
config = DataConfig(prompts=(sys.argv[1],))
store = PromptStore(Few(), Path(sys.argv[2]))
loaded = store.load(Reading(config, max_response_tokens=200))
source = PromptSource(loaded.prompts, seed=0, shuffle=True)
assert len(source.take(len(source))[0].tokens) == 100 and len(source) == int(sys.argv[3])
print(peak() - before)
"""
MIB_OF_SOURCE, MOST_MIB = (
    240,
    130,
)  # 87 with packages imported on the way; 196 with 1024 rows at a time


@pytest.mark.full
def test_a_source_larger_than_what_is_held_is_read(tmp_path: Path) -> None:
    path, num = tmp_path / "rows.jsonl", MIB_OF_SOURCE * 8
    with path.open("w") as file:
        for number in range(num):
            texts = {"prompt": f"{number} " * 10_000, "response": "b" * (60 << 10)}
            file.write(json.dumps({key: text[: 64 << 10] for key, text in texts.items()}) + "\n")
    assert path.stat().st_size > MIB_OF_SOURCE * 0.8 * 2**20
    command = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "cache"), str(num)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < MOST_MIB
