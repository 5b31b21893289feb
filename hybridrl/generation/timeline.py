"""What ranks that train and ranks that generate do in a step of a run with a lag. Pure, no torch.

A step's number is the version of the weights that it trains. Of each side `turns` is the order of
its actions; where sides are the same ranks it is both. `TRANSFERS` are done by both sides together,
in the same order on each: nothing else passes between them, so neither can wait for the other in an
action of its own.

    generates ahead                               | shared ranks
    rollout ranks         training ranks          |
    generate      v=n     -                       | generate v=n
    samples  <------------> samples               | samples
    generate_ahead v=n    train v=n               | train v=n
    weights  <------------> weights v=n+1         | weights v=n+1

`generate` ends with the samples of step n complete, `generate_ahead` when few samples are
unfinished; both count steps of the engines and samples, no seconds. Where an algorithm replaces
samples, `generate` and `samples` come again before `train`, in rounds that all ranks count alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

NUM_KEPT = 1000  # turns that a rank remembers
Side = Literal["rollout", "training", "both"]
Action = Literal["generate", "samples", "generate_ahead", "train", "weights"]
TRANSFERS: tuple[Action, ...] = ("samples", "weights")


class Turn(NamedTuple):
    """An action of a step.

    Args:
        step: from 0 on.
        action: that is taken.
        version: of the weights that it uses, or brings.
    """

    step: int
    action: Action
    version: int


def turns(step: int, side: Side) -> tuple[Turn, ...]:
    """Returns what the ranks of a side do in a step, in order.

    Args:
        step: from 0 on.
        side: of the ranks; both: engines and training share ranks.
    """
    actions: dict[Side, tuple[Action, ...]] = {
        "rollout": ("generate", "samples", "generate_ahead", "weights"),
        "training": ("samples", "train", "weights"),
        "both": ("generate", "samples", "train", "weights"),
    }
    return tuple(Turn(step, one, step + (one == "weights")) for one in actions[side])


class Timeline:
    """Follows the turns of this rank, and refuses another order or version.

    Args:
        side: of the rank.

    Attributes:
        taken: the last turns.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self.taken: deque[Turn] = deque(maxlen=NUM_KEPT)
        self._coming: Iterator[Turn] = iter(())

    def begin(self, step: int) -> None:
        """Begins a step, a first time or again."""
        self._coming = iter(turns(step, self.side))

    def begin_round(self, step: int) -> None:
        """Begins a further round of generation for a step whose samples were transferred.

        Raises:
            RuntimeError: another action came between.
        """
        if not self.taken or self.taken[-1] != (step, "samples", step):
            last = self.taken[-1] if self.taken else None
            raise RuntimeError(f"a further round of step {step} after {last}, not its samples")
        self.begin(step)

    def take(self, action: Action, version: int) -> None:
        """Notes an action, if it is one of this side.

        Raises:
            RuntimeError: it is not the next one, or is of other weights.
        """
        if action not in {one.action for one in turns(0, self.side)}:
            return
        due = next(self._coming, None)
        if due is None or (due.action, due.version) != (action, version):
            raise RuntimeError(f"{action} with version {version} where the schedule has {due}")
        self.taken.append(due)
