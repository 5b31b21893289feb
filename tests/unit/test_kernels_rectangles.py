"""The copies' kernels, by Triton's interpreter, against indexing and torch's cast to FP8."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "kernel_cases.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this host")
def test_rectangles_arrive_where_indexing_puts_them() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rectangle cases" in done.stdout
