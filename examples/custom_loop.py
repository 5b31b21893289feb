"""A custom training loop from the public parts: learns only from prompts with unequal rewards.

python examples/custom_loop.py CONFIG [KEY=VALUE ...], or under torchrun with the same arguments.
"""

import sys

from hybridrl import Trainer
from hybridrl.contracts.batch import Producer

trainer = Trainer.from_config(sys.argv[1], sys.argv[2:])
policy, sampler, algorithm = trainer.policy, trainer.sampler, trainer.algorithm
steps, loop = trainer.config.steps, Producer.here("the custom loop")
trainer.hybrid_engine.to_rollout()
for step in range(steps.num_steps):
    prompts = sampler.take(trainer.prompts, steps.prompts_per_step)
    rollouts = sampler.generate(prompts)  # the samples that this replica generates
    scored = sampler.score(rollouts)  # tokens stay on the rank that scored them
    trainer.hybrid_engine.to_train()
    seen: dict[int, set[float]] = {}
    for group, reward in zip(scored.group_B.tolist(), scored.reward_B.tolist(), strict=True):
        seen.setdefault(group, set()).add(reward)
    mixed = [i for i, group in enumerate(scored.group_B.tolist()) if len(seen[group]) > 1]
    metrics: dict[str, float] = {}
    if mixed:
        batch = scored.select(mixed).to_train(loop)
        batch = batch.join_columns(loop, old_logp_T=policy.logprobs(batch))
        batch = algorithm.advantages(batch)
        for _ in range(2):  # two updates on the same samples; the second is off-policy
            metrics = policy.update(batch)
    trainer.hybrid_engine.to_rollout()
    if trainer.world.rank == 0:
        loss, reward = metrics.get("policy/loss", 0.0), float(scored.reward_B.mean())
        print(f"step {step + 1} kept {len(mixed)} reward {reward:.3f} loss {loss:.4f}", flush=True)
trainer.close()
