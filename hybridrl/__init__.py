"""hybridrl: a Megatron-first engine that post-trains large language models with reinforcement
learning.

Importing this package does not import torch; torch is imported on the first access to `Trainer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridrl.loop.trainer import Trainer

__version__ = "0.2.0"
__all__ = ["Trainer", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Trainer":
        import warnings

        # Megatron-Core warns about each missing optional package; `hybridrl check` lists them.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # Megatron-Core calls deprecated functions of torch.distributed in every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
        from hybridrl.loop.trainer import Trainer
        from hybridrl.parallel.watch import observe_hangs
        from hybridrl.services.liveness.hang_reports import HangReports

        observe_hangs(HangReports)
        return Trainer
    raise AttributeError(f"module 'hybridrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
