#!/usr/bin/env bash
# The reshard on 4 GPUs: its kernel, both transports against HF slices over NCCL, a lost rank, and the benchmark of what
# docs/adr/0003 and the README say. Run from the root, hybridrl installed:
#   tests/gpu/reshard.sh OUT [checks] [layouts] [large] [experts] [fused] [rivals]
# All but rivals take about 8 minutes together on four GPUs of 140 GB, rivals 5 more: the ways of others, into the same parameters.
# TURN=FILE: ranks import all that they need, and touch no GPU until there is that file.
set -uo pipefail
OUT=$1
shift
PARTS=" ${*:-checks layouts large experts fused rivals} "
wants() { [[ $PARTS == *" $1 "* ]]; }
export OMP_NUM_THREADS=4 PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}"
bench() { python benchmarks/bench_reshard_gpu.py "$@" ${TURN:+--turn "$TURN"} --limit-s "${LIMIT_S:-200}"; }
at_once() { bench "$@" --frozen --at-once --no-baselines; }
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
  for kind in packed peer; do check lost_$kind "${ranks[@]}" tests/dist/lost_rank_worker.py $kind - - 4 & done
  wait
fi
# 0.5B has 14 attention heads, which four ranks cannot share.
if wants layouts; then
  at_once "$OUT/layouts.json" 7b/tp4/tp1 7b/tp4/tp2 7b/tp2pp2/tp4 7b/tp4/tp4 7b/tp2dp2/tp2 \
    0.5b/tp2dp2/tp1 0.5b/tp2pp2/tp2 0.5b/tp2dp2/tp2
fi
# Together as the GPUs have room for them.
if wants large; then
  at_once "$OUT/large1.json" 32b/tp4/tp1 32b/tp4/tp4
  at_once "$OUT/large2.json" 32b/tp4/tp2 32b/tp2pp2/tp4
fi
if wants experts; then
  at_once "$OUT/experts.json" qwen3-30b-a3b/dp4ep4/tp1 qwen3-30b-a3b/dp4ep4/tp4ep4
fi
if wants fused; then
  bench "$OUT/fused.json" --fused 7b/dp4/tp4
fi
if wants rivals; then
  bench "$OUT/tp4.json" 7b/tp4/tp1 7b/tp4/tp2
  bench "$OUT/tp2pp2.json" 7b/tp2pp2/tp4
fi
