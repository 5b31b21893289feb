#!/usr/bin/env bash
# The trainer on GPUs, 4 unless `alone`: gradients of transformer-engine's layers in bf16 against fp32 of torch's, in several
# layouts; what share of the GPUs' peak the passes reach; whole GRPO steps. Run from the root, hybridrl and vLLM installed:
#   tests/gpu/train.sh OUT [parity] [bench] [step]      (about 3, 6 and 10 minutes; a case of step starts for 80 to 110 s)
#   tests/gpu/train.sh OUT [lag] [apart] [experts]      (a lag of 1 with tailed lengths, engines on two of the four, 30B-A3B's
#                                                        shapes; about 8, 4 and 3 minutes; GPUs of 140 GB)
#   tests/gpu/train.sh OUT alone                        (what one H200 can say, 10 minutes)
set -uo pipefail
OUT=$1
shift
PARTS=" ${*:-parity bench step} "
wants() { [[ $PARTS == *" $1 "* ]]; }
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/dist:${PYTHONPATH:-}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" CUDA_DEVICE_MAX_CONNECTIONS=1
worker() { timeout 130 torchrun --standalone --nproc-per-node="$1" tests/gpu/train_worker.py "${@:2}"; }
bench() { python benchmarks/bench_train.py --out "$@"; }
step() { python benchmarks/bench_step.py --out "$@"; }
mkdir -p "$OUT"
if wants parity; then
  REFERENCE=$(mktemp -d)
  worker 1 reference "$REFERENCE" > "$OUT/reference.log" 2>&1; echo "reference: $?"
  worker 1 compare "$REFERENCE" alone > "$OUT/alone.log" 2>&1; echo "one GPU: $?"
  worker 4 compare "$REFERENCE" dp4 tp4 tp2dp2 tp2cp2 tp2pp2 tp2ep2 tp4ep2etp2 ep4 > "$OUT/layouts.log" 2>&1; echo "layouts: $?"
fi
if wants bench; then
  # Whole activations of 16,384 tokens, beside weights, gradients and a quarter of the optimizer, are more than one GPU has.
  bench "$OUT/train_7b_dp4.json" 7b/tp1dp4 --set train.recompute=selective --samples 8 --prompt-tokens 512
  bench "$OUT/train_7b_tp.json" 7b/tp2dp2 7b/tp4 --tails
  bench "$OUT/train_0.5b.json" 0.5b/dp4 --tails
  bench "$OUT/train_7b_torch.json" 7b/tp2dp2 --layers torch --iterations 3
fi
if wants step; then
  step "$OUT/step_7b.json" 7b/dp4/tp1 7b/tp4/tp1 --limit-s 240
  step "$OUT/step_0.5b.json" 0.5b/dp4/tp1 --limit-s 180
fi
if wants lag; then
  step "$OUT/tailed.json" 7b/dp4/tp1 7b/tp4/tp1 --workload tailed --warmups 1 --steps 3
  step "$OUT/tailed_lag.json" 7b/dp4/tp1 7b/tp4/tp1 --workload tailed --warmups 2 --steps 3 --set steps.max_policy_lag=1
fi
if wants apart; then
  step "$OUT/apart.json" 7b/tp2/apart-dp2tp1 --prompts 32 --warmups 1 --steps 3
  step "$OUT/apart_lag.json" 7b/tp2/apart-dp2tp1 --prompts 32 --warmups 2 --steps 3 --set steps.max_policy_lag=1
fi
if wants experts; then # as many layers as fit with gradients, optimizer and reference
  step "$OUT/experts.json" qwen3-30b-a3b/dp4ep4/tp4ep4 --num-layers 28 --micro-batch-tokens 8192 --warmups 1 --steps 3
fi
if wants alone; then
  # What each of 4 GPUs has of a step of 64 prompts.
  step "$OUT/step_0.5b_alone.json" 0.5b/dp1/tp1 --limit-s 160 --prompts 16
  # One GPU holds a 7B model's training with its optimizer's state in host memory.
  step "$OUT/step_7b_alone.json" 7b/dp1/tp1 --limit-s 400 --warmups 1 --steps 2 --prompts 8 --micro-batch-tokens 2048 \
    --set train.optimizer_memory=host --set train.recompute=full --set algorithm.kl_coef=0
  bench "$OUT/train_alone.json" 0.5b/dp1 1.5b/dp1 --tails --iterations 3
fi
