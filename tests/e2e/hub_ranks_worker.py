"""One rank as torchrun starts it: what it learns of hub names, before there is a process group.

hub_ranks_worker.py FOLDER URL CONFIG KEY=VALUE ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fake_hub import settings

from hybridrl.config.load import load_config
from hybridrl.errors import UserError
from hybridrl.services.launch.pinning import with_commits


def main() -> None:
    folder, url, config, *knobs = sys.argv[1:]
    for owner, name, value in settings(url, Path(folder, "other_cache")):
        setattr(owner, name, value)
    said = [str(with_commits(load_config(config, knobs)).model.path)]
    try:
        with_commits(load_config(config, [*knobs, "model.path=org/tiny@v9"]))
    except UserError as error:
        said.append(str(error))
    (Path(folder) / f"rank_{os.environ['RANK']}").write_text("\n".join(said))


main()
