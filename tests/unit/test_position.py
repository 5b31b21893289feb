"""Where a run is in its data: in the middle of a step, at the step's beginning."""

from __future__ import annotations

from typing import Any

from hybridrl.loop.position import Position


class Cursor:
    def __init__(self) -> None:
        self.place = 0

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_a_step_under_way_is_taken_again_from_its_beginning() -> None:
    prompts, mix = Cursor(), Cursor()
    position = Position(prompts, mix)  # type: ignore[arg-type]
    prompts.place, mix.place = 4, 2
    position.begin_step()
    prompts.place, mix.place = 8, 3
    assert position.is_in_step
    assert position.state() == {"prompts": {"place": 4}, "mix": {"place": 2}}
    position.rewind()
    assert (prompts.place, mix.place) == (4, 2) and not position.is_in_step
    position.begin_step()
    prompts.place = 8
    position.end_step()
    assert position.state()["prompts"] == {"place": 8}
