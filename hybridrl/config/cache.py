"""Where files are kept that later starts can use again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Returns the folder for one kind of files, which may not be there yet.

    It stands in HYBRIDRL_CACHE, else in the user's cache folder ($XDG_CACHE_HOME or ~/.cache).

    Args:
        kind: name of the folder, e.g. "prompts".
    """
    for name in ("HYBRIDRL_CACHE", "XDG_CACHE_HOME"):
        if os.path.isabs(folder := os.environ.get(name, "")):
            return Path(folder) / "hybridrl" / kind
    return Path(os.path.expanduser("~")) / ".cache" / "hybridrl" / kind
