"""Entry point of a stage's process: answers calls, both as JSON. Does not import torch."""

from __future__ import annotations

from hybridrl.environments.base import encoded
from hybridrl.environments.stage import EnvironmentRunner
from hybridrl.environments.table import find_environment
from hybridrl.rewards.worker import serve

if __name__ == "__main__":
    serve(lambda config: EnvironmentRunner(find_environment(config)), encoded)
