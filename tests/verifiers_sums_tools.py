"""Tools of the task set verifiers_sums.py."""

import verifiers.v1 as vf


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):  # type: ignore[misc]
    """A calculator."""

    TOOL_PREFIX = None  # the model calls `add`

    @vf.tool  # type: ignore[untyped-decorator]
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


if __name__ == "__main__":
    SumsToolset.run()
