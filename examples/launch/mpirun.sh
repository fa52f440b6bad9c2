#!/bin/bash
# Two machines of eight GPUs with Open MPI. On one machine, leave --host, --npernode and both -x out.
set -eu

mpirun -n 16 --npernode 8 --host node1:8,node2:8 --bind-to none \
    -x MASTER_ADDR=node1 -x MASTER_PORT=29500 \
    python pretrain_gpt.py --config configs/llama-8b-8gpu.toml --run-dir runs/llama-8b \
    --tp 4 --pp 2 --save-interval 500 --async-save --keep-last 3
