"""Agents that use other projects' environments, tools and task folders.

Each module has an async function `play`, which `agent.function` names. It runs in a worker process,
in the Python environment that `agent.python` names, so its packages never meet those of the run.
These modules may import hybridrl.agents.tasks, the standard library and the packages that they
connect to, and nothing else. A function `rows` with the same options yields the rows of data for
`play` (write_rows.py writes them to a file).
"""
