#!/usr/bin/env bash
# What one H200 can say about features that CPUs cannot measure. Run from the root, hybridrl and vLLM 0.26 installed:
#   tests/gpu/features.sh OUT [PART]...     (all parts: about 25 minutes; seconds of each, start included, stand beside it)
# TRITON_CACHE_DIR (default OUT/triton) keeps compiled kernels: without it vLLM needs two minutes to start Qwen3.5.
set -uo pipefail
OUT=$1
shift
PARTS=" ${*:-delta qwen35 oss agents images fp8 exact long lora} "
wants() { [[ $PARTS == *" $1 "* ]]; }
export OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/dist:$PWD/benchmarks:${PYTHONPATH:-}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" CUDA_DEVICE_MAX_CONNECTIONS=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$OUT/triton}"
MODELS=benchmarks/models
mkdir -p "$OUT"
limited() { # SECONDS NAME COMMAND...
  local name=$2 began=$SECONDS
  timeout "$1" "${@:3}" > "$OUT/$name.log" 2>&1
  echo "$name: $? after $((SECONDS - began)) s"
}
step() { limited "$1" "$2" python benchmarks/bench_step.py --out "$OUT/$2.json" "${@:3}" --limit-s "$1" --max-mismatch 1; }
if wants delta; then # 100: gradients of the gated delta rule and of Qwen3.5 in bf16 against fp32, and times
  limited 60 delta_cases python tests/delta_kernel_cases.py
  limited 90 delta_times python benchmarks/bench_delta_rule.py --out "$OUT/delta_rule.json"
  REFERENCE=$(mktemp -d)
  worker() { MODELS=qwen3_5_text torchrun --standalone --nproc-per-node=1 tests/gpu/train_worker.py "$@"; }
  export -f worker
  limited 60 qwen35_reference bash -c "worker reference $REFERENCE"
  limited 80 qwen35_gradients bash -c "worker compare $REFERENCE alone"
fi
if wants qwen35; then # 280 at the first start, 120 later
  step 300 step_qwen35 qwen3.5-4b/dp1/tp1 --prompts 8 --samples 8 --warmups 1 --steps 2 --set train.optimizer_memory=low_precision
fi
if wants oss; then # 75 each: the routers' choices are replayed, and not
  step 120 step_oss_replay gpt-oss-20b/dp1/tp1 --num-layers 3 --prompts 8 --samples 8 --warmups 1 --steps 2 --set algorithm.router_replay=rollout
  step 120 step_oss gpt-oss-20b/dp1/tp1 --num-layers 3 --prompts 8 --samples 8 --warmups 1 --steps 2
fi
if wants agents; then # 130 each
  for model in qwen2.5-0.5b smollm2-135m; do
    limited 160 "agents_$model" python benchmarks/bench_agents.py "$OUT/agents_$model.json" --model $MODELS/$model.json \
      --ways plain lean openai --turn-tokens 128 256 --repeats 1 --workers 8
  done
fi
if wants images; then # 150
  step 180 step_images qwen3-vl-4b/tp1/tp1 --image-tokens 1024 --prompt-tokens 1152 --response-tokens 256 --prompts 32 \
    --samples 8 --warmups 1 --steps 2 --text-steps 1 --micro-batch-tokens 8192 --set algorithm.kl_coef=0
fi
if wants fp8; then # 150: the kernel alone, then 7B with 64 requests of 1.5k to 2k tokens
  limited 60 fp8_linear python benchmarks/bench_fp8_linear.py --seconds 40 --table "$OUT/tilings.json"
  for case in "bf16 --quantization none" "fp8" "fp8_kv --kv-cache fp8"; do
    read -r name options <<< "$case"
    # shellcheck disable=SC2086
    limited 120 "7b_$name" python tests/gpu/fp8_engine.py $MODELS/qwen2.5-7b.json $options --table "$OUT/tilings.json" --decode 1536:512:64
  done
fi
if wants exact; then # 60 and 300
  limited 80 exact_operations python benchmarks/bench_exact_operations.py "$OUT/exact_operations.json"
  limited 400 exact python benchmarks/bench_exact.py "$OUT/exact.json" smollm2-135m qwen2.5-0.5b --steps 20
fi
if wants long; then # 100
  limited 60 prefix_attention python benchmarks/bench_prefix_attention.py --out "$OUT/prefix_attention.json"
  limited 90 long_worker python tests/gpu/long_worker.py "$OUT/long_worker.json" prompts branches muon
fi
if wants lora; then # 160: 7B below 80 GiB
  step 200 step_lora 7b/dp1/tp1 --prompts 32 --warmups 1 --steps 3 --set lora.rank=32 --set rollout.gpu_memory_share=0.25
fi
