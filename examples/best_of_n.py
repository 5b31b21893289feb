"""Best-of-n distillation with the public parts: the policy imitates the best sample of each prompt.

python examples/best_of_n.py CONFIG [KEY=VALUE ...], or under torchrun with the same arguments.

CONFIG must have rollouts, such as examples/quickstart/grpo.yaml; its algorithm only generates the
samples. Each step is an SFT step on the best sample of every prompt whose samples have different
rewards. (RAFT, Dong et al. 2023, arXiv 2304.06767, keeps the best sample of every prompt.)
"""

import sys

from hybridrl import Trainer
from hybridrl.algorithms import make_algorithm
from hybridrl.config.schema import SftConfig
from hybridrl.contracts.batch import Producer, ScoredBatch
from hybridrl.roles.policy import Policy


def best_of_groups(scored: ScoredBatch) -> list[int]:
    """Returns the index of the best sample of each prompt whose samples differ in reward."""
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(scored.group_B.tolist()):
        groups.setdefault(group, []).append(index)
    rewards = scored.reward_B.tolist()
    best = {max(group, key=rewards.__getitem__): group for group in groups.values()}
    return [top for top, group in best.items() if rewards[top] > min(rewards[i] for i in group)]


trainer = Trainer.from_config(sys.argv[1], sys.argv[2:])
steps, sampler, loop = trainer.config.steps, trainer.sampler, Producer.here("best of n")
# A second policy with the same weights but another loss.
student = Policy(trainer.policy.model, make_algorithm(SftConfig()), steps.num_steps)
trainer.hybrid_engine.to_rollout()
for step in range(steps.num_steps):
    prompts = sampler.take(trainer.prompts, steps.prompts_per_step)
    scored = sampler.score(sampler.generate(prompts))  # tokens stay on the rank that scored them
    trainer.hybrid_engine.to_train()
    best, metrics = best_of_groups(scored), {"policy/loss": 0.0}
    if best:
        metrics = student.update(scored.select(best).to_train(loop))
    trainer.hybrid_engine.to_rollout()
    if trainer.world.rank == 0:
        told = f"kept {len(best)} reward {scored.reward_B.mean():.3f}"
        print(f"step {step + 1} {told} loss {metrics['policy/loss']:.4f}", flush=True)
trainer.close()
