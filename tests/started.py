"""What the tests of fork_starts.py start: says what it finds, and ends as it is told."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time


def main() -> None:
    """Does what the first argument says."""
    what, *rest = sys.argv[1:]
    if what == "end":
        raise SystemExit(int(rest[0]))
    if what == "raise":
        raise ValueError("as it was told")
    if what == "sleep":
        print("sleeping", flush=True)
        time.sleep(60)
    if what == "cut":
        print("before the end")
        os._exit(5)
    import torch

    found = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "variable": os.environ.get("A_VARIABLE"),
        "first": sys.path[0],
        "random": random.random(),
        "torch": torch.rand(1).item(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "parent": os.getppid(),
        "session": os.getsid(0),
        "input": sys.stdin.read(),
        "writes_bytecode": not sys.dont_write_bytecode,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
