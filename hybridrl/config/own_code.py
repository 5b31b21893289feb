"""Users' own functions and classes, named in a configuration as `package.module:name`. No torch.

Owns that no code of users ends the process without a word, be it by sys.exit, and the event loop
that their coroutines run in. That loop has a thread of its own: so it works where the calling
thread runs a loop already, as in a notebook, and connections that a function keeps stay with it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.errors import UserError, did, said

MOST_LINES = 5  # of users' code, in one message
LIBRARIES = ("site-packages", "dist-packages")
NOT_OWN = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))


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
        lines = own_lines(error)
        at = f" at {lines}" if lines else ""
        raise ImportError(f"{type(error).__name__}{at}: {said(error)}") from error
    except BaseException as error:  # sys.exit, say, which would end the command with its code
        raise ImportError(f"it {did(error)} at {_lines(error)}") from error


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
        raise UserError(_lines(error), f"code that {did(error)}", allowed, remedy) from error


def own_lines(error: BaseException) -> str:
    """Returns the lines of users' code that an exception came through, for a message: the line
    that was run last, then those that called it; "" if none is known. Where a library raised, its
    own lines are left out.
    """
    lines = [
        f"{file}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_own(file := frame.f_code.co_filename)
    ]
    return ", called at ".join(lines[: -MOST_LINES - 1 : -1])


def _lines(error: BaseException) -> str:
    """Returns `own_lines`, or the line that was run last where a library ended by itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return own_lines(error) or f"{frame.filename}:{frame.lineno}"


def _is_own(file: str) -> bool:
    is_library = any(name in Path(file).parts for name in LIBRARIES)
    return not (is_library or file.startswith("<frozen") or file.startswith(NOT_OWN))


def awaited(value: Any) -> Any:
    """Returns a value, or what it comes to if it can be awaited; waits for it."""
    if not inspect.isawaitable(value):
        return value

    async def ended() -> tuple[Any, BaseException | None]:
        try:
            return await value, None
        except BaseException as error:  # sys.exit would end the loop
            return None, error

    future = asyncio.run_coroutine_threadsafe(ended(), _loop())
    try:
        found, error = future.result()
    except BaseException:  # this thread was interrupted
        future.cancel()
        raise
    if error is not None:
        raise error
    return found


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="users' coroutines", daemon=True).start()
    return loop


def traceback_text(error: BaseException) -> str:
    """Returns the whole traceback of an exception of users' code, whatever their types do."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as fault:  # users' own types may raise anything
        return f"a traceback whose text raises {type(fault).__name__}\n"
