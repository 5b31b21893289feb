"""What several contract tests start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 60)
    yield Mesh(World(platform, 60), TrainLayout(1))
    stop_process_group()
