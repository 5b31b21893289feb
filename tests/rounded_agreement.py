"""Compares an engine that computes in bfloat16 with transformers, by transformers' own rounding.

The measure is the distance of log-probabilities from those of a float32 model with the same
weights. An engine may be as far from them as transformers itself is in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridrl.rollout.engine import Completion, Request

# Of root mean squares over some hundred tokens; measured 0.8 to 1.2 with gated delta nets. Of
# medians with experts, because a rounding makes a router choose other experts for a few tokens.
LARGEST_RATIO = 1.5
# Of 192 greedy tokens, 184 to 188 were the most probable ones in float32.
LEAST_GREEDY = 0.9


def check_rounded(
    rounded: Any,
    asked: Sequence[Request],
    done: Sequence[Completion],
    images_of: Callable[[Request, int], Mapping[str, Any]] = lambda *_: {},
) -> float:
    """Checks greedy completions against a bfloat16 model; returns the ratio of distances.

    Args:
        images_of: Function that returns the model's inputs for a request's images, given the number
            of all tokens.
    """
    exact = copy.deepcopy(rounded).float()
    ours, theirs, greedy = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for request, completion in zip(asked, done, strict=True):
        tokens = torch.tensor(completion.tokens)
        whole = torch.tensor([request.prompt + completion.tokens])
        given = {"input_ids": whole, **images_of(request, whole.shape[1])}
        start = len(request.prompt)
        wide, narrow = (_logps(one, given)[start - 1 : -1] for one in (exact, rounded))
        expected = wide.gather(1, tokens[:, None])[:, 0]
        ours.append(torch.tensor(completion.logps) - expected)
        theirs.append(narrow.gather(1, tokens[:, None])[:, 0] - expected)
        greedy.append(wide.argmax(-1) == tokens)
    is_mixture = hasattr(rounded.config.get_text_config(), "num_experts")
    sizes = [torch.cat(one).abs() for one in (ours, theirs)]
    own, other = (one.median() if is_mixture else one.square().mean().sqrt() for one in sizes)
    ratio = float(own / other)
    share = float(torch.cat(greedy).float().mean())
    assert ratio < LARGEST_RATIO and share > LEAST_GREEDY, (ratio, share)
    return ratio


def _logps(model: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(**given).logits[0]
    return logits.float().log_softmax(-1)
