"""Error classes for mistakes that a user can fix.

For these errors the command line prints one message without a traceback and exits with code 2.
Every error states the key, file, field or tensor that is wrong, its value, the allowed values and
the remedy.
"""

from __future__ import annotations

import reprlib

MAX_PART_CHARACTERS = 2000  # for each part of a message; longer than any list of allowed values


class _Missing(str):
    """Type of `MISSING`."""


MISSING = _Missing("nothing")
"""Value in an error about a key, option, file or tensor that is missing."""


def short(value: object, max_characters: int = 80) -> str:
    """Returns the repr of any value for a message, shortened and on one line. Never raises."""
    try:
        text = _Short(max_characters).repr(value)
    except BaseException as error:  # users' own types may raise anything
        text = f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return _cut(" ".join(text.split()), max_characters)


def error_text(error: BaseException, max_characters: int = 300) -> str:
    """Returns an exception's text for a message, or its type if it has no text. Never raises."""
    try:
        text = " ".join(str(error).split())
    except BaseException as fault:  # users' own types may raise anything
        text = f"a text that raises {type(fault).__name__}"
    return _cut(_printable(text or type(error).__name__), max_characters)


def failure_text(error: BaseException) -> str:
    """Describes how code failed: "raised ValueError" or "called sys.exit(0)"."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({short(error.code)})"
    return f"raised {_cut(type(error).__name__, 80)}"


class _Short(reprlib.Repr):
    """Formats only as much of a value as a message will show."""

    def __init__(self, max_characters: int) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 4, 20, 20, 20
        self.maxstring = self.maxother = self.maxlong = max_characters

    def repr_int(self, value: int, level: int) -> str:
        """Returns a number, or its length if Python refuses to print it."""
        num_bits = value.bit_length()
        return f"an integer of {num_bits} bits" if num_bits > 256 else repr(value)


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


def _printable(text: str) -> str:
    """Returns the text with unpaired surrogates escaped, because UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _part(value: object) -> str:
    """Converts a value of any type and length into one part of a message."""
    try:
        text = str(value)
    except BaseException:  # a number with thousands of digits, or a user's own type
        return short(value)
    return _cut(_printable(text), MAX_PART_CHARACTERS)


class UserError(Exception):
    """A mistake in configuration, data, files or user-supplied code; exit code 2.

    `name` is the key, file, field or tensor, `remedy` a command or edit that fixes it.
    """

    def __init__(self, name: str, value: object, allowed: str, remedy: str) -> None:
        self.name, self.value, self.allowed, self.remedy = name, value, allowed, remedy
        super().__init__(self._message(*self.parts()))

    def _message(self, name: str, value: str, allowed: str, remedy: str) -> str:
        found = " is missing" if isinstance(self.value, _Missing) else f": got {value}"
        return f"{name}{found}; allowed: {allowed}. {remedy}"

    def parts(self) -> tuple[str, str, str, str]:
        """Returns name, value, allowed values and remedy as shortened texts."""
        return _part(self.name), _part(self.value), _part(self.allowed), _part(self.remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), *self.parts(), str(self))


def _rebuild(
    kind: type[UserError], name: str, value: str, allowed: str, remedy: str, message: str
) -> UserError:
    error = kind.__new__(kind)
    error.name, error.value, error.allowed, error.remedy = name, value, allowed, remedy
    Exception.__init__(error, message)
    return error


class ConfigError(UserError):
    """One or more violations in a configuration, all reported together."""

    def __init__(self, violations: list[UserError]) -> None:
        self.violations = violations
        first = violations[0]
        super().__init__(first.name, first.value, first.allowed, first.remedy)
        self.args = ("\n".join(str(violation) for violation in violations),)

    def as_json(self) -> list[dict[str, str]]:
        """Returns the violations as `{key, value, allowed, remedy}` objects."""
        return [
            {"key": v.name, "value": _part(v.value), "allowed": v.allowed, "remedy": v.remedy}
            for v in self.violations
        ]


class UnknownKeyError(UserError):
    """A key that a section of the configuration does not have; `allowed` lists its keys."""

    def _message(self, name: str, value: str, allowed: str, remedy: str) -> str:
        return f"{name}: {value}. {remedy} Allowed: {allowed}."


class DataError(UserError):
    """Prompts or demonstrations that cannot be read as configured."""


class BadRowError(DataError):
    """A row that cannot be used, although other rows of the source can; see `data.on_bad_row`."""


class CheckpointError(UserError):
    """A checkpoint or HF directory that is damaged, or belongs to another model or run."""


class OtherModelError(CheckpointError):
    """A checkpoint that is complete, but whose model has other tensors than the run's model."""


class ModelError(UserError):
    """A model configuration or weight that no known model family supports."""


class DeviceMemoryError(RuntimeError):
    """The device is out of memory; the message says what uses it, and which sizes to reduce."""
