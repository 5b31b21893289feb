#!/usr/bin/env bash
# SGLang in the training processes on one or two GPUs. Run from the root with torch 2.11 + CUDA and SGLang 0.5.16 importable
# (PYTHONPATH may name a folder that holds them; hybridrl need not be installed):
#   tests/gpu/sglang.sh OUT 1 [contract] [cycles] [speed] [step]     on one GPU, about 3, 4, 3 and 3 minutes
#   tests/gpu/sglang.sh OUT 2 [pairs] [contract2] [speed2]           on two
# OUT gets JSON and a log of every part; summary.txt has one line each. What it must show: every sync is bitwise by checksum
# (rollout.verify=1 in all of them); 100 cycles leave the free memory within 1%; loop_to_plain >= 0.95; the 0.5B generation
# (32 prompts x 8, 512 tokens) <= 1.0 s; mismatch as with vLLM within 20%.
set -uo pipefail
OUT=$1
GPUS=$2
shift 2
if [ "$GPUS" = 1 ]; then DEFAULT="contract cycles speed step"; else DEFAULT="pairs contract2 speed2"; fi
PARTS=" ${*:-$DEFAULT} "
mkdir -p "$OUT"
wants() { [[ $PARTS == *" $1 "* ]]; }
export OMP_NUM_THREADS=4 CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$PWD:$PWD/tests:$PWD/benchmarks:${PYTHONPATH:-}"
part() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout -k 20 "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | grep --line-buffered '^\[bench\]'
  echo "$name: exit ${PIPESTATUS[0]} after $((SECONDS - began)) s" | tee -a "$OUT/summary.txt"
  tail -n 4 "$OUT/$name.log"
}
bench() { # NAME LIMIT_S CASE... OPTIONS...
  local name=$1 limit=$2
  shift 2
  part "$name" "$((limit + 60))" python benchmarks/bench_rollout.py "$OUT/$name.json" "$@" --world "$GPUS" --engine sglang --limit-s "$limit"
}
python -m hybridrl.cli.main check > "$OUT/check.txt" 2>&1
grep -i sglang "$OUT/check.txt"

# Tokens, log-probabilities, seeds, stops, interruptions, updates of one engine against transformers, in bf16.
if wants contract; then part contract 300 python tests/gpu/engine_worker.py sglang; fi
# Whole steps with every phase change: free memory after each, and the mismatch. Graphs must stay valid.
if wants cycles; then bench cycles 500 0.5b/tp1/tp1 --cycles 100 --new-tokens 64; fi
# In the loop against plain SGLang, short and long responses; and what an interruption in the middle costs. What is known when the
# time is over is in speed.json, or in speed.partial.json. On a machine just started kernels of attention may be compiled first, a minute.
if wants speed; then
  bench speed 400 0.5b/tp1/tp1 --throughput --repeats 3 --steps 0 --interrupt --new-tokens 512
  bench speed7b 500 7b/tp1/tp1 --throughput --repeats 3 --steps 0 --new-tokens 256 --set train.optimizer_memory=host
fi
# A step of 0.5B as the throughput of a step is reported: medians/time of its phases are in the JSON.
if wants step; then bench step 300 0.5b/tp1/tp1 --steps 6 --new-tokens 512; fi

if wants contract2; then
  part contract2 400 torchrun --standalone --nproc-per-node=2 tests/gpu/engine_worker.py sglang
fi
if wants pairs; then
  bench pairs 900 0.5b/tp2/tp1 0.5b/tp1/tp2 0.5b/tp2/tp2 0.5b/pp2/tp1 0.5b/tp1/tp1
  bench pairs7b 900 7b/tp2/tp1 7b/tp2/tp2 --set train.optimizer_memory=host
fi
if wants speed2; then bench speed2 500 0.5b/tp2/tp1 0.5b/tp2/tp2 --throughput --new-tokens 512; fi
cat "$OUT/summary.txt"
