"""Reward models that run on the training ranks. Their scores become parts of the reward.

Collective. A reward model is frozen, is split over the ranks of its role (by default like the
policy), and reads the policy's tokens. The score of a response is the value at its last token,
which may be the end token, unless config.json names another token (models/score_token.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hybridrl.config.placement import REWARD
from hybridrl.config.reward import SERVED
from hybridrl.config.schema import Config, ModelConfig, TrainConfig
from hybridrl.contracts.batch import Producer, RolloutBatch, ScoredBatch
from hybridrl.errors import UserError
from hybridrl.models.score_token import LAST, padding_token, score_notices, score_token
from hybridrl.parallel.mesh import Mesh, Meshes
from hybridrl.training.from_config import load_weights, model_source
from hybridrl.training.model import ModelSource, ParallelModel


@dataclass(frozen=True)
class RewardModel:
    """A frozen model with a value head; its score times `weight` is added to the reward."""

    name: str
    weight: float
    model: ParallelModel
    padding: int | None = None

    def __call__(self, batch: ScoredBatch) -> ScoredBatch:
        """Returns the batch with the scores added to the rewards and stored as a reward part."""
        producer = Producer.here(f"reward {self.name!r}")
        plan = self.model.plan(batch.to_train(producer))
        values_T = plan.column(self.model.forward_all(plan.inputs))
        score_B = batch.completed(values_T[_last_tokens(batch, self.padding)])
        reward_B = (batch.reward_B.double() + self.weight * score_B.double()).float()
        scored = batch.join_columns(producer, reward_B=reward_B)
        return replace(scored.with_parts({self.name: score_B}), producer=producer)


def _last_tokens(batch: RolloutBatch, padding: int | None) -> Tensor:
    """Returns each response's last position without padding, at least the first: (H,) int64."""
    last_H = batch.offsets[1:] - 1
    if padding is None:
        return last_H
    is_sampled_T, is_padding_T = batch.response_mask_T, batch.tokens_T == padding
    while True:  # one iteration per padding token; usually only one, the end token
        is_skipped_H = is_padding_T[last_H] & is_sampled_T[last_H - 1]
        if not bool(is_skipped_H.any()):
            return last_H
        last_H = last_H - is_skipped_H.long()


def served_model(
    name: str, weight: float, source: ModelSource, mesh: Mesh, train: TrainConfig
) -> RewardModel:
    """Builds a reward model without its weights. Raises ModelError if it names an unknown token."""
    token = score_token(source.hf_config)
    model = ParallelModel(mesh, source, "value", train)
    model.read_scores(token)
    padding = padding_token(source.hf_config) if token == LAST else None
    return RewardModel(name, weight, model, padding)


def make_reward_models(
    config: Config,
    meshes: Meshes,
    policy: ModelSource,
    models: dict[str, ParallelModel],
    served: Mapping[str, ModelConfig],
    needs_greedy: bool,
    notify: Callable[[str], None],
) -> Sequence[RewardModel]:
    """Builds the reward models and loads their weights. Raises UserError if a model's vocabulary
    differs from the policy's, or the algorithm needs greedy responses (`needs_greedy`).

    Args:
        models: Dict to which models are added by name, for the table in an out-of-memory error.
        served: Configuration section of each reward model, by the scorer's name.
    """
    reward_models = []
    for name, section in served.items():
        if needs_greedy:
            raise UserError(
                "reward.function",
                SERVED,
                f"another reward with algorithm {config.algorithm.name}, because reward models "
                f"cannot score its greedy baseline",
                "Set algorithm.name to grpo or rloo.",
            )
        mesh = meshes.of(REWARD + name)
        source = model_source(section, mesh.platform, policy.longest)
        _check_vocabulary(str(section.path), source.hf_config, policy.hf_config)
        for notice in score_notices(source.hf_config, str(section.path)):
            notify(f"reward {name}: {notice}")
        weight = config.reward.scorers()[name].weight
        scorer = served_model(name, weight, source, mesh, config.train)
        models[f"reward {name}"] = scorer.model
        with mesh.world.all_agree("loading the reward model"):
            load_weights(scorer.model, section)
        scorer.model.freeze()
        reward_models.append(scorer)
    return reward_models


def _check_vocabulary(path: str, own: Mapping[str, object], policy: Mapping[str, object]) -> None:
    if own["vocab_size"] != policy["vocab_size"]:
        raise UserError(
            "reward.options.path",
            f"{path}, with {own['vocab_size']} tokens",
            f"a reward model with the policy's {policy['vocab_size']} tokens",
            "Train one from a model in the policy's family (algorithm.name=reward_model).",
        )
