"""How SGLang's rows are sampled: by this package's function, with the randomness of each request.

SGLang's own sampler is not used, for three reasons. Its log-probabilities leave top-k and top-p
out, so they are not those of the distribution that was drawn from. Its seeds of requests work only
in its deterministic mode, which also exchanges attention kernels and turns graphs off. And it
applies top-p to the whole distribution, not to what top-k left.

A request's seed and whether it is greedy travel with SGLang's tensors of a batch, which it filters
and merges as requests come and go: as `sampling_seed`, and as `min_p` = 1, which no request of this
package asks for otherwise.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from hybridrl.rollout.common.sampling import (
    KEEPS_ALL,
    RowSampling,
    draw_rows,
    draw_seeds,
)
from hybridrl.rollout.engine import SamplingParams
from hybridrl.rollout.sglang.penalties import TokenTable

IS_GREEDY = 1.0  # of `min_p`: keep the most probable token


def request_sampling(sampling: SamplingParams, seed: int, num_tokens: int) -> Any:
    """Returns SGLang's sampling parameters of a request that has `num_tokens` tokens already."""
    from sglang.srt.sampling.sampling_params import SamplingParams as SglangSamplingParams

    is_greedy = sampling.temperature == 0
    params = SglangSamplingParams(
        max_new_tokens=sampling.max_new_tokens - num_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        # With a top-k of 1 SGLang knows that a batch needs no randomness at all.
        temperature=1.0 if is_greedy else sampling.temperature,
        top_k=1 if is_greedy else sampling.top_k or -1,
        top_p=1.0 if is_greedy else sampling.top_p,
        min_p=IS_GREEDY if is_greedy else 0.0,
        ignore_eos=False,  # or it would pass over `stop_token_ids` too
        sampling_seed=int(draw_seeds([seed], [0])[0] >> 1),  # int64
    )
    params.normalize(None)
    return params


def keep_seeds() -> None:
    """Makes every batch of SGLang carry the seeds of its requests."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    made = SamplingBatchInfo.from_schedule_batch
    if hasattr(made, "without_seeds"):
        return

    def from_schedule_batch(batch: Any, vocab_size: int) -> Any:
        info = made(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        device = info.temperatures.device
        seed_B = torch.tensor(seeds, pin_memory=device.type == "cuda")
        info.sampling_seed = seed_B.to(device, non_blocking=True)
        return info

    from_schedule_batch.without_seeds = made  # type: ignore[attr-defined]
    SamplingBatchInfo.from_schedule_batch = staticmethod(from_schedule_batch)


class SeededSampler(torch.nn.Module):
    """Takes the place of the sampler of SGLang's model runner.

    While the rows of a batch stay the same its tensors are SGLang's same ones, never written: what
    is made of them is made once.
    """

    def __init__(self, said: TokenTable) -> None:
        super().__init__()
        self._said = said
        self._of: tuple[Any, ...] = ()
        self._rows: RowSampling | None = None
        self._is_greedy_B: Tensor | None = None

    def _rows_of(self, info: Any) -> tuple[RowSampling, Tensor]:
        """Returns how rows are sampled, and which ask for the most probable token by temperature 0,
        (B,).
        """
        of = (
            *(info.temperatures, info.top_ks, info.top_ps, info.min_ps, info.is_all_greedy),
            *(info.need_top_k_sampling, info.need_top_p_sampling, info.need_min_p_sampling),
        )
        is_same = len(of) == len(self._of) and all(map(operator.is_, of, self._of))
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
        self._of, self._is_greedy_B = of, is_greedy_B
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
        """Returns the next token of each row, (B,), and leaves their log-probabilities in
        `logits_output`. `positions` are those of the last token of each row.
        """
        seed_B = sampling_info.sampling_seed
        logits_BV = self._said.penalized(logits_output.next_token_logits, positions)
        rows, is_greedy_B = self._rows_of(sampling_info)
        tokens_B, logp_B = draw_rows(logits_BV, rows, seed_B, positions.long())
        self._said.note(tokens_B)
        if rows.are_all_greedy:
            # Of a request with a top-k of 1 nothing is left to chance; a NaN stays one.
            logp_B = torch.where(is_greedy_B, logp_B, logp_B * 0.0)
        if return_logprob:
            logits_output.next_token_logprobs = logp_B
        return tokens_B.to(torch.int32)
