"""Is each field of a config given, and in its range, whatever the others are?"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, read_fields
from megatronish.config.model import ModelConfig

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")


class Range(NamedTuple):
    """What a number must be, and the fields it goes for, apart by blanks."""

    rule: str
    test: Callable[[float], bool]
    fields: str


# Every number of the config stands in exactly one of these.
RANGES = (
    Range(
        "must be at least 1",
        lambda value: value >= 1,
        """
        num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups
        max_position_embeddings rope_original_max_positions window_size make_vocab_size_divisible_by
        tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size context_parallel_size
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank recompute_num_layers
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        num_distributed_optimizer_instances ddp_bucket_size seq_length micro_batch_size global_batch_size train_iters
        train_samples loss_scale_window hysteresis exit_interval eval_interval lr_decay_iters lr_decay_samples
        lr_wsd_decay_iters lr_wsd_decay_samples muon_num_ns_steps
        profile_step_start profile_step_end
        save_interval keep_last keep_every log_interval tensorboard_log_interval sample_tokens vocab_size
        """,
    ),
    Range(
        "must not be negative",
        lambda value: value >= 0,
        """
        eval_iters seed min_lr lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay
        start_weight_decay end_weight_decay clip_grad loss_scale num_workers ckpt_step
        """,
    ),
    Range(
        "must be greater than 0",
        lambda value: value > 0,
        """
        rotary_base rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_beta_fast
        rope_beta_slow norm_epsilon init_method_std distributed_timeout_minutes lr adam_eps muon_extra_scale_factor
        exit_duration_in_mins peak_tflops_per_device initial_loss_scale min_loss_scale
        """,
    ),
    Range(
        "must be at least 0 and less than 1",
        lambda value: 0 <= value < 1,
        "attention_dropout hidden_dropout lr_warmup_fraction adam_beta1 adam_beta2 sgd_momentum muon_momentum",
    ),
    Range(
        "must be greater than 0 and at most 1",
        lambda value: 0 < value <= 1,
        "rotary_percent",
    ),
)

# More is a slip of the finger, over which some loop would count for hours or some product overflow.
LARGEST = (
    Range(
        "must be at most 2^120, as fp32 ends at 2^128",
        lambda value: value <= 2.0**120,
        "loss_scale initial_loss_scale min_loss_scale",
    ),
    Range(
        "must be at most 100000",
        lambda value: value <= 100_000,
        """
        num_layers tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size context_parallel_size
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank recompute_num_layers
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers muon_num_ns_steps
        """,
    ),
    Range(
        f"must be at most {2**31 - 1}",
        lambda value: value < 2**31,
        """
        hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups max_position_embeddings
        rope_original_max_positions window_size make_vocab_size_divisible_by seq_length micro_batch_size
        global_batch_size vocab_size sample_tokens num_workers
        """,
    ),
    Range(
        f"must be at most {2**63 - 1}",
        lambda value: value < 2**63,
        """
        ddp_bucket_size train_iters train_samples exit_interval eval_interval eval_iters lr_decay_iters lr_decay_samples
        lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples save_interval keep_last keep_every
        ckpt_step log_interval profile_step_start profile_step_end tensorboard_log_interval
        num_distributed_optimizer_instances seed loss_scale_window hysteresis
        """,
    ),
)


MOST_ELEMENTS = 2**48  # of a tensor; torch counts bytes in 64 bits, and no model comes near


def absurd_size(model: ModelConfig, *, vocab_size: int, seq_length: int) -> str | None:
    """What is larger than that of any model, in one that somebody else described: asked before its tensors are."""
    values = {**vars(model), "ffn_hidden_size": model.ffn_size, "kv_channels": model.head_size}
    values |= {"vocab_size": vocab_size, "seq_length": seq_length}
    for rule, test, fields in LARGEST:
        for name in fields.split():
            if values.get(name) is not None and not test(values[name]):
                return f"{name}={values[name]} {rule}"
    qkv_rows = (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_size
    rows = max(vocab_size, model.max_position_embeddings or seq_length, qkv_rows, 2 * model.ffn_size)
    if rows * model.hidden_size > MOST_ELEMENTS:
        return f"its largest tensor would have {rows * model.hidden_size} elements, and {MOST_ELEMENTS} is the limit"
    return None


def out_of_range(config: Config, *, unsound: Collection[str]) -> Iterator[tuple[str, str]]:
    """(field, sentence) for each field that is missing or out of range."""
    values = {name: value for name, value in read_fields(config).items() if name not in unsound and value is not None}
    for name in REQUIRED:
        field = FIELDS[name]
        if name not in unsound and values.get(name, field.default) == field.default:
            values.pop(name, None)
            keep = config.checkpoint
            remedy = f"set it in [{field.section}] of the config file, or add {field.flag}"
            if keep.load is not None and not keep.use_checkpoint_args and name in (*vars(config.model), "seq_length"):
                remedy = f"add --use-checkpoint-args, which takes it from --load {keep.load}, or {field.flag}"
            yield name, f"{name} is not given; {remedy}"
    for rule, test, fields in (*RANGES, *LARGEST):
        for name in fields.split():
            if name in values and not (test(values[name]) and values[name] != math.inf):
                default = FIELDS[name].default
                remedy = f"the default is {default}" if default else f"change {FIELDS[name].flag}"
                yield name, f"{name}={values[name]} {rule}; {remedy}"
