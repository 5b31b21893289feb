"""Writes the rows of data for a connector:

    python -m hybridrl.agents.connectors.write_rows RUN.yaml OUT.jsonl [MAX_ROWS]

Calls the function `rows` of the module that `agent.function` names, with `agent.options`, in the
environment of `agent.python`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybridrl.agents.own_environment import OwnEnvironment
from hybridrl.config.load import load_config
from hybridrl.console import say
from hybridrl.errors import UserError

USAGE = "usage: python -m hybridrl.agents.connectors.write_rows RUN.yaml OUT.jsonl [MAX_ROWS]"
NO_ROWS = 3  # exit status
PROGRAM = f"""
import importlib, itertools, json, sys
module, options, most = json.load(sys.stdin)
connector = importlib.import_module(module)
if not hasattr(connector, "rows"):
    sys.exit({NO_ROWS})
found = connector.rows(**options)
out, sys.stdout = sys.stdout, sys.stderr  # what the environment prints is not a row
for row in itertools.islice(found, most):
    print(json.dumps(row), file=out, flush=True)
"""


def main(config_file: str, out: str, max_rows: int | None = None) -> int:
    """Writes the file and returns the number of rows. Raises UserError if the configuration names
    no function, its interpreter could not be started, or its module could not list its rows.
    """
    agent = load_config(config_file, []).agent
    if agent.function is None:
        allowed = "the function `play` of a connector"
        raise UserError("agent.function", None, allowed, "Set agent.function.")
    module = agent.function.partition(":")[0]
    environment = OwnEnvironment(agent.python or sys.executable)
    # Other processes can see arguments, and options may contain secrets.
    given = json.dumps([module, agent.options, max_rows])
    try:
        done = environment.run(["-c", PROGRAM], text=given)
    except OSError as error:
        got = f"{environment.python}, which could not be started ({error.strerror})"
        raise UserError(
            "agent.python", got, "a Python interpreter", "Correct agent.python."
        ) from None
    finally:
        environment.close()
    if done.returncode == NO_ROWS:
        allowed = "a connector whose module has a function `rows`"
        remedy = f"Write the rows of data yourself: {module} lists none."
        raise UserError("agent.function", agent.function, allowed, remedy)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        got = f"a value for which {module}:rows failed"
        raise UserError("agent.options", got, f"options of {module}:rows", lines[-1])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(done.stdout, encoding="utf-8")
    return done.stdout.count("\n")


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) not in (2, 3) or not all(number.isdecimal() for number in given[2:]):
        sys.exit(USAGE)
    try:
        most = int(given[2]) if len(given) == 3 else None
        say(f"{main(given[0], given[1], most)} rows")
    except UserError as error:
        sys.exit(str(error))
