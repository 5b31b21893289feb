"""An algorithm for tests: another one, whose loss is NaN where a prompt begins with a token."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import LossOutput
from hybridrl.config.load import load_config_dict
from hybridrl.contracts.batch import MicroBatch


class Poisoned:
    """Acts as the algorithm `of`, but the loss of micro-batches whose prompt has `token` is NaN."""

    def __new__(cls, token: int, of: dict[str, Any]) -> Any:
        minimal = {"run": {"name": "any"}, "model": {"init": "any"}, "algorithm": of}
        algorithm = make_algorithm(load_config_dict(minimal, []).algorithm)
        usual = type(algorithm)

        def loss(
            self: Any,
            logp_S: torch.Tensor,
            entropy_S: torch.Tensor,
            micro: MicroBatch,
            denominator: float,
        ) -> LossOutput:
            found = usual.loss(self, logp_S, entropy_S, micro, denominator)
            starts_S = (micro.positions_S == 0) & (micro.sequence_index_S >= 0)
            if bool((micro.tokens_S[starts_S] == token).any()):
                return LossOutput(found.loss * torch.nan, found.metrics)
            return found

        algorithm.__class__ = type("Poisoned", (usual,), {"loss": loss})
        return algorithm
