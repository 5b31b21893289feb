"""What one rank writes to its log: all of its output under torchrun, its stacks when asked.
No torch.

Our launcher gives its ranks their logs from outside. Under torchrun a rank opens its own, in the
run folder, and its output goes to both places: through a process of its own (tee), because what
matters most is what the rank says when it crashes.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from hybridrl.config.interpolation import shown_command
from hybridrl.console import say
from hybridrl.parallel.failure import LOG_DIR, rank_file
from hybridrl.parallel.stacks import STACKS_SIGNAL

_COPIERS: list[subprocess.Popen[bytes]] = []  # nobody waits for them
# It outlives the rank, whatever signals come to both, and ends when nobody writes any more. Without
# SIGPIPE it goes on with the log where the console is gone.
TEE = 'trap "" HUP INT TERM USR1 PIPE; exec tee -a "$0"'


def log_to(folder: Path) -> None:
    """Copies what this rank writes to `folder/rank_N.log`: stderr, and but for rank 0, whose steps
    the run itself logs, stdout. Where that is not possible the console has to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"rank_{os.environ['RANK']}.log"
        with log.open("a", encoding="utf-8") as file:
            file.write(f"--- {time.strftime('%F %T')} {shown_command(sys.argv)}\n")
    except OSError as error:
        say(f"hybridrl: no logs in {folder}: {error.strerror}")
        return
    os.environ[LOG_DIR] = str(folder.absolute())
    write_stacks_on_signal()
    if shutil.which("tee") is None:
        say("hybridrl: no tee is installed: logs lack the ranks' output")
        return
    for stream in (sys.stderr, *([sys.stdout] if os.environ["RANK"] != "0" else [])):
        stream.flush()
        reads, writes = os.pipe()
        copy = ["sh", "-c", TEE, str(log)]
        copier = subprocess.Popen(
            copy, stdin=reads, stdout=stream.fileno(), stderr=subprocess.DEVNULL
        )
        os.dup2(writes, stream.fileno())
        os.close(reads)
        os.close(writes)
        _COPIERS.append(copier)


def write_stacks_on_signal() -> None:
    """Makes STACKS_SIGNAL write the Python stacks of this rank to its log, else to stderr."""
    file = rank_file(".log")
    try:
        out = sys.stderr if file is None else file.open("a")  # open as long as the process lives
    except OSError:
        out = sys.stderr
    faulthandler.register(STACKS_SIGNAL, out, all_threads=True)
