"""Opens a rank's log, for output under torchrun and for stacks. Does not import torch.

Under torchrun, a separate process (tee) copies the rank's output to the log, so that messages from
a crash are not lost; hybridrl's launcher redirects output itself.
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

_COPIERS: list[subprocess.Popen[bytes]] = []  # Nothing waits for these processes.
# `tee` outlives the rank, ignores signals that the rank also receives, and ends when its input
# ends. It ignores SIGPIPE, so that it keeps writing the log after the console is gone.
TEE = 'trap "" HUP INT TERM USR1 PIPE; exec tee -a "$0"'


def log_to(folder: Path) -> None:
    """Copies stderr, and on all ranks but rank 0 also stdout, to `folder/rank_N.log`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"rank_{os.environ['RANK']}.log"
        with log.open("a", encoding="utf-8") as file:
            file.write(f"--- {time.strftime('%F %T')} {shown_command(sys.argv)}\n")
    except OSError as error:
        say(f"hybridrl: cannot write logs in {folder}: {error.strerror}")
        return
    os.environ[LOG_DIR] = str(folder.absolute())
    write_stacks_on_signal()
    if shutil.which("tee") is None:
        say("hybridrl: logs will lack the ranks' output; install tee (coreutils)")
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
    """Makes STACKS_SIGNAL write this rank's Python stacks to its log, or else to stderr."""
    file = rank_file(".log")
    try:
        out = sys.stderr if file is None else file.open("a")  # stays open until the process ends
    except OSError:
        out = sys.stderr
    faulthandler.register(STACKS_SIGNAL, out, all_threads=True)
