#!/usr/bin/env bash
# Several nodes: run the same command on every node, each with its own NODE_RANK. The run folder must
# be on a file system that all nodes share, because all ranks write checkpoints.
#   MASTER_ADDR=node0 MASTER_PORT=29500 NNODES=2 NODE_RANK=0 examples/torchrun/several_nodes.sh CONFIG
# Under Slurm, inside sbatch:
#   export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
#   srun --ntasks-per-node=1 bash -c 'NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID \
#       examples/torchrun/several_nodes.sh CONFIG'
set -euo pipefail
: "${MASTER_ADDR:?the host name of the first node}" "${NNODES:?how many nodes}" "${NODE_RANK:?0, 1, ...}"
NPROC=${NPROC:-$(nvidia-smi -L 2>/dev/null | wc -l)}
exec torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" --no-python hybridrl train "$@"
