"""Keys of Axolotl's config.yml: the field that each is, or why it is not carried over."""

from megatronish.compat.importers.imported import Rule, dropped, field

CHECKPOINTS = dropped("every checkpoint loads in every layout")
SPEED = dropped("it changes speed and memory alone")
FUSED = dropped("which kernels are used is decided at run time")
EPOCHS = dropped("intervals are in steps; use --eval-interval and --save-interval")
LORA = dropped("it is not there for adapters")
QUANTISED = dropped("there is NF4 for the base of adapters, --quantize-base nf4, and no other quantisation")
QUANTISED_ALONE = "only the base of adapters is quantised; add --adapter-type lora --quantize-base nf4"
CHATS = dropped("name chats with --dataset-type chat --data-path FILE, and their template with --chat-template")
PREFERENCES = dropped("rewards are not learned, and nothing is generated in training")
FITTING = dropped("chats are packed, and one that is longer than a row is cut")
HUB = dropped("nothing is uploaded or downloaded")
NOT_THERE = dropped("it is not there")
DATA = dropped("make .bin/.idx files with tools/preprocess_data.py, and name them with --data-path")
MODEL = dropped("the files of the model say it")
PLUGINS = dropped("Axolotl's plug-ins are its own classes; here a plug-in is a file given with --plugin")
RESUME = dropped(
    "it is a Hugging Face folder, which --load cannot read; convert it with megatronish convert --from hf "
    "--to megatronish, and name the new folder with --load"
)
EVERY_TOKEN = "the loss of texts counts every token; that of --dataset-type chat counts answers only"

RULES: dict[str, Rule] = {
    "base_model": field("load_hf"),
    "sequence_len": field("seq_length"),
    "micro_batch_size": field("micro_batch_size"),
    "max_steps": field("train_iters"),
    "learning_rate": field("lr"),
    "weight_decay": field("weight_decay"),
    "max_grad_norm": field("clip_grad"),
    "adam_beta1": field("adam_beta1"),
    "adam_beta2": field("adam_beta2"),
    "adam_epsilon": field("adam_eps"),
    "warmup_steps": field("lr_warmup_iters"),
    "warmup_ratio": field("lr_warmup_fraction"),
    "logging_steps": field("log_interval"),
    "save_total_limit": field("keep_last"),
    "output_dir": field("run_dir"),
    "torch_compile": field("compile"),
    "seed": field("seed"),
    "resume_from_checkpoint": RESUME,
    "plugins": PLUGINS,
    "tensor_parallel_size": field("tensor_model_parallel_size"),
    "context_parallel_size": field("context_parallel_size"),
    "sequence_parallel_degree": field("context_parallel_size"),
    "dp_replicate_size": field("num_distributed_optimizer_instances"),
    "wandb_project": field("wandb_project"),
    "wandb_name": field("wandb_exp_name"),
    "wandb_entity": field("wandb_entity"),
    **dict.fromkeys(("evals_per_epoch", "saves_per_epoch", "eval_strategy", "save_strategy"), EPOCHS),
    **dict.fromkeys(("datasets", "test_datasets", "pretraining_dataset", "dataset_prepared_path"), DATA),
    **dict.fromkeys(("peft_layers_to_transform", "relora_steps", "qlora_sharded_model_loading"), LORA),
    **dict.fromkeys(("load_in_8bit", "gptq", "quantization"), QUANTISED),
    **dict.fromkeys(
        ("chat_template", "chat_template_jinja", "train_on_inputs", "roles_to_train", "train_on_eos"), CHATS
    ),
    **dict.fromkeys(("trl", "reward_model", "process_reward_model", "dpo_use_weighting"), PREFERENCES),
    **dict.fromkeys(("group_by_length", "excess_length_strategy"), FITTING),
    **dict.fromkeys(
        (
            *("base_model_config", "model_type", "tokenizer_type", "tokenizer_config", "trust_remote_code"),
            *("is_llama_derived_model", "is_mistral_derived_model", "special_tokens", "tokens", "tokenizer_use_fast"),
            *("overrides_of_model_config", "revision_of_model", "strict"),
        ),
        MODEL,
    ),
    **dict.fromkeys(
        (
            *("flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
            *("flash_attn_rms_norm", "flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv"),
            *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "attn_implementation"),
            *("liger_fused_linear_cross_entropy", "cut_cross_entropy", "liger_layer_norm", "liger_cross_entropy"),
        ),
        FUSED,
    ),
    **dict.fromkeys(
        (
            *("torch_compile_backend", "torch_compile_mode", "tf32", "dataset_processes", "dataloader_num_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "eval_batch_size", "pad_to_sequence_len"),
            *("ddp_timeout", "ddp_bucket_cap_mb", "low_cpu_mem_usage", "dp_shard_size", "heads_k_stride", "gc_steps"),
            *("gradient_checkpointing_kwargs", "auto_resume_from_checkpoints", "save_safetensors", "local_rank"),
        ),
        SPEED,
    ),
    **dict.fromkeys(("hub_model_id", "push_dataset_to_hub", "hub_strategy", "hf_use_auth_token"), HUB),
    **dict.fromkeys(
        (
            *("early_stopping_patience", "neftune_noise_alpha", "unfrozen_parameters", "loss_watchdog_threshold"),
            *("loss_watchdog_patience", "lr_groups", "embedding_lr", "embedding_lr_scale", "rope_scaling", "debug"),
            *(
                "lr_scheduler_kwargs",
                "optim_args",
                "optim_target_modules",
                "eval_sample_packing",
                "multipack_real_batches",
            ),
        ),
        NOT_THERE,
    ),
}

ABSENT: dict[str, float] = {
    "seq_length": 512,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "seed": 42,
}
"""What keys mean that are absent: the defaults of Axolotl, and of the Trainer of transformers, which it calls."""
PEFT = {"lora_rank": 8, "lora_alpha": 8.0, "lora_dropout": 0.0}
PEFT_TARGETS = ["q_proj", "v_proj"]
"""The same of PEFT's LoRA in Llama and its relatives."""
STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""FSDP's strategies by their numbers, in older files."""

OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "muon": "muon"}
DECAYS = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
}
