"""Which step is the last one, and what is due after a step."""

from __future__ import annotations

from hybridrl.errors import UserError


def last_step(num_steps: int | None, until: int | None, done: int, default: int) -> int:
    """Returns the step to train to; arguments as of `Trainer.fit`.

    Args:
        num_steps: how many more.
        until: the step itself.
        done: finished steps.
        default: where neither is given.

    Raises:
        UserError: both are given, or one is negative.
    """
    for name, value in (("num_steps", num_steps), ("until", until)):
        if value is not None and value < 0:
            raise UserError(f"fit({name}=...)", value, "a number from 0", "Change it.")
    if num_steps is not None and until is not None:
        both = f"num_steps={num_steps} and until={until}"
        raise UserError("fit", both, "one of them", "num_steps counts from here, until from 0.")
    if num_steps is not None:
        return done + num_steps
    return default if until is None else until


def is_due(every: int, step: int, last: int) -> bool:
    """Whether what happens after every `every` steps (0: never) and after the last is due now."""
    return step == last or (every > 0 and step % every == 0)
