#!/usr/bin/env bash
# The reshard on 4 GPUs: its kernel, both transports against HF slices over NCCL, a lost rank, and the benchmark of what
# docs/adr/0003 and the README say. Run from the root, hybridrl installed:
#   tests/gpu/reshard.sh OUT [checks] [gathered] [local] [fused]      (all of them: about 15 minutes)
set -uo pipefail
OUT=$1
shift
PARTS=" ${*:-checks gathered local fused} "
wants() { [[ $PARTS == *" $1 "* ]]; }
export OMP_NUM_THREADS=4 PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}"
ranks() { timeout 90 torchrun --standalone --nproc-per-node=4 "$@"; }
bench() { python benchmarks/bench_reshard_gpu.py "$@" --limit-s 120; }
if wants checks; then
  timeout 60 python tests/kernel_cases.py; echo "kernel cases: $?"
  ranks tests/dist/reshard_worker.py "$(mktemp -d)" 0 8 4 > "$OUT/reshard.log" 2>&1; echo "reshard: $?"
  ranks tests/dist/quantized_worker.py > "$OUT/quantized.log" 2>&1; echo "block FP8: $?"
  for kind in packed peer; do
    ranks tests/dist/lost_rank_worker.py $kind - - 4 > "$OUT/lost_$kind.log" 2>&1; echo "lost rank, $kind: $?"
  done
fi
if wants gathered; then
  bench "$OUT/tp4.json" 7b/tp4/tp1 7b/tp4/tp2
  bench "$OUT/tp2pp2.json" 7b/tp2pp2/tp4 --set train.order=cp-ep-dp-pp-tp
fi
if wants local; then
  bench "$OUT/local.json" 7b/tp4/tp4 7b/tp2dp2/tp2 --no-baselines
fi
if wants fused; then
  bench "$OUT/fused.json" --fused 7b/tp2dp2/tp1 7b/dp4/tp4
fi
