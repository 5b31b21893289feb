"""Users' functions and classes, named in a configuration as `package.module:name`. No torch.

Users' code never ends the process without a message. Its coroutines run in an event loop with its
own thread, so that they work in notebooks and keep connections open between calls.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.errors import UserError, error_text, failure_text

MAX_LINES = 5  # lines of users' code in one message
LIBRARIES = ("site-packages", "dist-packages")
NOT_OWN = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))


def make_working_folder_importable() -> None:
    """Appends the working directory to sys.path, so that dotted paths can name modules in it."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def imported(path: str) -> Any:
    """Returns what `package.module:name` names. An ImportError has one line about the cause."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise anything
        lines = own_lines(error)
        at = f" at {lines}" if lines else ""
        raise ImportError(f"{type(error).__name__}{at}: {error_text(error)}") from error
    except BaseException as error:  # such as sys.exit, which would end the command
        raise ImportError(f"it {failure_text(error)} at {_lines(error)}") from error


def found_callable(path: str, key: str, allowed: str) -> Callable[..., Any]:
    """Returns what a dotted path names. Raises UserError with the key if it is not callable."""
    try:
        found = imported(path)
    except ImportError as error:
        raise UserError(key, path, allowed, f"Importing it failed: {error}.") from error
    if not callable(found):
        remedy = f"It is a {type(found).__name__}, which cannot be called."
        raise UserError(key, path, allowed, remedy)
    checked: Callable[..., Any] = found
    return checked


def check_options(
    function: Callable[..., Any],
    name: str,
    key: str,
    options: Mapping[str, Any],
    given: Sequence[object] = (),
    after: str = "",
) -> None:
    """Checks that a user's function or class takes the arguments `given`, and then the options.

    Args:
        key: Knob that names the function, such as `reward.function`; its section has `options`.
        after: Text about `given` for the error message, which follows the signature.

    Raises UserError with the section's options or, if there are none, with `key`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # Python cannot determine it
        return
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        section = key.partition(".")[0]
        allowed = f"options that fit {name}{signature}{after}"
        remedy = f"Change the function or its options: {error}."
        if not options:
            raise UserError(key, name, allowed, remedy) from None
        raise UserError(f"{section}.options", dict(options), allowed, remedy) from None


@contextmanager
def contained() -> Iterator[None]:
    """Context manager for calls of users' code; a call of sys.exit becomes a UserError."""
    try:
        yield
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error.__context__, BrokenPipeError) and not own_lines(error):
            raise  # rich ends a command whose output nobody reads any more
        allowed = "code that returns, or raises an Exception"
        remedy = "Remove the call; it would end the run without a message."
        raise UserError(
            _lines(error), f"code that {failure_text(error)}", allowed, remedy
        ) from error


def own_lines(error: BaseException) -> str:
    """Returns only the lines of users' code in a traceback, innermost first."""
    lines = [
        f"{file}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_own(file := frame.f_code.co_filename)
    ]
    return ", called at ".join(lines[: -MAX_LINES - 1 : -1])


def _lines(error: BaseException) -> str:
    """Returns `own_lines`, or the innermost line if the traceback contains only library code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return own_lines(error) or f"{frame.filename}:{frame.lineno}"


def _is_own(file: str) -> bool:
    is_library = any(name in Path(file).parts for name in LIBRARIES)
    return not (is_library or file.startswith("<frozen") or file.startswith(NOT_OWN))


def awaited(value: Any) -> Any:
    """Returns the result of an awaitable, or the value itself if it is not awaitable."""
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
    """Returns the full traceback, even if formatting the users' own exception types fails."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as fault:  # users' own types may raise anything
        return f"a traceback whose text raises {type(fault).__name__}\n"
