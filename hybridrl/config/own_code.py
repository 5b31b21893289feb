"""Users' own functions and classes, named in a configuration as `package.module:name`. No torch."""

from __future__ import annotations

import os
import sys


def make_working_folder_importable() -> None:
    """Lets dotted paths name modules in the folder where hybridrl was started, behind all others:
    for `hybridrl` as for a script elsewhere that makes a Trainer.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
