"""OpenEnv server of a guessing game, for the example openenv.yaml: the argument is the port."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MAX_GUESSES = 3


class Guess(Action):
    number: str


class Answer(Observation):
    text: str


class Game(Environment):
    """Hides a number from 0 to 9. The right guess earns 1, each other guess costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._hidden = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Answer:
        self._state, self._hidden = State(), random.Random(seed).randrange(10)
        return Answer(text="Guess my number, from 0 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Answer:
        self._state.step_count += 1
        is_right = action.number.strip() == str(self._hidden)
        is_over = is_right or self._state.step_count == MAX_GUESSES
        text = "That is right." if is_right else "That is wrong."
        return Answer(text=text, reward=1.0 if is_right else -0.1, done=is_over)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
