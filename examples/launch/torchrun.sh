#!/bin/bash
# Two machines of eight GPUs with torchrun. Run this on each of them: NODE_RANK=0 ./torchrun.sh, NODE_RANK=1 ./torchrun.sh
# NODE_0 is a name of the first machine that both can reach; the run folder is on a disk that both share.
set -eu

torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" \
    --master-addr "${NODE_0:?a name of the first machine}" --master-port 29500 --max-restarts 3 \
    pretrain_gpt.py --config configs/llama-8b-8gpu.toml --run-dir runs/llama-8b \
    --tp 4 --pp 2 --save-interval 500 --async-save --keep-last 3
