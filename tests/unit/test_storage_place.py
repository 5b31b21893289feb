"""csrc/storage_place.cpp, compiled without CUDA: host addresses stand for the device's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "csrc" / "storage_place.cpp"
TORCH = Path(torch.__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_storage_lies_where_it_is_told_with_all_its_views(tmp_path: Path) -> None:
    library = tmp_path / "place.so"
    includes = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    links = [f"-L{TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *includes, str(SOURCE), *links]
    subprocess.run([*command, "-o", str(library)], check=True)
    torch.ops.load_library(str(library))
    place = torch.ops.hybridrl.place_storage

    memory = torch.full((64,), 7.0)
    whole = torch.ones(16)
    view = whole[4:8]
    place(whole, memory.data_ptr() + 64, 64)
    assert whole.tolist() == [7] * 16  # nothing is copied or cleared
    view.fill_(3)
    assert memory[20:24].tolist() == [3] * 4 and memory.sum() == 60 * 7 + 12
    place(whole, 0, 0)
    assert whole.untyped_storage().nbytes() == 0 and whole.data_ptr() == 0
    whole.untyped_storage().resize_(64)  # torch's own again, which it frees
    assert view.data_ptr() - whole.data_ptr() == 16
    with pytest.raises(RuntimeError, match="no bytes lie at address 0"):
        place(whole, 0, 64)
