"""A reward model served in the same world: its scores become a part of the reward.

The model is cut over the ranks of its role, by default as the policy is, frozen, and sees the
policy's own tokens. Its score of a response is read at the last token, end token included, or where
its config.json says otherwise (models/score_token.py). Collective; every rank gets the same batch
back.
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
    """A scorer of the reward's sum that is a model.

    Args:
        name: Name in metrics.
        weight: Factor of its score in the sum.
        model: Frozen model with a value head.
        padding: Token that is passed over at the end of a response; None if there is none.
    """

    name: str
    weight: float
    model: ParallelModel
    padding: int | None = None

    def __call__(self, batch: ScoredBatch) -> ScoredBatch:
        """Returns the batch with the score added to its rewards and among their parts."""
        producer = Producer.here(f"reward {self.name!r}")
        plan = self.model.plan(batch.to_train(producer))
        values_T = plan.column(self.model.forward_all(plan.inputs))
        score_B = batch.completed(values_T[_last_tokens(batch, self.padding)])
        reward_B = (batch.reward_B.double() + self.weight * score_B.double()).float()
        scored = batch.join_columns(producer, reward_B=reward_B)
        return replace(scored.with_parts({self.name: score_B}), producer=producer)


def _last_tokens(batch: RolloutBatch, padding: int | None) -> Tensor:
    """Returns where the last token of each response is that is no padding, (H,) int64; where all
    are, its first sampled one.
    """
    last_H = batch.offsets[1:] - 1
    if padding is None:
        return last_H
    is_sampled_T, is_padding_T = batch.response_mask_T, batch.tokens_T == padding
    while True:  # as often as the longest run of padding; end tokens come once
        is_passed_H = is_padding_T[last_H] & is_sampled_T[last_H - 1]
        if not bool(is_passed_H.any()):
            return last_H
        last_H = last_H - is_passed_H.long()


def served_model(
    name: str, weight: float, source: ModelSource, mesh: Mesh, train: TrainConfig
) -> RewardModel:
    """Builds a reward model; its weights are to be loaded.

    Args:
        name, weight: As for `RewardModel`.
        source: Which model.
        mesh: Ranks that it is cut over.
        train: Micro-batch budget and number format.

    Raises:
        ModelError: config.json names no token that is known.
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
    """Builds the reward models.

    Args:
        meshes: that they are cut over, by role.
        policy: whose tokens they are to read.
        models: gets each by name, for the table of an out-of-memory error.
        served: which models they are, by the names of their scorers.
        needs_greedy: whether greedy responses, which no model scores, are compared with.
        notify: tells the user, once.

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
        for notice in score_notices(source.hf_config, str(section.path)):
            notify(f"reward {name}: {notice}")
        weight = config.reward.scorers()[name].weight
        one = served_model(name, weight, source, mesh, config.train)
        models[f"reward {name}"] = one.model
        with mesh.world.all_agree("loading the reward model"):
            load_weights(one.model, section)
        one.model.freeze()
        reward_models.append(one)
    return reward_models


def _check_vocabulary(path: str, own: Mapping[str, object], policy: Mapping[str, object]) -> None:
    if own["vocab_size"] != policy["vocab_size"]:
        raise UserError(
            "reward.options.path",
            f"{path}, with {own['vocab_size']} tokens",
            f"a reward model with the policy's {policy['vocab_size']} tokens, which it reads",
            "Train one from a model of the policy's family (algorithm.name=reward_model).",
        )
