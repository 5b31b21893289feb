"""The two phases of a run: its engine generates with the policy's weights, or gives its memory to
training. Owns the change between them and the check of the engine, no weights.

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
from hybridrl.roles.policy import Policy
from hybridrl.rollout.registry import ENGINES


class EnginePhases:
    """Changes between training and rollout.

    Args:
        config: of the run.
        hybrid_engine: brings the weights.
        sampler: generates.
        policy: whose weights the engine gets.
        journal: takes the time.

    Attributes:
        is_checked: whether the engine was found to compute what the trainer does.
    """

    def __init__(
        self,
        config: Config,
        hybrid_engine: HybridEngine,
        sampler: Sampler,
        policy: Policy,
        journal: Journal,
    ) -> None:
        self._config, self._hybrid_engine, self._sampler = config, hybrid_engine, sampler
        self._policy, self._journal = policy, journal
        self.is_checked = False
        hybrid_engine.before_change = journal.note_peak

    @property
    def is_rollout(self) -> bool:
        """Whether the rollout phase is the current one."""
        return self._hybrid_engine.phases.phase is Phase.ROLLOUT

    def reshard(self, step: int, verifies: bool = False) -> dict[str, float]:
        """Brings the policy's weights into the engine; returns the bytes and the rate.

        Args:
            step: finished steps, the version of the weights.
            verifies: compares each parameter with its source.
        """
        # Files may have been written or read.
        self._sampler.world.arrive("the work before the reshard")
        with self._journal.timer.phase("reshard"):
            return self._hybrid_engine.to_rollout(step, verifies).metrics()

    def check(self, step: int, memory_table: Callable[[], str]) -> None:
        """Brings the weights into the engine and proves that it computes what the trainer does.

        Args:
            step: as of `reshard`.
            memory_table: returns what the device holds, to be told.

        Raises:
            VerifyError, EngineDiffersError: naming the parameter, or the replica that differs.
        """
        self.enter_training()
        self.reshard(step, verifies=True)
        self.is_checked = True
        if ENGINES[self._config.rollout.engine].computes:
            longest = self._config.data.max_prompt_tokens
            said = probe.check(self._sampler, self._policy, longest, self.enter_training)
            self._journal.notify(said)
            self._journal.notify(memory_table())
            self.reshard(step)

    def enter_training(self, frees_memory: bool = False) -> None:
        """Ends the rollout phase, if it is the current one; the engine has nothing to generate."""
        if self.is_rollout:
            self._hybrid_engine.to_train(frees_memory)
        elif frees_memory:
            self._hybrid_engine.free_engine()

    def enter_rollout(self, step: int) -> None:
        """Begins the rollout phase with the policy's weights, if it is not the current one."""
        if self._hybrid_engine.phases.phase is Phase.TRAIN:
            self.reshard(step)
