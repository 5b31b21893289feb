"""Lets vLLM look for its kernels once in a process, and once for all forked ones.

On CPUs vLLM puts functions of its own in the place of Triton kernels, and looks through the
attributes of all imported modules for them: half a second at each start of an engine.
"""

from __future__ import annotations

from functools import cache


@cache
def register() -> None:
    """Replaces the kernels now; engines that start later in this process find it done."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
