"""Kernels by Triton's interpreter, against indexing, torch's casts and fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = {
    "kernel_cases.py": "rectangle cases",
    "head_kernel_cases.py": "cases of the log-probability head",
    "draw_kernel_cases.py": "cases of drawing tokens",
    "adapter_kernel_cases.py": "cases of adding an adapter",
    "row_kernel_cases.py": "cases of rows",
    "delta_kernel_cases.py": "all cases of the gated delta rule",
    "fp8_product_cases.py": "cases of products with FP8 weights",
}
# Runs scripts one after another, which share their imports. Prints what each printed.
PROGRAM = """
import contextlib, io, json, runpy, sys, traceback
folder, *scripts = sys.argv[1:]
sys.path.insert(0, folder)
found = {}
for script in scripts:
    sys.argv = [script]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(f"{folder}/{script}", run_name="__main__")
        except BaseException:
            found[script] = False, output.getvalue() + traceback.format_exc()
        else:
            found[script] = True, output.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, tuple[bool, str]]:
    """Whether each chosen script ended well, and what it printed. They run in a process of their
    own, because Triton reads TRITON_INTERPRET when it is imported.
    """
    names = [item.name for item in request.session.items if item.path == request.path]
    chosen = [script for script in CASES if any(f"[{script}]" in name for name in names)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS), *chosen],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, tuple[bool, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this host")
@pytest.mark.parametrize("script", CASES)
def test_kernels_give_what_their_references_give(
    script: str, results: dict[str, tuple[bool, str]]
) -> None:
    is_right, output = results[script]
    assert is_right and CASES[script] in output, output
