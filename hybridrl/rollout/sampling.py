"""Drawing tokens with randomness that belongs to the request, not to the batch.

Token number t of a request is drawn by inverting the cumulative distribution at a uniform number
that is a hash of (seed, t). So it does not matter which requests share a batch, in which order they
came, or whether a request was interrupted in between; no generator state exists, global or own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridrl.errors import UserError
from hybridrl.models.exploded import exploded, explosion
from hybridrl.rollout.engine import SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_seeds(seeds: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Returns, for each (seed, count), 64 random bits.

    The output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014, figure 17) at position `count` of the stream that starts at the mixed
    seed; neighbouring seeds so give unrelated streams.
    """
    start = _mix(np.asarray(seeds, dtype=np.uint64))
    return _mix(start + (np.asarray(counts, dtype=np.uint64) + np.uint64(1)) * GOLDEN)


def uniforms(seeds: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """Returns, for each (seed, count), a uniform number in [0, 1) of 48 bits."""
    return (draw_seeds(seeds, counts) >> np.uint64(16)).astype(np.float64) * 2.0**-48


def sample(
    logits_BV: Tensor, sampling: Sequence[SamplingParams], uniform_B: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Draws the next token of every row.

    Args:
        logits_BV: of the next token, any float dtype; computed with in float32.
        sampling: how each row is sampled.
        uniform_B: the randomness of each row, in [0, 1).

    Returns:
        tokens_B int64, and logp_B float32: the log-probability under the distribution drawn from
        (after temperature, top-k and top-p; temperature 0: under the model's own).
    """
    logits_BV = logits_BV.float()
    is_greedy = [row.temperature == 0 for row in sampling]
    if all(is_greedy):
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, _gather(logits_BV.log_softmax(-1), tokens_B)
    device = logits_BV.device
    logp_BV = log_distribution(logits_BV, sampling)
    # float64: a float32 running sum over a large vocabulary is off by more than rare tokens weigh.
    cdf_BV = logp_BV.double().exp_().cumsum(-1)
    draw_B = torch.from_numpy(uniform_B).to(device) * cdf_BV[:, -1]
    # right=True finds the first entry above the draw, never a token of probability 0.
    tokens_B = torch.searchsorted(cdf_BV, draw_B[:, None], right=True)[:, 0]
    # Only a row of NaNs (refused by the caller, by its log-probability) runs past the end.
    tokens_B = tokens_B.clamp_(max=logits_BV.shape[-1] - 1)
    if any(is_greedy):
        greedy_B = torch.tensor(is_greedy, device=device)
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, _gather(logp_BV, tokens_B)


def log_distribution(logits_BV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Returns the log-probabilities that each row's token is drawn by; -inf for what is cut off.

    Args: as of `sample`; a greedy row gives the model's own distribution.
    """
    logits_BV = logits_BV.float()
    temperatures = [row.temperature or 1.0 for row in sampling]
    scaled_BV = logits_BV / torch.tensor(temperatures, device=logits_BV.device)[:, None]
    if any(row.top_k or row.top_p < 1 for row in sampling):
        scaled_BV = _filter(scaled_BV, sampling)
    return scaled_BV.log_softmax(-1)


def _filter(scaled_BV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Sets to -inf what top-k, then top-p over the rest, leave out; greedy rows stay whole."""
    vocab, device = scaled_BV.shape[-1], scaled_BV.device
    is_off = [row.temperature == 0 for row in sampling]
    top_k = [
        vocab if off or not row.top_k else row.top_k
        for off, row in zip(is_off, sampling, strict=True)
    ]
    # 2 keeps every token: no sum of probabilities reaches it, whatever its rounding.
    top_p = [
        2.0 if off or row.top_p == 1 else row.top_p
        for off, row in zip(is_off, sampling, strict=True)
    ]
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=device)
    sorted_BV = sorted_BV.masked_fill(
        rank_V >= torch.tensor(top_k, device=device)[:, None], -torch.inf
    )
    prob_BV = sorted_BV.double().softmax(-1)
    before_BV = prob_BV.cumsum(-1) - prob_BV
    limit_B = torch.tensor(top_p, dtype=torch.float64, device=device)
    # The most probable token always stays: the sum before it is 0 (but for rounding, hence rank).
    is_out_BV = (before_BV >= limit_B[:, None]) & (rank_V > 0)
    sorted_BV = sorted_BV.masked_fill(is_out_BV, -torch.inf)
    return torch.empty_like(scaled_BV).scatter_(-1, order_BV, sorted_BV)


def _gather(values_BV: Tensor, index_B: Tensor) -> Tensor:
    return values_BV.gather(-1, index_B[:, None])[:, 0]


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: every input bit moves every output bit; arrays wrap silently."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def no_logprob(
    engine: str, logp: float, request_id: int, version: int, tensors: Mapping[str, Tensor]
) -> Exception:
    """Returns the error of an engine that computed a log-probability which is none, NaN most often.

    Args:
        engine: its name.
        logp: what it computed.
        request_id: for which request.
        version: of the weights, the number of steps that they were trained for.
        tensors: the engine's weights, of which some may have exploded; then it is a UserError.
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
        f"first weights of which {found}: {text}",
        "weights that a model can compute with",
        "Look at the files that model.path or model.init names.",
    )
