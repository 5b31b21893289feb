"""The kernel that draws tokens against fp64, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "draw_kernel_cases.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this host")
def test_tokens_are_those_of_the_fp64_distribution() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases of drawing tokens" in done.stdout
