"""OpenEnv server of a calculator, for the example openenv_learns.yaml: the argument is the port."""

import random
import re
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    text: str


class Shown(Observation):
    text: str


class Calculator(Environment):
    """Asks for a product. The action [46*92] is answered with (4232); any other action is the
    answer, and the right one earns 1.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._product = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:
        draws = random.Random(seed)
        left, right = draws.randrange(10, 100), draws.randrange(10, 100)
        self._state, self._product = State(), left * right
        return Shown(text=f"{left}*{right}=")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Shown:
        self._state.step_count += 1
        call = re.fullmatch(r"\[(\d+)\*(\d+)\]", action.text)
        if call is not None and self._state.step_count == 1:
            return Shown(text=f"({int(call[1]) * int(call[2])})", reward=0.0)
        is_right = action.text == str(self._product)
        return Shown(text="", reward=float(is_right), done=True)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Calculator, Said, Shown, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
