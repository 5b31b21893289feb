"""A reward model served in the same world: its scores become a part of the reward.

The model is cut over the ranks of its role, by default as the policy is, frozen, and sees the
policy's own tokens. The score of a response is as in training (algorithms/reward_model.py): the
value of the state that its last token was sampled from. Collective; every rank gets the same batch
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.config.placement import REWARD
from hybridrl.config.reward import SERVED
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.contracts.batch import Producer, ScoredBatch
from hybridrl.errors import UserError
from hybridrl.parallel.mesh import Meshes
from hybridrl.training.build import load_weights, model_source
from hybridrl.training.model import ModelSource, ParallelModel


@dataclass(frozen=True)
class RewardModel:
    """A scorer of the reward's sum that is a model.

    Args:
        name: in metrics.
        weight: of its score.
        model: with a value head, frozen.
    """

    name: str
    weight: float
    model: ParallelModel

    def __call__(self, batch: ScoredBatch) -> ScoredBatch:
        """Returns the batch with the score added to its rewards and among their parts."""
        producer = Producer.here(f"reward {self.name!r}")
        plan = self.model.plan(batch.to_train(producer))
        values_T = plan.column(self.model.forward_all(plan.inputs))
        score_B = batch.completed(values_T[batch.offsets[1:] - 1])
        reward_B = (batch.reward_B.double() + self.weight * score_B.double()).float()
        scored = batch.join_columns(producer, reward_B=reward_B)
        return replace(scored.with_parts({self.name: score_B}), producer=producer)


def make_reward_models(
    config: Config,
    meshes: Meshes,
    policy: ModelSource,
    models: dict[str, ParallelModel],
    served: Mapping[str, ModelConfig],
    needs_greedy: bool,
) -> Sequence[RewardModel]:
    """Builds the reward models.

    Args:
        meshes: that they are cut over, by role.
        policy: whose tokens they are to read.
        models: gets each by name, for the table of an out-of-memory error.
        served: which models they are, by the names of their scorers.
        needs_greedy: whether greedy responses, which no model scores, are compared with.

    Raises:
        UserError: one has another vocabulary, or the algorithm's baseline would lack its score.
    """
    reward_models = []
    for name, section in served.items():
        if needs_greedy:
            raise UserError(
                "reward.function",
                SERVED,
                f"another with algorithm {config.algorithm.name}, whose baseline lacks its score",
                "Use grpo or rloo.",
            )
        mesh = meshes.of(REWARD + name)
        source = model_source(section, mesh.platform, policy.longest)
        _check_vocabulary(str(section.path), source.hf_config, policy.hf_config)
        models[f"reward {name}"] = model = ParallelModel(mesh, source, "value", config.train)
        with mesh.world.all_agree("loading the reward model"):
            load_weights(model, section)
        model.freeze()
        reward_models.append(RewardModel(name, config.reward.scorers()[name].weight, model))
    return reward_models


def _check_vocabulary(path: str, own: Mapping[str, object], policy: Mapping[str, object]) -> None:
    if own["vocab_size"] != policy["vocab_size"]:
        raise UserError(
            "reward.options.path",
            f"{path}, with {own['vocab_size']} tokens",
            f"a reward model with the policy's {policy['vocab_size']} tokens, which it reads",
            "Train one from a model of the policy's family (algorithm.name=reward_model).",
        )
