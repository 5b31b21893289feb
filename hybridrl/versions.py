"""Decides which installed versions of a package a run accepts. No torch.

hybridrl uses private parts of its engines (docs/reference/private_parts.md), which may change in
any version. Versions that are too old or known not to work are refused. Other untested versions
start with a notice; the comparison of engine and trainer at the start then protects the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version


@dataclass(frozen=True)
class Support:
    """Oldest, `tested` and `bad` versions of a package; `bad` has reasons by specifier."""

    oldest: str
    tested: tuple[str, ...]
    bad: Mapping[str, str] = field(default_factory=dict)

    def fault(self, number: str) -> str | None:
        """Returns why a version is refused; None if it is not."""
        if Version(number).release < Version(self.oldest).release:
            return f"older than {self.oldest}"
        for versions, reason in self.bad.items():
            if SpecifierSet(versions).contains(Version(number).public, prereleases=True):
                return reason
        return None

    def is_tested(self, number: str) -> bool:
        """Whether tests ran with a version, in any build."""
        return Version(number).public in self.tested

    @property
    def newest(self) -> str:
        return max(self.tested, key=Version)

    @property
    def allowed(self) -> str:
        """Names the supported versions, for messages."""
        bad = "".join(f", except {versions}" for versions in self.bad)
        return f"{self.oldest} or newer{bad} (tested: {', '.join(self.tested)})"


def tested_numbers(tested: Iterable[str], name: str) -> tuple[str, ...]:
    """Returns the versions of one package in a list of `NAME VERSION`."""
    return tuple(entry.split()[1] for entry in tested if entry.split()[0] == name)


MEGATRON = Support("0.16.1", ("0.16.1", "0.19.2"))
# megatron-core 0.16.1 requires transformer-engine below 2.12; 0.19.2 has no limit.
TRANSFORMER_ENGINE = Support("2.11", ("2.11.0",))


def untested_notice(
    found: Iterable[tuple[str, str, Support]], is_compared: bool, help_command: str
) -> str | None:
    """Returns the notice about untested packages (name, version, support); None if all are tested.

    `is_compared`: whether the start compares engine and trainer, as `help_command` does.
    """
    untested = [
        f"{name} {number} (newest tested: {support.newest})"
        for name, number, support in found
        if not support.is_tested(number)
    ]
    if not untested:
        return None
    what = "the comparison of engine and trainer at the start checks this run"
    if not is_compared:
        what = f"this run has no comparison at its start; to compare, run: {help_command}"
    return f"not tested: {', '.join(untested)}; {what}"
