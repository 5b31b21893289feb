"""Slurm's commands as scripts: jobs run at once, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

# srun --ntasks=N ... bash -c TEXT: N copies, each told its node; hands SIGUSR1 on, as Slurm does.
SRUN = """#!/bin/bash
while [ "$1" != bash ]; do
  case "$1" in --ntasks=*) count=${1#--ntasks=};; esac
  shift
done
steps=()
for ((node = 0; node < count; node++)); do SLURM_NODEID=$node "$@" & steps+=($!); done
trap 'kill -USR1 "${steps[@]}"' USR1
worst=0
for step in "${steps[@]}"; do
  code=0; wait "$step" || code=$?
  while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done
  [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; echo other; else echo "$@" >>"$(dirname "$0")/asked"; fi
"""
SBATCH = """#!/bin/bash
SLURM_JOB_ID=77 SLURM_JOB_NODELIST=all exec bash "$1"
"""


def write_program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def scheduler_stubs(folder: Path) -> dict[str, str]:
    """Puts stubs of Slurm's commands into a folder; returns an environment that finds them."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        write_program(folder / name, text)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
