"""Reward models that run on the training ranks; their scores become parts of the reward.

Collective; every rank gets the same batch. A reward model is frozen, split over the ranks of its
role (by default as the policy is), and reads the policy's own tokens. The score of a response is
its value at the last token, the end token included, unless config.json names another token
(models/score_token.py).
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
    """A model that scores responses for the reward's sum.

    Args:
        name: Name in metrics.
        weight: Factor of its score in the sum.
        model: Frozen model with a value head.
        padding: Token that is skipped at the end of a response; None if there is none.
    """

    name: str
    weight: float
    model: ParallelModel
    padding: int | None = None

    def __call__(self, batch: ScoredBatch) -> ScoredBatch:
        """Returns the batch with the score added to its rewards and stored as a part."""
        producer = Producer.here(f"reward {self.name!r}")
        plan = self.model.plan(batch.to_train(producer))
        values_T = plan.column(self.model.forward_all(plan.inputs))
        score_B = batch.completed(values_T[_last_tokens(batch, self.padding)])
        reward_B = (batch.reward_B.double() + self.weight * score_B.double()).float()
        scored = batch.join_columns(producer, reward_B=reward_B)
        return replace(scored.with_parts({self.name: score_B}), producer=producer)


def _last_tokens(batch: RolloutBatch, padding: int | None) -> Tensor:
    """Returns the position of each response's last token that is not padding: (H,) int64. If all
    are padding, returns its first sampled token.
    """
    last_H = batch.offsets[1:] - 1
    if padding is None:
        return last_H
    is_sampled_T, is_padding_T = batch.response_mask_T, batch.tokens_T == padding
    while True:  # repeats for the longest run of padding; end tokens occur once
        is_skipped_H = is_padding_T[last_H] & is_sampled_T[last_H - 1]
        if not bool(is_skipped_H.any()):
            return last_H
        last_H = last_H - is_skipped_H.long()


def served_model(
    name: str, weight: float, source: ModelSource, mesh: Mesh, train: TrainConfig
) -> RewardModel:
    """Builds a reward model without loading its weights.

    Raises:
        ModelError: config.json names an unknown token.
    """
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
    """Builds the reward models and loads their weights.

    Args:
        policy: Source of the policy, whose tokens they read.
        models: Dict that receives each model by name, for the table of an out-of-memory error.
        served: Sections of the models, by the names of their scorers.
        needs_greedy: Whether the algorithm compares samples with greedy responses, which no model
            scores.

    Raises:
        UserError: A model has another vocabulary than the policy, or the algorithm needs greedy
            responses.
    """
    reward_models = []
    for name, section in served.items():
        if needs_greedy:
            raise UserError(
                "reward.function",
                SERVED,
                f"another reward with algorithm {config.algorithm.name}, whose greedy baseline no "
                "reward model scores",
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
            "Train one from a model of the policy's family (algorithm.name=reward_model).",
        )
