"""The teacher of a distillation: a frozen model of its own sizes, cut over all ranks like the
policy, that says how likely tokens are.

Collective; every rank gets the same columns.
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.base import Needs
from hybridrl.config.schema import Config
from hybridrl.config.teacher import teacher_model
from hybridrl.contracts.batch import TrainBatch
from hybridrl.errors import UserError
from hybridrl.models.megatron.heads import LanguageModel, TokenStats
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.from_config import load_weights, model_source
from hybridrl.training.model import ModelSource, ParallelModel


class Teacher:
    """Adds the columns that an algorithm learns from.

    Args:
        model: a parallel language model, frozen.
        needs: which columns.
        num_tokens: the policy's vocabulary, to which the teacher's is cut.
        temperature: that the policy samples with.
    """

    def __init__(
        self, model: ParallelModel, needs: Needs, num_tokens: int, temperature: float
    ) -> None:
        self.model, self.needs, self._temperature = model, needs, temperature
        for chunk in model.chunks:
            if isinstance(chunk, LanguageModel):
                chunk.num_top, chunk.num_tokens = needs.teacher_top, num_tokens

    def columns(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Returns `teacher_logp_T`, or `teacher_tokens_TK` and `teacher_logp_TK`, as needed."""
        plan = self.model.plan(batch, self._temperature)
        outputs: list[TokenStats] = self.model.forward_all(plan.inputs)
        found, mask_T = {}, batch.response_mask_T
        if self.needs.teacher:
            logp_T = plan.column([output.logp_S for output in outputs])
            found["teacher_logp_T"] = logp_T * mask_T
        if width := self.needs.teacher_top:
            logps = [one.chosen_logp_SK for one in outputs if one.chosen_logp_SK is not None]
            logp_TK = plan.column(logps, width)
            found["teacher_logp_TK"] = logp_TK * mask_T[:, None]
            # Through fp32, which holds the numbers of 2^24 tokens.
            tokens = [one.chosen_SK for one in outputs if one.chosen_SK is not None]
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
    """Builds the teacher and loads its weights.

    Args:
        mesh: that it is cut over.
        policy: whose tokens it is asked about.
        models: gets it by name, for the table of an out-of-memory error.
        needs: what the algorithm asks of it.
        temperature: that the policy samples with.

    Raises:
        UserError: the section `algorithm` names none.
    """
    section = teacher_model(config)
    if section is None:
        raise UserError(
            "algorithm.name",
            config.algorithm.name,
            "an algorithm whose section names the teacher that it needs",
            "Use on_policy_distillation, distillation or gkd.",
        )
    source = model_source(section, mesh.platform, config.longest_sequence())
    models["teacher"] = model = ParallelModel(mesh, source, "lm", config.train)
    with mesh.world.all_agree("loading the teacher"):
        load_weights(model, section)
    model.freeze()
    return Teacher(model, needs, policy.shape.vocab_size, temperature)
