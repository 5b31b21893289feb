#!/usr/bin/env bash
# The trainer on 4 GPUs: gradients of transformer-engine's layers in bf16 against fp32 of torch's, in several layouts, and
# what share of the GPUs' peak the passes reach. Run from the root, hybridrl installed:
#   tests/gpu/train.sh OUT [parity] [bench]      (parity: about 3 minutes; bench: about 6)
set -uo pipefail
OUT=$1
shift
PARTS=" ${*:-parity bench} "
wants() { [[ $PARTS == *" $1 "* ]]; }
export OMP_NUM_THREADS=4 PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/dist:${PYTHONPATH:-}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" CUDA_DEVICE_MAX_CONNECTIONS=1
worker() { timeout 100 torchrun --standalone --nproc-per-node="$1" tests/gpu/train_worker.py "${@:2}"; }
bench() { python benchmarks/bench_train.py --out "$@"; }
mkdir -p "$OUT"
if wants parity; then
  REFERENCE=$(mktemp -d)
  worker 1 reference "$REFERENCE" > "$OUT/reference.log" 2>&1; echo "reference: $?"
  worker 1 compare "$REFERENCE" alone > "$OUT/alone.log" 2>&1; echo "one GPU: $?"
  worker 4 compare "$REFERENCE" dp4 tp4 tp2dp2 tp2cp2 tp2pp2 > "$OUT/layouts.log" 2>&1; echo "layouts: $?"
fi
if wants bench; then
  # Whole activations of 16,384 tokens, beside weights, gradients and a quarter of the optimizer, are more than one GPU has.
  bench "$OUT/train_7b_dp4.json" 7b/tp1dp4 --set train.recompute=selective
  bench "$OUT/train_7b_tp.json" 7b/tp2dp2 7b/tp4 --tails
  bench "$OUT/train_0.5b.json" 0.5b/dp4 --tails
  bench "$OUT/train_7b_torch.json" 7b/tp2dp2 --layers torch --iterations 3
fi
