"""From sampled tokens to rewards: decodes responses, calls the reward function, checks what it
returns.

Owns the border with users' code: whatever a reward function does wrong becomes a BatchError that
names the function, its file and line, and the sample. Runs in the calling process and thread; a
function that hangs hangs the step. Every rank scores the samples it is given; making one rank's
error known to the others is the caller's business.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from hybridrl.batch import BatchError, Producer, RolloutBatch, ScoredBatch
from hybridrl.config.schema import RewardConfig
from hybridrl.errors import UserError
from hybridrl.rewards.functions import RewardFunction, find_reward


class TextDecoder(Protocol):
    """What is used of a tokenizer here; any transformers tokenizer fits."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of these tokens."""
        ...


class Scorer:
    """Scores batches with one reward function.

    Args:
        config: names the function.
        tokenizer: decodes responses; special tokens are left out of the text.
        function: a function to use instead (from Python), called as functions.py says.

    Raises:
        UserError: `config` names no function.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: TextDecoder,
        function: RewardFunction | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._function = function if function is not None else find_reward(config)
        self.name = config.function if function is None else _name_of(function)
        self._producer = Producer.of(self._function, f"reward {self.name!r}")

    def responses(self, batch: RolloutBatch) -> list[str]:
        """Returns the text of each sample's response, without special tokens."""
        tokens = batch.tokens_T[batch.response_mask_T].split(batch.response_lengths_B.tolist())
        return [self._tokenizer.decode(t.tolist(), skip_special_tokens=True) for t in tokens]

    def score(self, batch: RolloutBatch) -> ScoredBatch:
        """Returns the batch with its rewards; the one part is named after the function.

        Raises:
            BatchError: the function raised, or returned something other than finite floats.
        """
        prompts = [prompt.text for prompt in batch.prompts]
        responses = self.responses(batch)
        columns = [prompt.columns for prompt in batch.prompts]
        # A reward function that is a plain callable need not have the attribute.
        if getattr(self._function, "batched", False):
            returned = self._call("the batch", prompts, responses, columns)
            reward_B = self._floats(returned, batch.num_samples)
        else:
            rewards = []
            for i, arguments in enumerate(zip(prompts, responses, columns, strict=True)):
                sample = f"sample {int(batch.sample_ids_B[i])}"
                rewards.append(self._float(self._call(sample, *arguments), sample))
            reward_B = torch.tensor(rewards, dtype=torch.float32)
        return batch.scored(reward_B, {self.name: reward_B}, self._producer)

    def _call(self, where: str, *arguments: object) -> Any:
        try:
            return self._function(*arguments)
        except UserError:
            raise  # already says what is wrong
        except Exception as error:  # any error of the user's own code
            got = f"raised {type(error).__name__}{_line_of(error)} on {where}: {error}"
            raise BatchError(self._producer, "reward_B", got, "a finite float a sample") from error

    def _float(self, value: Any, where: str) -> float:
        """Returns one reward as a float, or says what is wrong with it."""
        shape = np.shape(value) if hasattr(value, "shape") else ()
        if shape or not isinstance(value.item() if hasattr(value, "item") else value, Real):
            got = f"shape {tuple(shape)}" if shape else f"a {type(value).__name__}"
            raise BatchError(
                self._producer, "reward_B", f"returned {got} for {where}", "a finite float"
            )
        if not np.isfinite(reward := float(value)):
            got = f"returned {reward} for {where}"
            raise BatchError(self._producer, "reward_B", got, "a finite float")
        return reward

    def _floats(self, value: Any, num_samples: int) -> torch.Tensor:
        """Returns a batch's rewards as a tensor; what remains wrong with it `scored` says."""
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", torch.float32)
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            raise self._not_floats(f"a {type(value).__name__}", num_samples)
        try:
            found = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise self._not_floats(f"rows of several shapes ({error})", num_samples) from error
        if found.dtype.kind not in "fiub":
            raise self._not_floats(f"a {type(value).__name__} of {found.dtype}", num_samples)
        return torch.from_numpy(found.astype(np.float32))

    def _not_floats(self, got: str, num_samples: int) -> BatchError:
        return BatchError(self._producer, "reward_B", f"returned {got}", f"({num_samples},) floats")


def _name_of(function: RewardFunction) -> str:
    named = function if hasattr(function, "__name__") else type(function)
    return str(named.__name__)


def _line_of(error: Exception) -> str:
    """Where the user's code raised: the innermost line, unless the call itself did not fit."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
