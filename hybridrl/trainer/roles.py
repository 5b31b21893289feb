"""The models of a run: the policy, and what its algorithm needs beside it.

Owns who is trained and whose gradients make one optimizer step. Every model is cut over all ranks;
collective like them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridrl.algorithms.base import Algorithm, CriticAlgorithm
from hybridrl.batch import TrainBatch
from hybridrl.config.schema import Config, PpoConfig
from hybridrl.metrics.flops import (
    GeneratedLengths,
    forward_flops,
    generate_flops,
    train_flops,
)
from hybridrl.parallel.groups import World
from hybridrl.trainer import setup
from hybridrl.trainer.critic import Critic
from hybridrl.trainer.judge import Judge, make_judges
from hybridrl.trainer.model import ModelSource, ParallelModel
from hybridrl.trainer.policy import Policy
from hybridrl.trainer.teacher import Teacher, make_teacher
from hybridrl.trainer.update import Gradients


@dataclass(frozen=True)
class Roles:
    """The models that an algorithm needs.

    Args:
        source: which model they all are.
        policy, reference, critic: None where the algorithm has no such role.
        trained: the trained models by name.
        num_critic_warmup_steps: steps in which only the critic is trained.
        judges: reward models that score what is sampled.
        teacher: that a distillation learns from.
    """

    source: ModelSource
    policy: Policy
    reference: Policy | None
    critic: Critic | None
    trained: dict[str, ParallelModel]
    num_critic_warmup_steps: int
    judges: Sequence[Judge] = ()
    teacher: Teacher | None = None

    def trains_policy(self, num_steps_done: int) -> bool:
        """Whether the policy is trained in the step after so many."""
        return "policy" in self.trained and num_steps_done >= self.num_critic_warmup_steps

    def taught(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Returns the columns of the teacher, if there is one."""
        return {} if self.teacher is None else self.teacher.columns(batch)

    def gradients(self, part: TrainBatch, num_steps_done: int) -> list[Gradients]:
        """Accumulates the gradients of every model that learns from this mini-batch."""
        found = [self.critic.gradients(part)] if self.critic is not None else []
        if self.trains_policy(num_steps_done):
            found.append(self.policy.gradients(part))
        return found

    def flops(
        self, batch: TrainBatch, num_steps_done: int, generated: GeneratedLengths
    ) -> dict[str, int]:
        """Returns the model FLOPs of a step's phases, all ranks together; output heads count for
        response tokens only, which alone have a loss.

        Args:
            batch: of the step, with all its columns.
            num_steps_done: before it.
            generated: all that was generated for it.
        """
        shape, lengths = self.source.shape, batch.lengths_B.tolist()
        responses = int(batch.response_lengths_B.sum())
        forward = forward_flops(shape, lengths, responses)
        value = forward_flops(shape, lengths, responses, head_size=1)
        num_lm = sum(column is not None for column in (batch.old_logp_T, batch.reference_logp_T))
        taught = 0
        if self.teacher is not None:
            taught = forward_flops(self.teacher.model.source.shape, lengths, responses)
        has_critic = self.critic is not None
        trains_policy = self.trains_policy(num_steps_done)
        return {
            "generate": generate_flops(shape, generated),
            "logprobs": num_lm * forward + has_critic * value + taught,
            "update": trains_policy * train_flops(shape, lengths, responses)
            + has_critic * train_flops(shape, lengths, responses, head_size=1),
        }


def make_roles(
    config: Config,
    world: World,
    algorithm: Algorithm,
    models: dict[str, ParallelModel],
    say: Callable[[str], None],
    has_reference: bool = True,
) -> Roles:
    """Builds the models and fills in their first weights.

    Args:
        config: of the run.
        world: that they are cut over.
        algorithm: says which are needed.
        models: gets each as soon as it is there, by name, for the table of an out-of-memory error.
        say: tells the user, once.
        has_reference: False leaves out the reference, reward models and the teacher, where their
            columns are known already.
    """
    needs = algorithm.needs
    source = setup.model_source(config.model, world.platform)
    num_updates = config.steps.num_steps * config.steps.updates_per_step
    temperature = (config.rollout.temperature or 1.0) if needs.rollouts else 1.0
    models["policy"] = model = setup.build_model(world, source, "lm", config)
    say(model.layers.said)
    if needs.policy:
        home = setup.weights_home(config, world, say)
        model.make_trainable(config.train.learning_rate, home)
    else:
        model.freeze()
    policy = Policy(model, algorithm, num_updates, temperature)
    trained: dict[str, ParallelModel] = {"policy": model} if needs.policy else {}
    reference, critic = None, None
    if needs.reference and has_reference:
        models["reference"] = frozen = setup.build_model(world, source, "lm", config)
        frozen.freeze()
        reference = Policy(frozen, algorithm, num_updates, temperature)
    if needs.values and isinstance(algorithm, CriticAlgorithm):
        value = setup.build_model(world, source, "value", config)
        models["critic"] = trained["critic"] = value
        rate = config.train.critic_learning_rate
        value.make_trainable(config.train.learning_rate if rate is None else rate)
        critic = Critic(value, algorithm, num_updates)
    chosen = config.algorithm
    warmup = chosen.critic_warmup_steps if isinstance(chosen, PpoConfig) else 0
    is_scored = needs.rollouts and has_reference
    judges = make_judges(config, world, source, models, needs.greedy) if is_scored else ()
    teacher = None
    if (needs.teacher or needs.teacher_top) and has_reference:
        teacher = make_teacher(config, world, source, models, needs, temperature)
    return Roles(source, policy, reference, critic, trained, warmup, judges, teacher)
