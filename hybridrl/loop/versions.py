"""Reports packages of a run whose versions are neither tested nor refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version

from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.rollout.registry import engine_package
from hybridrl.versions import MEGATRON, TRANSFORMER_ENGINE, Support, untested_notice


def megatron_fault() -> UserError | None:
    """Returns the error for a version of Megatron-Core that is refused; None if it is accepted."""
    found = version("megatron-core")
    if (fault := MEGATRON.fault(found)) is None:
        return None
    return UserError(
        "megatron-core",
        f"{found} ({fault})",
        MEGATRON.allowed,
        f"Run: pip install megatron-core=={MEGATRON.newest}",
    )


def report_untested(
    config: Config, has_rollouts: bool, layers: str, notify: Callable[[str], None]
) -> None:
    """Prints one notice if the run uses packages whose versions were not tested. `has_rollouts`
    says whether the run compares its engine with the trainer at its start.
    """
    command = "hybridrl check --mismatch CONFIG, with the configuration of an RL run"
    found = _used(config, has_rollouts, layers)
    if (notice := untested_notice(found, has_rollouts, command)) is not None:
        notify(notice)


def _used(config: Config, has_rollouts: bool, layers: str) -> Iterator[tuple[str, str, Support]]:
    yield "megatron-core", version("megatron-core"), MEGATRON
    if layers == "transformer_engine":
        yield "transformer-engine", version("transformer_engine"), TRANSFORMER_ENGINE
    package = engine_package(config.rollout.engine) if has_rollouts else None
    if package is not None:
        is_cpu = num_local_gpus() == 0
        name, number = package.installed_version(is_cpu).split()
        yield name, number, package.support(is_cpu)
