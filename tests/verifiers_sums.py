"""Task set of verifiers with a tool, for tests of its connector; the tools are in
verifiers_sums_tools.py, because verifiers starts their module as a program.
"""

from typing import Any

import verifiers.v1 as vf
from verifiers_sums_tools import SumsToolset

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):  # type: ignore[misc]  # verifiers is in another environment
    """A sum and its result."""

    answer: str


class SumsTask(vf.Task[SumsData]):  # type: ignore[misc]
    """Earns 1 if the last turn contains the result."""

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.last_reply))


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):  # type: ignore[misc]
    """One task."""

    def load(self) -> list[Any]:
        return [SumsTask(SumsData(prompt="add 17 25", answer="42"), self.config.task)]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[Any]:
        return [SumsToolset(vf.ToolsetConfig())]
