#!/usr/bin/env bash
# The CPU form on GPUs: parity of layouts over NCCL, and the quickstart for a few steps. Run from the root:
#   tests/gpu/first_run.sh OUT
set -uo pipefail
OUT=$1
export OMP_NUM_THREADS=4 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}"
ORDER=tp-cp-ep-dp-pp
python -c "from pathlib import Path; from tiny_models import *; save_tiny_models(Path('/tmp/models'), FAMILIES)"
ranks() { torchrun --standalone --nproc-per-node="$1" tests/dist/parity_worker.py "${@:2}"; }
ranks 1 reference /tmp/models llama,qwen2,qwen3 > "$OUT/reference.log" 2>&1; echo "reference: $?"
ranks 4 compare /tmp/models llama,qwen2,qwen3 2,2,1,1,$ORDER 1,2,1,2,$ORDER 2,1,2,1,$ORDER 2,1,1,1,$ORDER \
  > "$OUT/compare.log" 2>&1; echo "compare: $?"
python -m hybridrl.cli.main train examples/quickstart/sft.yaml steps.num_steps=30 model.dtype=float32 --world 4 \
  > "$OUT/sft.log" 2>&1; echo "sft: $?"
python -m hybridrl.cli.main convert runs/quickstart-sft runs/quickstart-sft/hf --to hf > "$OUT/convert.log" 2>&1
echo "convert: $?"
python -m hybridrl.cli.main train examples/quickstart/grpo.yaml steps.num_steps=10 model.dtype=bfloat16 --world 4 \
  rollout.verify=5 > "$OUT/grpo.log" 2>&1; echo "grpo: $?"
cp runs/quickstart-grpo/metrics.jsonl "$OUT"/
tail -n 3 "$OUT"/*.log
