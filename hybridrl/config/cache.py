"""Location of files that are cached between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Returns a folder in HYBRIDRL_CACHE, $XDG_CACHE_HOME or ~/.cache, which may not exist yet."""
    for name in ("HYBRIDRL_CACHE", "XDG_CACHE_HOME"):
        if os.path.isabs(folder := os.environ.get(name, "")):
            return Path(folder) / "hybridrl" / kind
    return Path(os.path.expanduser("~")) / ".cache" / "hybridrl" / kind
