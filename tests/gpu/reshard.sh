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
bench() { python benchmarks/bench_reshard_gpu.py "$@" --limit-s 120; }
if wants checks; then  # all at once: they check, and time nothing
  check() {
    local name=$1
    shift
    timeout 110 "$@" > "$OUT/$name.log" 2>&1
    echo "$name: $?" | tee -a "$OUT/checks.txt"
  }
  ranks=(torchrun --standalone --nproc-per-node=4)
  check kernels python tests/kernel_cases.py &
  check reshard "${ranks[@]}" tests/dist/reshard_worker.py "$(mktemp -d)" 0 40 4 &
  check block_fp8 "${ranks[@]}" tests/dist/quantized_worker.py &
  for kind in packed peer; do check lost_$kind "${ranks[@]}" tests/dist/lost_rank_worker.py $kind - - 4 & done
  wait
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
