"""Base class of engines: stores requests, finished responses and the weight version. No torch.

A subclass advances the requests in `_rows` in its `step` and passes each completion to `_finish`.
Invariant: a request is in `_rows` until its completion is in `_finished`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from hybridrl.rollout.engine import Completion, Holding, Request, RunningRequest, TokenTexts


class QueuedEngine:
    """Implements `RolloutEngine` except `step`, and `WeightTarget` except its tensors."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._rows: dict[int, RunningRequest] = {}  # unfinished requests in order of arrival
        self._finished: list[Completion] = []
        self._version, self._is_updating = -1, True
        self.token_texts: TokenTexts | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def has_unfinished(self) -> bool:
        return bool(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        rows: dict[int, RunningRequest] = {}
        for request in requests:
            number = request.request_id
            if number in self._rows or number in rows:
                raise ValueError(f"request id {number} is already in use")
            rows[number] = RunningRequest(request, self.token_texts)
        self._rows |= rows

    def collect(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        return [row.to_request() for row in self._rows.values()]

    def clear(self) -> None:
        self._rows.clear()
        self._finished.clear()

    def memory(self) -> Mapping[str, Holding]:
        return {}

    def close(self) -> None:
        """Does nothing by default."""

    def begin_update(self) -> None:
        self._is_updating = True

    def sleep(self, keeps_memory: bool = False) -> None:
        self.begin_update()

    def finish_update(self, version: int) -> None:
        self._version, self._is_updating = version, False

    def _check_weights(self) -> None:
        """Raises RuntimeError unless a weight update has finished and none is in progress."""
        if self._is_updating:
            raise RuntimeError(
                f"the {self.name} engine has no complete weights: call finish_update() first"
            )

    def _finish(self, completion: Completion) -> None:
        del self._rows[completion.request_id]
        self._finished.append(completion)
