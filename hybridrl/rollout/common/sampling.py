"""Draws tokens with randomness that depends on the request and not on the batch.

Token number t of a request is drawn by inverting the cumulative distribution at a uniform number
that is a hash of (seed, t). The result does not depend on the other requests in the batch, on their
order, or on interruptions. No generator state exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.contracts.blobs import Array
from hybridrl.errors import UserError
from hybridrl.models.weight_bounds import exploded, explosion
from hybridrl.rollout.engine import SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
KEEPS_ALL = 1 << 30  # a top-k above any vocabulary


def draw_seeds(seeds: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each (seed, count).

    Evaluates the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014, figure 17) at position `count` of the stream that starts at the
    hashed seed. Because the seed is hashed, consecutive seeds yield unrelated streams.
    """
    start = _mix(np.asarray(seeds, dtype=np.uint64))
    return _mix(start + (np.asarray(counts, dtype=np.uint64) + np.uint64(1)) * GOLDEN)


def uniforms(seeds: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """Returns a uniform number in [0, 1), with 48 random bits, for each (seed, count)."""
    return (draw_seeds(seeds, counts) >> np.uint64(16)).astype(np.float64) * 2.0**-48


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of each row in a batch, on the device of its logits."""

    temperature_B: Tensor
    top_k_B: Tensor  # number of tokens to keep; the vocabulary size or more keeps all tokens
    top_p_B: Tensor  # probability that kept tokens must reach, float64; above 1 keeps all
    is_greedy_B: Tensor  # rows that take the most probable token, with temperature 1 and no filter
    are_all_greedy: bool
    is_any_greedy: bool
    has_filter: bool  # whether any row excludes tokens

    @staticmethod
    def of(sampling: Sequence[SamplingParams], device: torch.device) -> RowSampling:
        is_greedy = [row.temperature == 0 for row in sampling]
        filters = [row for row in sampling if row.temperature > 0]
        top_k = [row.top_k if row.top_k and row.temperature else KEEPS_ALL for row in sampling]
        top_p = [row.top_p if row.top_p < 1 and row.temperature else 2.0 for row in sampling]
        return RowSampling(
            torch.tensor([row.temperature or 1.0 for row in sampling], device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor(is_greedy, device=device),
            all(is_greedy),
            any(is_greedy),
            any(row.top_k or row.top_p < 1 for row in filters),
        )


def sample(
    logits_BV: Tensor, sampling: Sequence[SamplingParams], uniform_B: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Draws the next token of every row: tokens_B (int64), and their log-probabilities logp_B
    (float32) under the distribution after temperature, top-k and top-p; for temperature 0, the
    model's.
    """
    return sample_likely(logits_BV, sampling, uniform_B)[:2]


def sample_likely(
    logits_BV: Tensor, sampling: Sequence[SamplingParams], uniform_B: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor, list[tuple[Array, Array]]]:
    """Draws tokens as `sample` does; also returns each row's arrays for `record_likely`, or no
    arrays if no row records likely tokens.
    """
    rows = RowSampling.of(sampling, logits_BV.device)
    uniform = torch.from_numpy(uniform_B).to(logits_BV.device)
    tokens_B, logp_B, logp_BV = _sampled(logits_BV.float(), rows, uniform)
    num = min(max(row.num_likely for row in sampling), logits_BV.size(-1))
    if not num:
        return tokens_B, logp_B, []
    top = logp_BV.topk(num)
    tokens_BK = torch.cat((tokens_B[:, None], top.indices), 1).cpu().numpy()
    logps_BK = torch.cat((logp_B[:, None], top.values), 1).cpu().numpy()
    return tokens_B, logp_B, list(zip(tokens_BK, logps_BK, strict=True))


def sample_rows(logits_BV: Tensor, rows: RowSampling, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draws tokens as `sample` does, with uniform_B (float64, in [0, 1)), without synchronizing."""
    return _sampled(logits_BV.float(), rows, uniform_B)[:2]


def _sampled(
    logits_BV: Tensor, rows: RowSampling, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if rows.are_all_greedy:
        tokens_B, logp_BV = logits_BV.argmax(-1), logits_BV.log_softmax(-1)
    else:
        logp_BV = _log_distribution(logits_BV, rows)
        tokens_B = ops.invert_rows(logp_BV, uniform_B)
        if rows.is_any_greedy:
            tokens_B = torch.where(rows.is_greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, _gather(logp_BV, tokens_B), logp_BV


def draw_rows(
    logits_BV: Tensor, rows: RowSampling, seed_B: Tensor, count_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws each row's next token, with a random number determined by (seed, count), which are
    int64 interpreted as unsigned. A row without a filter does not depend on other rows' filters.
    """
    tokens_B, logp_B = ops.draw_rows(
        logits_BV, rows.temperature_B, rows.is_greedy_B, seed_B, count_B
    )
    if not rows.has_filter:
        return tokens_B, logp_B
    filtered = sample_rows(logits_BV, rows, ops.row_uniforms(seed_B, count_B))
    keeps_all_B = (rows.top_k_B >= logits_BV.size(-1)) & (rows.top_p_B > 1)
    return (
        torch.where(keeps_all_B, tokens_B, filtered[0]),
        torch.where(keeps_all_B, logp_B, filtered[1]),
    )


def log_distribution(logits_BV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Returns the log-probabilities from which tokens are drawn; for greedy rows, the model's."""
    return _log_distribution(logits_BV.float(), RowSampling.of(sampling, logits_BV.device))


def _log_distribution(logits_BV: Tensor, rows: RowSampling) -> Tensor:
    scaled_BV = logits_BV / rows.temperature_B[:, None]
    if rows.has_filter:
        scaled_BV = _filter(scaled_BV, rows)
    return scaled_BV.log_softmax(-1)


def _filter(scaled_BV: Tensor, rows: RowSampling) -> Tensor:
    """Sets logits that top-k or, after it, top-p excludes to -inf; leaves greedy rows unchanged."""
    vocab, device = scaled_BV.shape[-1], scaled_BV.device
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=device)
    sorted_BV = sorted_BV.masked_fill(rank_V >= rows.top_k_B[:, None], -torch.inf)
    prob_BV = sorted_BV.double().softmax(-1)
    before_BV = prob_BV.cumsum(-1) - prob_BV
    # `rank_V > 0` keeps the most probable token even if rounding makes the sum before it exceed 0.
    is_out_BV = (before_BV >= rows.top_p_B[:, None]) & (rank_V > 0)
    sorted_BV = sorted_BV.masked_fill(is_out_BV, -torch.inf)
    return torch.empty_like(scaled_BV).scatter_(-1, order_BV, sorted_BV)


def _gather(values_BV: Tensor, index_B: Tensor) -> Tensor:
    return values_BV.gather(-1, index_B[:, None])[:, 0]


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64, in which every input bit affects every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def no_logprob(
    engine: str, logp: float, request_id: int, version: int, tensors: Mapping[str, Tensor]
) -> Exception:
    """Returns the error for an invalid log-probability, usually NaN. If the weights are not finite
    or too large, it is a UserError that names training or the initial weights as the cause.
    """
    text = f"the {engine} engine computed log-probability {logp} for request {request_id} "
    text += f"(weights version {version})"
    found = exploded(tensors)
    if found is None:
        return RuntimeError(text)
    if version > 0:
        return explosion(found, f"step {version}", text)
    return UserError(
        "model",
        f"initial weights of which {found}: {text}",
        "weights with finite outputs",
        "Check the files of model.path or model.init.",
    )
