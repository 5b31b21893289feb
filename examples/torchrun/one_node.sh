#!/usr/bin/env bash
# One node: torchrun starts one rank per GPU (or NPROC ranks on CPU). Use it instead of hybridrl's own
# launcher if a cluster's tools expect torchrun.
#   examples/torchrun/one_node.sh CONFIG [KEY=VALUE]...
set -euo pipefail
NPROC=${NPROC:-$(nvidia-smi -L 2>/dev/null | wc -l)}
exec torchrun --standalone --nproc-per-node="$NPROC" --no-python hybridrl train "$@"
