"""A dataflow of one's own from the public parts: learn only from prompts that some samples solve.

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
    rollouts = sampler.generate(prompts)  # this replica's share
    scored = sampler.score(rollouts)  # all samples; tokens where they were scored
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
        for _ in range(2):  # twice over the same samples, off-policy the second time
            metrics = policy.update(batch)
    trainer.hybrid_engine.to_rollout()
    if trainer.world.rank == 0:
        loss, reward = metrics.get("policy/loss", 0.0), float(scored.reward_B.mean())
        print(f"step {step + 1} kept {len(mixed)} reward {reward:.3f} loss {loss:.4f}", flush=True)
trainer.close()
