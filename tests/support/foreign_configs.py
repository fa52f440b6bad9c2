"""Configs of other frameworks for tests, and the flags of a model that they leave open."""

import tomllib
from typing import Any

MODEL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--mock-data", "--vocab-size", "64"]


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/local/nvme", "buffer_count": 5},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "zero_quantized_gradients": True,
        "zero_quantized_weights": True,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
    "wall_clock_breakdown": False,
    "tensorboard": {"enabled": True, "output_path": "boards"},
    "flops_profiler": {"enabled": True},
    "curriculum_learning": {"enabled": True},
    "made_up": 1,
}

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
sequence_len: 2048
sample_packing: true
adapter: lora
lora_r: 16
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 1
max_steps: 500
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
eval_steps: 0.1
save_steps: 50
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
output_dir: ./outputs/out
wandb_project: mine
wandb_watch: all
deepspeed: zero2.json
odd_key: 3
"""


def settings_of(text: str) -> dict[str, Any]:
    """{field: value} of a TOML text."""
    return {name: value for section in tomllib.loads(text).values() for name, value in section.items()}


ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""
