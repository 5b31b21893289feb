"""Slurm's commands as scripts: jobs run at once, on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# srun --ntasks=N ... bash -c TEXT: N copies, each told its node. As Slurm does, it hands SIGUSR1
# on, ends the others a moment after one has failed if it was asked to, and returns the largest
# code.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time

start = sys.argv.index("bash")
options, command, steps = sys.argv[1:start], sys.argv[start:], []
signal.signal(signal.SIGUSR1, lambda *_: [step.send_signal(signal.SIGUSR1) for step in steps])
count = int(next(one for one in options if one.startswith("--ntasks=")).partition("=")[2])
for node in range(count):
    steps.append(subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(node)}}))
kills = "--kill-on-bad-exit=1" in options
while None in [step.poll() for step in steps]:
    if kills and any(step.returncode for step in steps):
        kills = False
        time.sleep(0.5)
        for step in steps:
            step.terminate()
    time.sleep(0.05)
sys.exit(max(128 - step.returncode if step.returncode < 0 else step.returncode for step in steps))
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
    """Puts stubs of Slurm's commands into a folder; returns the variable that finds them."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        write_program(folder / name, text)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
