"""Puts this folder on the import path, so that tests of all folders share their cases. Their
processes are forked from one that has imported what they import.
"""

from __future__ import annotations

from pathlib import Path

import fork_starts

fork_starts.install(Path(__file__).parents[1])
