#!/usr/bin/env bash
# A learning run on GPUs: a model of 76 M parameters from scratch, warm-up, then GRPO and PPO on multi-step arithmetic; in
# the end held-out accuracy must be above 0.9. Run from the root, hybridrl installed:
#   tests/gpu/learn.sh OUT 1 [sft] [grpo] [ppo]      on one GPU
#   tests/gpu/learn.sh OUT 4 [sft] [grpo] [ppo]      on 4: trained TP2 DP2, 4 replicas at TP1
# The warm-up with one of the two takes less than 10 minutes; a part finds under runs/ what the one before left.
set -uo pipefail
BEGAN=$SECONDS
timeout -k 20 "${LIMIT_S:-590}" examples/arithmetic_gpu/run.sh "$@"
CODE=$?
for RUN in runs/arithmetic-*-"$2"gpu; do # of a part that was cut off, what there is
  [ -f "$RUN/metrics.jsonl" ] || continue
  mkdir -p "$1/$(basename "$RUN")" && cp "$RUN/metrics.jsonl" "$1/$(basename "$RUN")/"
done
echo "learning on $2 GPUs: exit $CODE after $((SECONDS - BEGAN)) s"
exit $CODE
