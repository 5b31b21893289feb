"""The teacher in a distillation: a frozen model of any size that computes log-probabilities.

Collective; every rank receives the same columns. By default the model is split over the same ranks
as the policy.
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.base import Needs
from hybridrl.config.rules_sampling import num_likely, replays_sampling
from hybridrl.config.schema import Config
from hybridrl.config.teacher import teacher_model
from hybridrl.contracts.batch import TrainBatch
from hybridrl.errors import UserError
from hybridrl.models.megatron.heads import LanguageModel, TokenStats
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.from_config import load_weights, model_source
from hybridrl.training.model import ModelSource, ParallelModel


class Teacher:
    """Computes columns from a frozen teacher, without tokens beyond the policy's `num_tokens`."""

    def __init__(
        self, model: ParallelModel, needs: Needs, num_tokens: int, temperature: float
    ) -> None:
        self.model, self.needs, self._temperature = model, needs, temperature
        for chunk in model.chunks:
            if isinstance(chunk, LanguageModel):
                chunk.num_top, chunk.num_tokens = needs.teacher_top, num_tokens

    def columns(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Returns `teacher_logp_T`, or `teacher_tokens_TK` and `teacher_logp_TK`."""
        plan = self.model.plan(batch, self._temperature)
        outputs: list[TokenStats] = self.model.forward_all(plan.inputs)
        found, mask_T = {}, batch.response_mask_T
        if self.needs.teacher:
            logp_T = plan.column([output.logp_S for output in outputs])
            found["teacher_logp_T"] = logp_T * mask_T
        if width := self.needs.teacher_top:
            logps = [out.chosen_logp_SK for out in outputs if out.chosen_logp_SK is not None]
            logp_TK = plan.column(logps, width)
            found["teacher_logp_TK"] = logp_TK * mask_T[:, None]
            # The column is fp32, which is exact for token ids below 2^24.
            tokens = [out.chosen_SK for out in outputs if out.chosen_SK is not None]
            tokens_TK = plan.column(tokens, width)
            found["teacher_tokens_TK"] = tokens_TK.int() * mask_T[:, None]
        return found


def make_teacher(
    config: Config,
    mesh: Mesh,
    policy: ModelSource,
    models: dict[str, ParallelModel],
    needs: Needs,
    temperature: float,
) -> Teacher:
    """Builds the teacher and loads its weights, into `models` for out-of-memory errors."""
    section = teacher_model(config)
    if section is None:
        raise UserError(
            "algorithm.name",
            config.algorithm.name,
            "an algorithm with a teacher",
            "Set algorithm.name to on_policy_distillation, distillation or gkd.",
        )
    source = model_source(section, mesh.platform, config.longest_sequence())
    models["teacher"] = model = ParallelModel(mesh, source, "lm", config.train)
    with mesh.world.all_agree("loading the teacher"):
        load_weights(model, section)
    model.freeze()
    if replays_sampling(config):
        model.use_likely_tokens(True, False, num_likely(config, policy.shape.vocab_size))
    return Teacher(model, needs, policy.shape.vocab_size, temperature)
