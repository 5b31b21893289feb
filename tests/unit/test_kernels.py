"""Kernels by Triton's interpreter, against indexing, torch's casts and fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = {
    "kernel_cases.py": "rectangle cases",
    "head_kernel_cases.py": "cases of the log-probability head",
    "draw_kernel_cases.py": "cases of drawing tokens",
    "adapter_kernel_cases.py": "cases of adding an adapter",
    "row_kernel_cases.py": "cases of rows",
    "delta_kernel_cases.py": "all cases of the gated delta rule",
    "fp8_product_cases.py": "cases of products with FP8 weights",
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this host")
@pytest.mark.parametrize("script", CASES)
def test_kernels_give_what_their_references_give(script: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert CASES[script] in done.stdout
