"""Writes docs/reference/cluster_check.md: every finding of `hybridrl check --cluster`."""

from __future__ import annotations

from pathlib import Path

from hybridrl.services.cluster_check.findings import KINDS

TARGET = Path(__file__).parents[1] / "reference" / "cluster_check.md"
HEAD = """# Findings of `hybridrl check --cluster`

```bash
hybridrl check --cluster                            # this host
hybridrl check --cluster --hostfile hosts --json    # hosts by ssh, one JSON object
hybridrl check --cluster --slurm                    # in an allocation, all of its nodes
hybridrl check --cluster --ray auto                 # of a Ray cluster, all nodes
```

Every node reports its versions, limits and free space, connects to the others and times a matrix product on each GPU. Then all
nodes measure every link together. `--run-dir DIR` names the folder that nodes share. The exit code is 1 if there is a finding.
The JSON object has `ok`, `findings` (each with `kind`, `where`, `found`, `remedy`) and `facts`, all that was measured.

Nodes answer in about twenty seconds; each further pair of nodes with a healthy link adds less than one, and pairs are measured
at the same time. NCCL is measured if every node has GPUs; its rates need idle GPUs.

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
