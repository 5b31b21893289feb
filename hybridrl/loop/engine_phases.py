"""Changes between the two phases of a run: its engine generates with the policy's weights, or gives
its memory to training.

Who waits for whom: all functions are collective over the world.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.config.schema import Config
from hybridrl.generation.sampler import Sampler
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.memory.phases import Phase
from hybridrl.loop import probe
from hybridrl.loop.journal import Journal
from hybridrl.loop.position import Position
from hybridrl.roles.policy import Policy
from hybridrl.rollout.registry import ENGINES


class EnginePhases:
    """Changes between training and rollout.

    Attributes:
        is_checked: Whether the engine was found to compute what the trainer does.
    """

    def __init__(
        self,
        *,
        config: Config,
        hybrid_engine: HybridEngine,
        sampler: Sampler,
        policy: Policy,
        position: Position,
        journal: Journal,
    ) -> None:
        self._config, self._hybrid_engine, self._sampler = config, hybrid_engine, sampler
        self._policy, self._position, self._journal = policy, position, journal
        self.is_checked = False
        hybrid_engine.before_change = journal.note_peak

    @property
    def is_rollout(self) -> bool:
        """Whether the rollout phase is the current one."""
        return self._hybrid_engine.phases.phase is Phase.ROLLOUT

    def reshard(self, verifies: bool = False) -> dict[str, float]:
        """Brings the policy's weights into the engine; returns the bytes and the rate.

        Args:
            verifies: Whether to compare each parameter with its source.
        """
        # Files may have been written or read.
        self._sampler.world.arrive("the work before the reshard")
        with self._journal.phase("reshard"):
            return self._hybrid_engine.to_rollout(self._position.step, verifies).metrics()

    def check(self, memory_table: Callable[[], str]) -> None:
        """Brings the weights into the engine and proves that it computes what the trainer does.

        Args:
            memory_table: Returns what the device holds, to be printed.

        Raises:
            VerifyError, EngineDiffersError: Naming the parameter, or the replica that differs.
        """
        self.enter_training()
        self.reshard(verifies=True)
        self.is_checked = True
        if ENGINES[self._config.rollout.engine].computes:
            longest = self._config.data.max_prompt_tokens
            said = probe.check(self._sampler, self._policy, longest, self.enter_training)
            self._journal.notify(said)
            self._journal.notify(memory_table())
            self.reshard()

    def enter_training(self, frees_memory: bool = False) -> None:
        """Ends the rollout phase, if it is the current one; the engine has nothing to generate."""
        if self.is_rollout:
            self._hybrid_engine.to_train(frees_memory)
        elif frees_memory:
            self._hybrid_engine.free_engine()

    def enter_rollout(self) -> None:
        """Begins the rollout phase with the policy's weights, if it is not the current one."""
        if self._hybrid_engine.phases.phase is Phase.TRAIN:
            self.reshard()

    def send_frozen_again(self) -> None:
        """Has the next reshard bring frozen weights too, since they are others now."""
        self._hybrid_engine.send_frozen_again()
