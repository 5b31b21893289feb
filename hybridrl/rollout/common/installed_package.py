"""Installed packages of engines: versions, the torch and transformers they need, their refusals.

Reads package metadata only, so that a configuration is judged before a rank imports an engine.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from hybridrl.errors import UserError

FALLBACK = "Or set rollout.engine=hf."


def version_of(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_pins(key: str, distribution: str, number: str, package: str, install: str) -> None:
    """Raises UserError unless the installed torch and transformers are what an engine's wheel
    names.

    Args:
        key: Configuration key that chose the engine.
        distribution, number: Installed distribution of the engine, and its version.
        package, install: Its name in messages, and how to install it.
    """
    for line in requires(distribution) or ():
        wanted = Requirement(line)
        is_other = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        if wanted.name not in ("torch", "transformers") or is_other:
            continue
        found = version_of(wanted.name)
        # A wheel is built for one torch; builds of that torch for other devices fit.
        pins = {Version(pin.version).public for pin in wanted.specifier if pin.operator == "=="}
        public = None if found is None else Version(found).public
        fits = public is not None and (
            public in pins or wanted.specifier.contains(public, prereleases=True)
        )
        if not fits:
            raise UserError(
                key,
                f"{wanted.name} {found} with {distribution} {number}",
                f"{wanted.name}{wanted.specifier}, which that {package} needs",
                f"Run: pip install '{wanted.name}{wanted.specifier}', or install another "
                f"{package}. {install}. {FALLBACK}",
            )


def refused_start(key: str, package: str, said: str, version: str) -> UserError:
    """Returns what a package's message at its start means in the user's terms."""
    told = " ".join(said.strip().splitlines()[:3])
    return UserError(key, told, f"a model and sizes that {package} accepts", f"With {version}.")


def too_small_cache(longest: int, fits: int | None) -> UserError:
    """Returns the refusal of a KV cache that holds `fits` tokens (None: unknown) and not the
    longest request.
    """
    at_most = "less" if fits is None or fits <= 0 else f"at most {fits}"
    return UserError(
        "data.max_prompt_tokens + rollout.max_new_tokens",
        f"{longest} tokens",
        f"{at_most}: the engine's KV cache, in the memory that is left, has to hold such a request",
        "Lower one of the two, raise rollout.tp, or leave the engine more memory: more ranks (a "
        "smaller part of model and optimizer on each) or train.offload_optimizer=true.",
    )
