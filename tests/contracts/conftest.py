"""What several contract tests start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_cases import close_engines

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


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The world of one rank in which engines of several ranks start."""
    start_process_group(Platform.detect(), 60)
    yield
    stop_process_group()


@pytest.fixture
def closed_engines() -> Iterator[None]:
    """Closes what `make_engine` opened, so that each test starts its engines anew."""
    yield
    close_engines()
