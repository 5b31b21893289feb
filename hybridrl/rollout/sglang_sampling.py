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

from typing import Any

import torch
from torch import Tensor

from hybridrl.rollout.engine import SamplingParams
from hybridrl.rollout.sampling import (
    KEEPS_ALL,
    RowSampling,
    draw_rows,
    draw_seeds,
)

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
    """Takes the place of the sampler of SGLang's model runner."""

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
        `logits_output`. The arguments are those of SGLang's sampler.

        Args:
            positions: (B,), of the last token of each row: with the seed the row's randomness.
        """
        logits_BV = logits_output.next_token_logits
        is_greedy_B = sampling_info.min_ps == IS_GREEDY
        all_greedy = sampling_info.is_all_greedy
        takes_most_B = torch.ones_like(is_greedy_B) if all_greedy else is_greedy_B
        has_filter = sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling
        rows = RowSampling(
            sampling_info.temperatures[:, 0],
            sampling_info.top_ks.long().masked_fill(takes_most_B, KEEPS_ALL),
            sampling_info.top_ps.double().masked_fill(sampling_info.top_ps >= 1.0, 2.0),
            takes_most_B,
            are_all_greedy=all_greedy,
            is_any_greedy=sampling_info.need_min_p_sampling,
            has_filter=has_filter and not all_greedy,
        )
        seed_B = sampling_info.sampling_seed
        tokens_B, logp_B = draw_rows(logits_BV, rows, seed_B, positions.long())
        if all_greedy:
            # Of a request with a top-k of 1 nothing is left to chance; a NaN stays one.
            logp_B = torch.where(is_greedy_B, logp_B, logp_B * 0.0)
        if return_logprob:
            logits_output.next_token_logprobs = logp_B
        return tokens_B.to(torch.int32)
