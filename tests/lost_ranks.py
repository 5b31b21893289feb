"""A reward whose import ends ranks that are not to come back, as a broken GPU would.

LOST_RANKS names a file. While it is there, in a world of as many ranks as its first word says, the
rank of its second one is killed when it imports this module.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from scripted_reward import digits

__all__ = ["digits"]

_file = Path(os.environ.get("LOST_RANKS", ""))
if "RANK" in os.environ and _file.is_file():
    _world, _rank = _file.read_text().split()
    if (_world, _rank) == (os.environ["WORLD_SIZE"], os.environ["RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)
