#!/usr/bin/env bash
# PPO on 4 GPUs with each model on GPUs of its own: the policy on one, the engine on another, the critic and a reward model on the
# two others; then the critic and the reward model on one rank together and the policy cut in two. Random weights; each update of
# the engine is verified by checksum. Run from the root, hybridrl and vLLM installed:
#   tests/gpu/placement.sh OUT [MODEL] [KEY=VALUE]...      MODEL: a file under benchmarks/models, by default qwen2.5-1.5b
# PARTS="apart paired" in the environment says which of the two run.
set -uo pipefail
OUT=$1 MODEL=${2:-qwen2.5-1.5b}
shift $(($# > 1 ? 2 : 1))
export OMP_NUM_THREADS=4 CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" PYTHONPATH="$PWD:$PWD/benchmarks:${PYTHONPATH:-}"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT"
python - "benchmarks/models/$MODEL.json" "$WORK" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from random_workload import random_prompts, word_tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification

model, work = Path(sys.argv[1]), Path(sys.argv[2])
config = json.loads(model.read_text())
(work / "config.json").write_text(json.dumps(config))
tokenizer = word_tokenizer(config["vocab_size"])
tokenizer.save_pretrained(work / "tokenizer")
prompts = random_prompts(16 * 12, 128, config["vocab_size"])
(work / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
torch.manual_seed(0)
found = AutoConfig.from_pretrained(work, num_labels=1)
AutoModelForSequenceClassification.from_config(found, dtype=torch.bfloat16).save_pretrained(work / "judge")
tokenizer.save_pretrained(work / "judge")
PYTHON
cat > "$WORK/ppo.yaml" <<YAML
run: {dir: $WORK/runs}
model: {init: $WORK/config.json, tokenizer: $WORK/tokenizer}
train: {micro_batch_tokens: 16384, learning_rate: 1.0e-6}
rollout: {engine: vllm, max_new_tokens: 128, max_batch: 128, verify: 1}
algorithm: {name: ppo, kl_coef: 0.01}
data: {prompts: $WORK/prompts.jsonl, max_prompt_tokens: 128}
reward:
  functions:
    judge: {function: reward_model, options: {path: $WORK/judge}}
steps: {prompts_per_step: 16, samples_per_prompt: 8, num_steps: 6}
log: {tensorboard: false, rollouts_every: 0}
YAML
FAILED=0
part() { # NAME KEY=VALUE...
  local name=$1 began=$SECONDS
  shift
  [[ " ${PARTS:-apart paired} " == *" $name "* ]] || return
  timeout -k 20 200 python -m hybridrl.cli.main train "$WORK/ppo.yaml" "run.name=$name" "$@" --world 4 > "$OUT/$name.log" 2>&1
  local code=$?
  [ $code = 0 ] || FAILED=1
  cp "$WORK/runs/$name/metrics.jsonl" "$OUT/$name.jsonl" 2> /dev/null
  cp "$WORK/runs/$name/logs/rank_0.log" "$OUT/$name.rank_0.log" 2> /dev/null
  echo "$name: exit $code after $((SECONDS - began)) s" | tee -a "$OUT/placement.txt"
}
part apart placement.policy=0 placement.rollout=1 placement.critic=2 placement.rewards.judge=3 "$@"
part paired train.tp=2 placement.policy=0-1 placement.rollout=2-3 placement.critic.ranks=3 placement.critic.tp=1 placement.rewards.judge.ranks=2 \
  placement.rewards.judge.tp=1 "$@"
exit $FAILED
