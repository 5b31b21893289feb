"""Losses and gradients of the preference algorithms against TRL's own code, where TRL is installed.

The extra `test` has it, so that `make test` runs this. Its trainers' methods get our
log-probabilities in place of a model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import feedback_batch
from torch import Tensor

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.preference import feedback_metrics, response_sums
from hybridrl.config.schema import AlgorithmConfig, DpoConfig, KtoConfig
from hybridrl.contracts.batch import UNRELATED, TrainBatch

NUM_BATCHES = 200
TOLERANCE = 1e-6  # float32 advantages and parts of the loss

LOCAL = SimpleNamespace(
    device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
)
TRAINER = SimpleNamespace(
    accelerator=LOCAL,
    model=SimpleNamespace(training=True),
    aux_loss_enabled=False,
    precompute_ref_logps=True,
    _metrics=defaultdict(lambda: defaultdict(list)),
    _total_train_tokens=0,
    _tp_size=1,
)


def padded(column_T: Tensor, batch: TrainBatch) -> Tensor:
    """One row a sample, of a column that is zero on prompts."""
    parts = column_T.double().split(batch.lengths_B.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def inputs_and_model(logp_BL: Tensor, batch: TrainBatch) -> tuple[dict[str, Any], Any]:
    """What TRL's trainers take: token 0 of each row is never predicted."""
    mask_BL = padded(batch.response_mask_T, batch).long()
    ids_BL = padded(batch.tokens_T, batch).long()

    def model(**_: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(logp_BL[:, 1:])
        return SimpleNamespace(
            log_probs=logp_BL[:, 1:],
            entropy=zeros.detach(),
            mean_logits=zeros.detach(),
            is_top1=zeros.bool(),
        )

    return {
        "input_ids": ids_BL,
        "attention_mask": torch.ones_like(ids_BL),
        "completion_mask": mask_BL,
    }, model


def with_knobs(**knobs: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(TRAINER), **knobs)


def trl_dpo(loss_type: str, beta: float) -> Callable[[Tensor, TrainBatch], Tensor]:
    trainer = with_knobs(
        beta=beta,
        loss_types=[loss_type],
        loss_weights=[1.0],
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )

    def loss(logp_BL: Tensor, batch: TrainBatch) -> Tensor:
        inputs, model = inputs_and_model(logp_BL, batch)
        better, worse = response_sums(batch.reference_logp_T, batch).chunk(2)
        inputs |= {"ref_chosen_logps": better, "ref_rejected_logps": worse}
        from trl.trainer.dpo_trainer import DPOTrainer

        return DPOTrainer._compute_loss(trainer, model, inputs, False)

    return loss


def trl_cpo(loss_type: str, by_length: bool, uses_reference: bool, **knobs: float) -> Any:
    trainer = with_knobs(loss_type=loss_type, alpha=0.0, **{"label_smoothing": 0.0, **knobs})

    def loss(logp_BL: Tensor, batch: TrainBatch) -> Tensor:
        score_B = logp_BL.sum(1)
        if uses_reference:
            score_B = score_B - response_sums(batch.reference_logp_T, batch)
        if by_length:
            score_B = score_B / batch.response_lengths_B
        from trl.experimental.cpo import CPOTrainer

        return CPOTrainer.cpo_loss(trainer, *score_B.chunk(2))[0].mean()

    return loss


def trl_orpo(logp_BL: Tensor, batch: TrainBatch) -> Tensor:
    """With the likelihood of responses alone: TRL's is over prompts too, and of all tokens."""
    from trl.experimental.orpo import ORPOTrainer

    mean_B = logp_BL.sum(1) / batch.response_lengths_B
    ratios = ORPOTrainer.odds_ratio_loss(with_knobs(beta=0.1), *mean_B.chunk(2))[0]
    return -mean_B.chunk(2)[0].mean() - ratios.mean()


def trl_kto(logp_BL: Tensor, batch: TrainBatch) -> Tensor:
    from trl.trainer.kto_trainer import KTOTrainer

    is_unrelated_B = batch.reward_parts[UNRELATED] > 0
    logp_B, reference_B = logp_BL.sum(1), response_sums(batch.reference_logp_T, batch)
    trainer = with_knobs(
        beta=0.1,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        loss_type="kto",
        calculate_KL=True,
        _compute_kl_logps=lambda *_: logp_B[is_unrelated_B].detach(),
    )
    real = batch.select((~is_unrelated_B).nonzero()[:, 0])
    inputs, model = inputs_and_model(logp_BL[~is_unrelated_B], batch)
    inputs = {name: value[~is_unrelated_B] for name, value in inputs.items()}
    inputs |= {
        "label": real.reward_B > 0,
        "ref_logps": reference_B[~is_unrelated_B],
        "ref_KL_logps": reference_B[is_unrelated_B],
    }
    return KTOTrainer._compute_loss(trainer, model, inputs, False)


CASES: dict[str, tuple[AlgorithmConfig, Callable[[Tensor, TrainBatch], Tensor], float]] = {
    "dpo": (DpoConfig(), trl_dpo("sigmoid", 0.1), TOLERANCE),
    "dpo_norm": (DpoConfig(name="dpo_norm"), trl_dpo("sigmoid_norm", 5.0), TOLERANCE),
    "ipo": (DpoConfig(name="ipo"), trl_dpo("ipo", 0.1), TOLERANCE),
    "cdpo": (
        DpoConfig(name="cdpo"),
        trl_cpo("sigmoid", False, True, beta=0.1, label_smoothing=0.1),
        TOLERANCE,
    ),
    "simpo": (
        DpoConfig(name="simpo"),
        trl_cpo("simpo", True, False, beta=2.0, simpo_gamma=1.0),
        TOLERANCE,
    ),
    # TRL computes the odds in float32.
    "orpo": (DpoConfig(name="orpo"), trl_orpo, TOLERANCE),
    "kto": (KtoConfig(desirable_weight=1.3, undesirable_weight=0.7), trl_kto, TOLERANCE),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_trls(case: str) -> None:
    pytest.importorskip("trl")
    config, theirs, tolerance = CASES[case]
    algorithm = make_algorithm(config)
    for seed in range(NUM_BATCHES):
        batch = feedback_batch(config.needs.feedback, 2 + seed % 5, seed)
        logp_BL = padded(batch.old_logp_T, batch).requires_grad_()
        expected = theirs(logp_BL, batch)
        expected.backward()
        expected = expected.detach()
        filled = algorithm.advantages(batch)
        found = feedback_metrics(filled)["policy/loss"]
        assert found == pytest.approx(float(expected), rel=tolerance, abs=tolerance)
        gradient_BL = -padded(filled.advantages_T, filled) / algorithm.denominator(filled)
        rows, width = gradient_BL.shape
        mask_BL = padded(filled.response_mask_T, filled)
        torch.testing.assert_close(
            gradient_BL, logp_BL.grad[:rows, :width] * mask_BL, rtol=tolerance, atol=tolerance
        )
