"""Reading, tokenizing and mapping a source needs memory that does not grow with the source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Prints by how many MiB the anonymous memory of the process grew at most after its imports. The
# pages of mapped files are not included, because the system can free them at any time.
PROGRAM = """
import sys
import threading
import time
from pathlib import Path
from hybridrl.config.data import DataConfig
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import PromptSource, Reading

class Few:
    eos_token_id = 1

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [[7] * 100 for _ in text]}

def anonymous_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

def watch():
    while True:
        seen.append(anonymous_mib())
        time.sleep(0.005)

seen = [anonymous_mib()]
threading.Thread(target=watch, daemon=True).start()
config = DataConfig(prompts=(sys.argv[1],))
store = PromptStore(Few(), Path(sys.argv[2]))
loaded = store.load(Reading(config, max_response_tokens=200))
source = PromptSource(loaded.prompts, seed=0, shuffle=True)
num = len(source)
assert num == int(sys.argv[3])
for _ in range(0, num, 64):
    assert len(source.take(64)[0].tokens) == 100
seen.append(anonymous_mib())
store.close()
assert "pandas" not in sys.modules
print(max(seen) - seen[0])
"""
SMALL, LARGE = 256, 1536  # rows: 25 and 150 MiB
# Measured: 28 to 38 at both sizes. The large source adds 100 MiB if its texts are held.
MAX_MIB, MAX_MORE_MIB = 80, 30


def grown_mib(folder: Path, num: int) -> float:
    """Returns the most growth of a process that reads `num` rows of about 100 KiB."""
    path = folder / f"{num}.jsonl"
    with path.open("w") as file:
        for number in range(num):
            text = f"{number:09} " * 8192
            file.write(json.dumps({"prompt": text, "response": "b" * (20 << 10)}) + "\n")
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder / "cache"), str(num)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.full
def test_memory_does_not_grow_with_a_source(tmp_path: Path) -> None:
    small, large = (grown_mib(tmp_path, num) for num in (SMALL, LARGE))
    assert large < MAX_MIB, (small, large)
    assert large - small < MAX_MORE_MIB, (small, large)
