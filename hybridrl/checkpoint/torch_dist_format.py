"""Saves and loads Megatron's checkpoint format `torch_dist`, including the files without tensors.

Plain values are stored in `common.pt` and the format's names in `metadata.json`, as Megatron-Core
0.16.1 writes them and all later versions read them; `dist_checkpointing.save` of 0.19 pickles plain
values into the files of the tensors. This module calls the functions of which `save` and `load`
consist in all versions, so that every version writes the same files. Collective over the world.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)

FORMAT_FILE, COMMON_FILE = (
    "metadata.json",
    "common.pt",
)  # files that each sharded part has and every rank reads
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def save(
    state: ShardedStateDict,
    save_tensors: Callable[[ShardedStateDict], None],
    compares_plain_values: bool = True,
) -> dict[str, bytes]:
    """Saves a state; `save_tensors` writes its sharded tensors. Returns the content of the files
    that rank 0 still has to write, by name. Raises CheckpointingException if parts of a tensor
    overlap or are missing.
    """

    def compared(values: StateDict) -> StateDict:
        return values if compares_plain_values else {}

    sharded, plain = save_preprocess(state, True, compared)
    save_tensors(sharded)
    torch.distributed.barrier()
    if torch.distributed.get_rank() != 0:
        return {}
    common = io.BytesIO()
    torch.save(plain, common)
    return {COMMON_FILE: common.getvalue(), FORMAT_FILE: json.dumps(FORMAT).encode()}


def load(
    state: ShardedStateDict,
    plain: StateDict,
    load_tensors: Callable[[ShardedStateDict], StateDict],
) -> StateDict:
    """Returns plain values (of `common.pt`, modified) and tensors under their names in a state;
    `load_tensors` loads the latter. Raises CheckpointingException if parts of a tensor overlap or
    are missing.
    """
    force_all_tensors_to_non_fp8(state)
    sharded, own, factories = load_preprocess(state)
    merge(plain, own)
    sharded, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(plain, load_tensors(sharded))
    loaded: StateDict = apply_factory_merges(plain, factories)
    return loaded
