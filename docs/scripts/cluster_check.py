"""Writes docs/reference/cluster_check.md: every finding of `hybridrl check --cluster`."""

from __future__ import annotations

from pathlib import Path

from hybridrl.cli.cluster_findings import KINDS

TARGET = Path(__file__).parents[1] / "reference" / "cluster_check.md"
HEAD = """# Findings of `hybridrl check --cluster`

```bash
hybridrl check --cluster                            # this host
hybridrl check --cluster --hostfile hosts --json    # hosts by ssh, one JSON object
hybridrl check --cluster --slurm                    # in an allocation, all of its nodes
hybridrl check --cluster --ray auto                 # of a Ray cluster, all nodes
```

Every node says what is installed, its limits and its room, times a matrix product and copies, and with the others
every link. `--run-dir DIR` names the folder that nodes share. The exit code is 1 where there is a finding. The JSON object has
`ok`, `findings` (each with `kind`, `where`, `found`, `remedy`) and `facts`, all that was measured.

Nodes answer in about ten seconds; every further pair of nodes adds under one where its link is healthy, and pairs are
measured side by side. Rates of NCCL are measured where every node has GPUs, and ask for idle GPUs.

| Finding | What is looked at | Remedy |
| --- | --- | --- |
"""


def page() -> str:
    """Returns the page."""
    rows = (
        f"| `{name}` | {kind.looks_at} | {_cell(kind.remedy)} |" for name, kind in KINDS.items()
    )
    return HEAD + "\n".join(rows) + "\n"


def _cell(remedy: str) -> str:
    return "`" + remedy.replace("|", "\\|") + "`"


if __name__ == "__main__":
    TARGET.write_text(page())
