"""Provides the likely tokens that an engine recorded (contracts/likely_tokens.py) as model inputs.

Sampling replay computes the softmax over these tokens only, because the engine could have drawn no
others (DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1: keep sampling mask). Score
centering needs their log-probabilities. The head (models/megatron/heads.py) reads the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.contracts.batch import BatchError, Producer, RolloutBatch
from hybridrl.contracts.likely_tokens import LIKELY_LOGPS, LIKELY_TOKENS
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor
from hybridrl.models.inputs import ExtraInputs

IS_SUPPORT = "likely_tokens.is_support"
"""Model input that is present if no other tokens could be drawn."""


class LikelyInputs(ExtraInputs):
    """Provides `likely_tokens`, (S, K) int64: the target, then other tokens, then -1.

    With `is_centered` also `likely_logps`, (S, K) fp32, with -inf in places of -1.

    Args:
        num_tokens: Size of the vocabulary.
        is_support: Whether no other tokens could be drawn, so that the softmax is over these.
        num_likely: Number of most probable tokens that the engine recorded. If the target is not
            among them, its log-probability is -inf too, unless `is_support`.
    """

    def __init__(
        self, num_tokens: int, is_support: bool, is_centered: bool, num_likely: int
    ) -> None:
        self._num_tokens, self._num_likely = num_tokens, num_likely
        self._is_support, self._is_centered = is_support, is_centered
        self.blobs = (LIKELY_TOKENS, LIKELY_LOGPS) if is_centered else (LIKELY_TOKENS,)
        self.needed_by = (
            "algorithm.sampling_replay=rollout" if is_support else "algorithm.score_centering=true"
        )

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns the likely tokens at the positions that predict; empty if the batch has none.

        Raises BatchError if the tokens do not fit the responses or the vocabulary.
        """
        packed = micro.model_inputs
        if LIKELY_TOKENS not in packed:
            return {}
        entries_N = packed[LIKELY_TOKENS].value.long()
        sample_N = torch.repeat_interleave(packed[f"{LIKELY_TOKENS}.num_rows"].value)
        first_R, place_R = (entries_N < 0).nonzero()[:, 0], micro.loss_mask_S.nonzero()[:, 0]
        found_R2 = torch.stack((sample_N[first_R], -1 - entries_N[first_R]), 1)
        # A position predicts the token after it.
        wanted_R2 = torch.stack(
            (micro.sequence_index_S[place_R], micro.positions_S[place_R] + 1), 1
        )
        if not torch.equal(found_R2, wanted_R2):
            other = _first_other(found_R2, wanted_R2)
            got = f"came with likely tokens for the (sample, token) {other}"
            raise _unfit(got, "likely tokens for each sampled token, and for no others")
        if len(entries_N) and int(entries_N.max()) >= self._num_tokens:
            got = f"came with likely token {int(entries_N.max())}"
            raise _unfit(got, f"tokens below {self._num_tokens}, the size of the vocabulary")
        num_R = first_R.diff(append=torch.tensor([len(entries_N)])) - 1
        column_N = torch.arange(len(entries_N)) - first_R.repeat_interleave(num_R + 1) - 1
        is_token_N, row_N = column_N >= 0, place_R.repeat_interleave(num_R + 1)
        where = row_N[is_token_N], column_N[is_token_N]
        size = micro.num_positions, max(int(num_R.max()) if len(num_R) else 0, 1)
        tokens_SK = torch.full(size, -1)
        tokens_SK[where] = entries_N[is_token_N]
        if not torch.equal(tokens_SK[place_R, 0], micro.targets_S[place_R]):
            raise _unfit("came with other drawn tokens", "the tokens of the responses")
        found = {LIKELY_TOKENS: ModelTensor(tokens_SK, is_per_position=True)}
        if self._is_support:
            found[IS_SUPPORT] = ModelTensor(True)
        if self._is_centered:
            logps_SK = torch.full(size, -torch.inf)
            logps_SK[where] = packed[LIKELY_LOGPS].value[is_token_N]
            if not self._is_support:
                is_outside_S = (tokens_SK >= 0).sum(1) > self._num_likely
                logps_SK[:, 0] = logps_SK[:, 0].masked_fill(is_outside_S, -torch.inf)
            found[LIKELY_LOGPS] = ModelTensor(logps_SK, is_per_position=True)
        return found


def _first_other(found_R2: Tensor, wanted_R2: Tensor) -> str:
    """Returns the first row that differs, or the lengths if one begins with the other."""
    num = min(len(found_R2), len(wanted_R2))
    other_N = (found_R2[:num] != wanted_R2[:num]).any(1).nonzero()[:, 0]
    if not len(other_N):
        return f"of {len(found_R2)} instead of {len(wanted_R2)} tokens"
    place = int(other_N[0])
    return f"{tuple(found_R2[place].tolist())} instead of {tuple(wanted_R2[place].tolist())}"


def _unfit(got: str, expected: str) -> BatchError:
    return BatchError(Producer.here("the micro-batch"), LIKELY_TOKENS, got, expected)
