#!/usr/bin/env bash
# Teaches multi-step arithmetic to a model with random weights: warm-up on worked solutions, then GRPO and PPO with rewards only.
# The run folders are in runs/. The script writes to OUT: metrics, summary, configuration and report of each part that was run, a page
# that compares GRPO with PPO, and result_NUMBERgpu.json and .png. Exits with 1 unless held-out accuracy rose from below 0.6 (0.7 with --moe)
# to above 0.9.
# Run it in the repository's root; hybridrl must be installed with its extras `vllm` and `pictures`:
#   examples/arithmetic_gpu/run.sh OUT 1 [sft] [grpo] [ppo]      on one GPU
#   examples/arithmetic_gpu/run.sh OUT 4 [sft] [grpo] [ppo]      on 4 GPUs: training at TP2 DP2, 4 engine replicas at TP1 (on 2 GPUs: training at TP2)
#   examples/arithmetic_gpu/run.sh OUT 1 --moe [sft] [grpo] [replay]    a mixture of experts of 104 M parameters in place of the
#     dense model: GRPO without and with router replay, after the same warm-up. Writes result_moe_NUMBERgpu.json and .png into OUT,
#     with the difference between engine and trainer in each run, and in the dense model's GRPO run if there is one
# If no part is named, all parts are run. KNOBS="key=value ..." are passed to every part.
set -euo pipefail
OUT=$1 WORLD=$2 MOE="" ALL="sft grpo ppo"
shift 2
if [ "${1:-}" = --moe ]; then
  MOE=moe- ALL="sft grpo replay"
  shift
fi
PARTS=" ${*:-$ALL} "
wants() { [[ $PARTS == *" $1 "* ]]; }
case $WORLD in
  1) LAYOUT="train.tp=1" ;;
  2 | 4) LAYOUT="train.tp=2" ;;
  *) echo "WORLD is $WORLD: give 1, 2 or 4" >&2; exit 2 ;;
esac
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" CUDA_DEVICE_MAX_CONNECTIONS=1
HERE=$(dirname "$0")
SFT=runs/arithmetic-${MOE}sft-${WORLD}gpu
mkdir -p "$OUT"
[ -f runs/arithmetic/moe_model/config.json ] || python "$HERE/make_data.py" runs/arithmetic

# learn PART CONFIG KNOB...: trains from the beginning, and copies the run's results to OUT.
learn() {
  local run=arithmetic-${MOE}$1-${WORLD}gpu config=$2
  shift 2
  rm -rf "runs/$run"
  # shellcheck disable=SC2086
  hybridrl train "$HERE/$config.yaml" --world "$WORLD" $LAYOUT "run.name=$run" "$@" ${KNOBS:-} 2>&1 | tee "$OUT/$run.log"
  hybridrl report "runs/$run"
  mkdir -p "$OUT/$run"
  cp "runs/$run"/{metrics.jsonl,summary.json,config.yaml,report.html} "$OUT/$run/"
  if [ -d "runs/$run/traces" ]; then cp -r "runs/$run/traces" "$OUT/$run/"; fi  # written if KNOBS contains run.profile
}

if wants sft; then
  # For the mixture of experts: Qwen3's own load-balancing coefficient keeps all experts in use while they are untrained.
  # The warm-up is longer than for the dense model, because at the same greedy accuracy far fewer sampled responses are right.
  # shellcheck disable=SC2086
  learn sft sft ${MOE:+model.init=runs/arithmetic/moe_model train.moe.aux_loss=0.001 steps.stop_at_accuracy=0.5}
  hybridrl convert "$SFT" "$SFT/hf" --to hf
fi
if wants grpo; then learn grpo grpo "model.path=$SFT/hf"; fi
if [ -n "$MOE" ]; then
  if wants replay; then learn replay grpo "model.path=$SFT/hf" algorithm.router_replay=rollout; fi
  exec python "$HERE/result.py" "$OUT" "$WORLD" --moe
fi
if wants ppo; then learn ppo ppo "model.path=$SFT/hf"; fi
GRPO=runs/arithmetic-grpo-${WORLD}gpu PPO=runs/arithmetic-ppo-${WORLD}gpu
if [ -f "$GRPO/summary.json" ] && [ -f "$PPO/summary.json" ]; then
  hybridrl report "$GRPO" "$PPO"
  cp "$GRPO/comparison.html" "$OUT/arithmetic-grpo-and-ppo-${WORLD}gpu.html"
fi
python "$HERE/result.py" "$OUT" "$WORLD"
