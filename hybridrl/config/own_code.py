"""Users' own functions and classes, named in a configuration as `package.module:name`. No torch.

Owns that no code of users ends the process without a word, be it by sys.exit.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl.errors import UserError, did, said


def make_working_folder_importable() -> None:
    """Lets dotted paths name modules in the folder where hybridrl was started, behind all others:
    for `hybridrl` as for a script elsewhere that makes a Trainer.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def imported(path: str) -> Any:
    """Returns what a dotted path `package.module:name` names.

    Raises:
        ImportError: whatever went wrong; its text says it on one line.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # any error of the user's own module
        raise ImportError(f"{type(error).__name__}: {said(error)}") from error
    except BaseException as error:  # sys.exit, say, which would end the command with its code
        raise ImportError(f"it {did(error)} at {_line(error)}") from error


@contextmanager
def contained() -> Iterator[None]:
    """Runs a part that calls code of users; what would end the process there becomes an error.

    Raises:
        UserError: the code called sys.exit, or raised another exception that nothing catches.
    """
    try:
        yield
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        allowed = "code that returns, or raises an Exception"
        remedy = "Remove it: the run would end without a word."
        raise UserError(_line(error), f"code that {did(error)}", allowed, remedy) from error


def _line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
