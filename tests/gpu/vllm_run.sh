#!/usr/bin/env bash
# GRPO on Qwen2.5 shapes with random weights and vLLM on 4 GPUs, a few steps for each pair of layouts:
#   tests/gpu/vllm_run.sh OUT "SIZE TP PP ROLLOUT_TP"...        SIZE as in benchmarks/models/qwen2.5-SIZE.json
set -uo pipefail
OUT=$1; shift
export OMP_NUM_THREADS=4 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}"
for pair in "$@"; do
  read -r size tp pp gen <<< "$pair"
  name="${size}_tp${tp}pp${pp}_to_tp${gen}"
  start=$SECONDS
  timeout "${LIMIT_S:-200}" python -m hybridrl.cli.main train examples/quickstart/grpo.yaml run.name="$name" model.path=null \
    model.init="benchmarks/models/qwen2.5-$size.json" model.tokenizer=examples/quickstart/model model.dtype=bfloat16 \
    train.tp="$tp" train.pp="$pp" rollout.tp="$gen" rollout.engine=vllm rollout.max_new_tokens=128 \
    train.micro_batch_tokens=8192 train.learning_rate=1e-5 data.eval_prompts=null steps.eval_every=0 \
    steps.num_steps=4 steps.prompts_per_step=32 reward.function=scripted_reward:digits reward.extract=null \
    rollout.verify=1 checkpoint.every=0 log.tensorboard=false --world 4 > "$OUT/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - start)) s"
  cp "runs/$name/metrics.jsonl" "$OUT/$name.jsonl" 2>/dev/null
  cp "runs/$name/logs/rank_1.log" "$OUT/$name.rank_1.log" 2>/dev/null
  grep -h "agree\|step " "$OUT/$name.log" | tail -n 5 | cut -c1-200
done
