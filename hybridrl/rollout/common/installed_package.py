"""Checks the installed versions of engines' packages, and of the torch and transformers they need.

Reads only package metadata; no rank imports an engine for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from hybridrl.errors import UserError
from hybridrl.versions import Support

FALLBACK = "Or set rollout.engine=hf."


def version_of(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_pins(key: str, distribution: str, number: str, package: str, install: str) -> None:
    """Raises UserError unless the installed torch and transformers match an engine's requirements.

    Args:
        key: Configuration key that chose the engine.
        distribution, number: Installed distribution of the engine, and its version.
        package, install: Name of the engine's package in messages, and instructions to install it.
    """
    for line in requires(distribution) or ():
        wanted = Requirement(line)
        is_other = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        if wanted.name not in ("torch", "transformers") or is_other:
            continue
        found = version_of(wanted.name)
        # A wheel needs one version of torch, but any of its builds (CPU or CUDA) fits.
        pins = {Version(pin.version).public for pin in wanted.specifier if pin.operator == "=="}
        public = None if found is None else Version(found).public
        fits = public is not None and (
            public in pins or wanted.specifier.contains(public, prereleases=True)
        )
        if not fits:
            raise UserError(
                key,
                f"{wanted.name} {found} with {distribution} {number}",
                f"{wanted.name}{wanted.specifier}, which this {package} needs",
                f"Run: pip install '{wanted.name}{wanted.specifier}', or install another "
                f"{package}. {install}. {FALLBACK}",
            )


@contextmanager
def changed_parts_explained(version: str, support: Support) -> Iterator[None]:
    """Raises UserError if an untested version of a package lacks something that hybridrl uses."""
    name, number = version.split()
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        if support.is_tested(number):
            raise
        raise UserError(
            f"the start of {name} {number}, which was not tested",
            f"{type(error).__name__}: {error}",
            f"the parts of {name} that docs/reference/private_parts.md lists",
            f"Run: pip install '{name}=={support.newest}'. {FALLBACK}",
        ) from error


def refused_start(key: str, package: str, message: str, version: str) -> UserError:
    """Returns a UserError that quotes the first lines of a failed package's message."""
    first_lines = " ".join(message.strip().splitlines()[:3])
    return UserError(
        key,
        first_lines,
        f"a model and sizes that {package} accepts",
        f"Change the model or its sizes, or install a version other than {version}.",
    )


def too_small_cache(longest: int, capacity: int | None) -> UserError:
    """Returns the error for a KV cache (of `capacity` tokens) too small for the longest request."""
    at_most = "less" if capacity is None or capacity <= 0 else f"at most {capacity}"
    return UserError(
        "data.max_prompt_tokens + rollout.max_new_tokens",
        f"{longest} tokens",
        f"{at_most}: the longest request must fit into the KV cache",
        "Lower one of the two, raise rollout.tp, or leave the engine more memory: more ranks (a "
        "smaller part of model and optimizer on each) or train.optimizer_memory=host.",
    )
