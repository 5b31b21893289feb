"""The errors that a user can mend.

Owns the base class that the command line turns into exit code 2 and one message without a
traceback. Every such error says what was wrong (a key, file, field or tensor), the value met, what
is allowed and the remedy.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in configuration, data, files or user-supplied code; exit code 2.

    Args:
        name: the key, file, field or tensor that is wrong.
        value: what was found there.
        allowed: what would have been accepted.
        remedy: what to do about it.
    """

    def __init__(self, name: str, value: object, allowed: str, remedy: str) -> None:
        self.name, self.value, self.allowed, self.remedy = name, value, allowed, remedy
        super().__init__(f"{name}: got {value!s}; allowed: {allowed}. {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild,
            (type(self), self.name, str(self.value), self.allowed, self.remedy, str(self)),
        )


def _rebuild(
    kind: type[UserError], name: str, value: str, allowed: str, remedy: str, message: str
) -> UserError:
    error = kind.__new__(kind)
    error.name, error.value, error.allowed, error.remedy = name, value, allowed, remedy
    Exception.__init__(error, message)
    return error


class ConfigError(UserError):
    """One or several violations found in a configuration, reported all at once."""

    def __init__(self, violations: list[UserError]) -> None:
        self.violations = violations
        first = violations[0]
        super().__init__(first.name, first.value, first.allowed, first.remedy)
        self.args = ("\n".join(str(violation) for violation in violations),)

    def as_json(self) -> list[dict[str, str]]:
        """Returns the violations as `{key, value, allowed, remedy}` objects."""
        return [
            {"key": v.name, "value": str(v.value), "allowed": v.allowed, "remedy": v.remedy}
            for v in self.violations
        ]


class DataError(UserError):
    """Prompts or demonstrations that cannot be read as asked."""


class CheckpointError(UserError):
    """A checkpoint or HF directory that is incomplete, damaged or of another model or run."""


class ModelError(UserError):
    """A model configuration or weight that no known family describes."""


class DeviceMemoryError(RuntimeError):
    """The device has no memory left; says what holds it and what could be smaller."""
