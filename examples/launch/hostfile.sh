#!/bin/bash
# Two machines of eight GPUs over ssh. Run this on any machine that reaches both without a password:
#   printf 'worker-0 slots=8\nworker-1 slots=8\n' > hosts; HOSTFILE=hosts ./hostfile.sh
# The run folder, the code and Python are on a disk that all of them share.
set -eu

python tools/launch.py --hostfile "${HOSTFILE:?a file of lines such as: worker-0 slots=8}" --master-port 29500 -- \
    pretrain_gpt.py --config configs/llama-8b-8gpu.toml --run-dir runs/llama-8b \
    --tp 4 --pp 2 --save-interval 500 --async-save --keep-last 3
