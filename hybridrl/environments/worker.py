"""Process of a stage: reads calls and writes the environments' answers as JSON. No torch."""

from __future__ import annotations

from hybridrl.environments.base import encoded
from hybridrl.environments.stage import Stage
from hybridrl.environments.table import find_environment
from hybridrl.rewards.worker import serve

if __name__ == "__main__":
    serve(lambda config: Stage(find_environment(config)), encoded)
