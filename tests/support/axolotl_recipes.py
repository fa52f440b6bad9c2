"""Recipes of fine-tuning in Axolotl's form, one for each of several families, with the keys that its examples have.

`BASE` and `DATA` stand for a model and a file of chats.
"""

COMMON = """
base_model: BASE
sequence_len: 64
micro_batch_size: 1
gradient_accumulation_steps: 2
max_steps: 2
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
logging_steps: 1
output_dir: ./outputs/out
dataset_prepared_path: last_run_prepared
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
resume_from_checkpoint:
local_rank:
xformers_attention:
early_stopping_patience:
debug:
deepspeed:
"""

RECIPES = {
    "Llama 3, QLoRA": """
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
lora_modules_to_save: []
chat_template: llama3
datasets:
  - path: DATA
    type: chat_template
    field_messages: messages
    message_property_mappings:
      role: role
      content: content
    roles:
      system: [system]
      user: [user]
      assistant: [assistant]
val_set_size: 0.0
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
optimizer: paged_adamw_32bit
lr_scheduler: cosine
bf16: auto
fp16:
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
flash_attention: true
s2_attention:
warmup_steps: 1
evals_per_epoch: 4
eval_table_size:
eval_max_new_tokens: 128
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "</s>"
""",
    "Qwen 3, LoRA of a part": """
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
chat_template: qwen3
datasets:
  - path: DATA
    type: chat_template
    split: train
    field_messages: messages
    message_property_mappings:
      role: role
      content: content
val_set_size: 0.0
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, down_proj, up_proj]
lora_mlp_kernel: true
lora_qkv_kernel: true
lora_o_kernel: true
optimizer: adamw_torch_4bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: offload
gradient_checkpointing_kwargs:
  use_reentrant: false
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
""",
    "Gemma 3": """
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
ddp_find_unused_parameters: true
load_in_8bit: false
load_in_4bit: true
adapter: qlora
chat_template: gemma3
eot_tokens:
  - <end_of_turn>
datasets:
  - path: DATA
    type: chat_template
    field_messages: messages
    message_property_mappings:
      role: role
      content: content
lora_r: 32
lora_alpha: 16
lora_dropout: 0
lora_target_linear: true
lora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj'
sample_packing: true
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: true
fp16:
tf32: false
gradient_checkpointing: true
eager_attention: true
warmup_ratio: 0.1
weight_decay: 0.0
loss_watchdog_threshold:
loss_watchdog_patience:
""",
    "Mistral, all weights": """
model_type: MistralForCausalLM
tokenizer_type: LlamaTokenizer
tokenizer_use_fast: false
is_mistral_derived_model: true
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: DATA
    type: chat_template
chat_template: chatml
val_set_size: 0.05
eval_sample_packing: false
sample_packing: true
pad_to_sequence_len: true
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: auto
fp16: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 1
evals_per_epoch: 4
eval_table_size:
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  bos_token: "<s>"
  eos_token: "</s>"
  unk_token: "<unk>"
""",
    "Phi 3, LoRA of named layers": """
trust_remote_code: true
model_type: AutoModelForCausalLM
chat_template: phi_3
datasets:
  - path: DATA
    type: chat_template
val_set_size: 0.01
adapter: lora
lora_model_dir:
lora_r: 64
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
sample_packing: true
pad_to_sequence_len: true
optimizer: adamw_torch_fused
adam_beta2: 0.95
adam_epsilon: 0.00001
max_grad_norm: 1.0
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
flash_attention: true
eval_steps: 1000
save_steps: 5000
eval_batch_size: 2
warmup_ratio: 0.2
weight_decay: 0.1
""",
    "DeepSeek, all weights, FSDP": """
trust_remote_code: true
load_in_4bit: false
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
chat_template: tokenizer_default
datasets:
  - path: DATA
    type: chat_template
    field_messages: messages
    message_field_role: role
    message_field_content: content
    roles_to_train: [assistant]
    train_on_eos: turn
special_tokens:
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
flash_attention: true
optimizer: adamw_torch
lr_scheduler: cosine
bf16: auto
warmup_steps: 1
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: false
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
""",
    "GLM-4, QLoRA": """
load_in_4bit: true
adapter: qlora
datasets:
  - path: DATA
    type: chat_template
chat_template: tokenizer_default_fallback_chatml
val_set_size: 0
lora_model_dir:
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - down_proj
  - up_proj
  - q_proj
  - v_proj
  - k_proj
  - o_proj
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_ratio: 0.1
evals_per_epoch: 1
saves_per_epoch: 1
weight_decay: 0.0
""",
    "Granite, alpaca": """
load_in_8bit: true
adapter: lora
datasets:
  - path: ALPACA
    type: alpaca
shuffle_merged_datasets: true
val_set_size: 0.1
lora_r: 8
lora_alpha: 16
lora_dropout: 0.0
lora_target_modules:
  - q_proj
  - v_proj
sample_packing: false
pad_to_sequence_len: false
optimizer: adamw_torch
lr_scheduler: linear
bf16: false
fp16: false
float32: true
gradient_checkpointing: false
warmup_steps: 1
evals_per_epoch: 1
saves_per_epoch: 1
weight_decay: 0.01
seed: 42
""",
    "Cohere, chats with roles of their own": """
load_in_4bit: true
adapter: qlora
datasets:
  - path: OTHER
    type: chat_template
    chat_template: chatml
    field_messages: conversation
    message_property_mappings:
      role: speaker
      content: text
    roles:
      user: [person]
      assistant: [machine]
    roles_to_train: [assistant]
    train_on_eos: turn
chat_template: chatml
val_set_size: 0.0
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sample_packing: true
pad_to_sequence_len: true
optimizer: paged_adamw_32bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
sdp_attention: true
warmup_ratio: 0.1
weight_decay: 0.0
""",
    "Falcon, completion": """
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
adapter: lora
datasets:
  - path: TEXT
    type: completion
    field: text
val_set_size: 0.0
lora_r: 16
lora_alpha: 32
lora_dropout: 0.0
lora_target_linear: true
sample_packing: true
optimizer: adamw_bnb_8bit
torchdistx_path:
lr_scheduler: constant
bf16: auto
gradient_checkpointing: true
flash_attention:
gptq_groupsize:
gptq_model_v1:
warmup_steps: 1
weight_decay: 0.0
special_tokens:
  pad_token: "</s>"
  bos_token: "<s>"
  eos_token: "</s>"
""",
    "Llama 3, DPO": """
rl: dpo
chat_template: chatml
datasets:
  - path: PAIRS
    ds_type: json
    type: chat_template.default
    field_messages: prompt
    field_chosen: chosen
    field_rejected: rejected
    message_property_mappings:
      role: role
      content: content
load_in_8bit: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sample_packing: false
pad_to_sequence_len: true
optimizer: adamw_8bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
""",
    "Qwen 2.5, KTO": """
rl: kto
rl_beta: 0.5
kto_desirable_weight: 0.2
remove_unused_columns: false
chat_template: chatml
datasets:
  - path: LABELLED
    type: llama3.ultra
    split: train
load_in_8bit: true
adapter: lora
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
sample_packing: false
pad_to_sequence_len: false
optimizer: adamw_8bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
warmup_steps: 1
weight_decay: 0.0
""",
    "Mistral, ORPO": """
rl: orpo
orpo_alpha: 0.1
remove_unused_columns: false
chat_template: chatml
datasets:
  - path: PAIRS
    type: chat_template.argilla
val_set_size: 0.1
adapter: lora
lora_r: 16
lora_alpha: 8
lora_dropout: 0.05
lora_target_linear: true
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
warmup_steps: 1
weight_decay: 0.0
""",
}
