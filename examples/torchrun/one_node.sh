#!/usr/bin/env bash
# One node: torchrun starts one rank a GPU (or NPROC ranks on CPU). Use it in place of hybridrl's own
# launcher when a cluster's tools expect torchrun.
#   examples/torchrun/one_node.sh CONFIG [KEY=VALUE]...
set -euo pipefail
NPROC=${NPROC:-$(nvidia-smi -L 2>/dev/null | wc -l)}
exec torchrun --standalone --nproc-per-node="$NPROC" --no-python hybridrl train "$@"
