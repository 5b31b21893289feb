"""Samples SGLang's rows with this package's function and each request's own random numbers.

SGLang's own sampler is not used, for three reasons. The sampler's log-probabilities ignore top-k
and top-p, so they do not match the distribution from which tokens are drawn. The sampler's
per-request seeds work only in SGLang's deterministic mode, which also changes attention kernels and
disables graphs. And the sampler applies top-p to the whole distribution instead of only to the
tokens that top-k keeps.

SGLang's batch tensors store each request's seed (`sampling_seed`) and whether the request is greedy
(`min_p` = 1; this package does not use `min_p` otherwise). SGLang filters and merges these tensors
when requests start and end.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from hybridrl.rollout.common.sampling import KEEPS_ALL, RowSampling, draw_rows, draw_seeds
from hybridrl.rollout.engine import SamplingParams
from hybridrl.rollout.sglang.penalties import TokenTable

IS_GREEDY = 1.0  # value of `min_p` that keeps only the most probable token


def request_sampling(sampling: SamplingParams, seed: int, num_tokens: int) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams as SglangSamplingParams

    is_greedy = sampling.temperature == 0
    params = SglangSamplingParams(
        max_new_tokens=sampling.max_new_tokens - num_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        # From a top-k of 1, SGLang infers that a batch needs no randomness.
        temperature=1.0 if is_greedy else sampling.temperature,
        top_k=1 if is_greedy else sampling.top_k or -1,
        top_p=1.0 if is_greedy else sampling.top_p,
        min_p=IS_GREEDY if is_greedy else 0.0,
        ignore_eos=False,  # with True, SGLang also ignores `stop_token_ids`
        sampling_seed=int(draw_seeds([seed], [0])[0] >> 1),  # fits into int64
    )
    params.normalize(None)
    return params


def keep_seeds() -> None:
    """Makes every SGLang batch contain the seeds of its requests."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch
    if hasattr(original, "without_seeds"):
        return

    def from_schedule_batch(batch: Any, vocab_size: int) -> Any:
        info = original(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        device = info.temperatures.device
        seed_B = torch.tensor(seeds, pin_memory=device.type == "cuda")
        info.sampling_seed = seed_B.to(device, non_blocking=True)
        return info

    from_schedule_batch.without_seeds = original  # type: ignore[attr-defined]
    SamplingBatchInfo.from_schedule_batch = staticmethod(from_schedule_batch)


class SeededSampler(torch.nn.Module):
    """Replaces the sampler of SGLang's model runner. While a batch's rows stay the same, SGLang
    passes the same tensors and never writes to them, so computed parameters are reused.
    """

    def __init__(self, token_table: TokenTable) -> None:
        super().__init__()
        self._token_table = token_table
        self._sources: tuple[Any, ...] = ()  # SGLang's tensors that `_rows` was computed from
        self._rows: RowSampling | None = None
        self._is_greedy_B: Tensor | None = None

    def _rows_of(self, info: Any) -> tuple[RowSampling, Tensor]:
        """Returns the sampling parameters of rows, and which rows have temperature 0, (B,)."""
        sources = (
            *(info.temperatures, info.top_ks, info.top_ps, info.min_ps, info.is_all_greedy),
            *(info.need_top_k_sampling, info.need_top_p_sampling, info.need_min_p_sampling),
        )
        is_same = len(self._sources) > 0 and all(map(operator.is_, sources, self._sources))
        if is_same and self._rows is not None and self._is_greedy_B is not None:
            return self._rows, self._is_greedy_B
        is_greedy_B, all_greedy = info.min_ps == IS_GREEDY, info.is_all_greedy
        takes_most_B = torch.ones_like(is_greedy_B) if all_greedy else is_greedy_B
        has_filter = info.need_top_k_sampling or info.need_top_p_sampling
        self._rows = RowSampling(
            info.temperatures[:, 0].contiguous(),
            info.top_ks.long().masked_fill(takes_most_B, KEEPS_ALL),
            info.top_ps.double().masked_fill(info.top_ps >= 1.0, 2.0),
            takes_most_B,
            are_all_greedy=all_greedy,
            is_any_greedy=info.need_min_p_sampling,
            has_filter=has_filter and not all_greedy,
        )
        self._sources, self._is_greedy_B = sources, is_greedy_B
        return self._rows, is_greedy_B

    @torch.no_grad()
    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
    ) -> Tensor:
        """Returns each row's next token, (B,), and stores log-probabilities in `logits_output`."""
        seed_B = sampling_info.sampling_seed
        logits_BV = self._token_table.penalized(logits_output.next_token_logits, positions)
        rows, is_greedy_B = self._rows_of(sampling_info)
        tokens_B, logp_B = draw_rows(logits_BV, rows, seed_B, positions.long())
        self._token_table.note(tokens_B)
        if rows.are_all_greedy:
            # With top-k 1 the log-probability is 0; multiplying by 0 keeps a NaN, assigning 0 would
            # not.
            logp_B = torch.where(is_greedy_B, logp_B, logp_B * 0.0)
        if return_logprob:
            logits_output.next_token_logprobs = logp_B
        return tokens_B.to(torch.int32)
