"""Do the fields of a config fit each other? Pure rules, each a sentence with the value, the rule and the remedy.

A rule names the fields it reads. It is asked only when each of them is sound by itself (given, in its range, readable),
so that no rule repeats what is known and none has to fear a zero.
"""

from collections.abc import Collection

from megatronish.config.check_parallel import MESH, PARALLEL_RULES
from megatronish.config.config import Config
from megatronish.config.data import parse_blend, parse_split
from megatronish.config.fields import one_of
from megatronish.config.ranges import out_of_range
from megatronish.config.rules import LARGEST_NAMED, ConfigRule, divide
from megatronish.config.settle import SAMPLES, STEPS


def problems(config: Config, *, unsound: Collection[str] = ()) -> list[str]:
    """What is wrong with the config. Fields in `unsound` were complained about before; rules that read them rest."""
    found = dict(out_of_range(config, unsound=unsound))
    bad = {*unsound, *found}
    complaints = (rule.complaint(config) for rule in RULES if bad.isdisjoint(rule.fields))
    return [*found.values(), *filter(None, complaints)]


def _heads_of_hidden(config: Config) -> str | None:
    model = config.model
    if model.kv_channels is not None:
        return None
    return divide("hidden_size", model.hidden_size, "num_attention_heads", model.num_attention_heads)


def _key_value_heads(config: Config) -> str | None:
    model = config.model
    groups, heads = model.num_query_groups, model.num_attention_heads
    if groups is None:
        return None
    if not model.group_query_attention and groups != heads:
        return (
            f"num_query_groups={groups} needs group_query_attention (Megatron-LM would ignore it in silence); "
            "add --group-query-attention, or leave it out"
        )
    return divide("num_attention_heads", heads, "num_query_groups", groups)


def _positions(config: Config) -> str | None:
    rows, tokens = config.model.max_position_embeddings, config.training.seq_length
    if config.model.position_embedding_type != "learned_absolute" or rows is None or rows >= tokens:
        return None
    if config.checkpoint.load_hf is not None or config.checkpoint.use_checkpoint_args:
        return (
            f"seq_length={tokens} exceeds the {rows} positions that the model has learned; "
            f"use --seq-length {rows} or less"
        )
    return (
        f"max_position_embeddings={rows} must be at least seq_length={tokens}; "
        f"use --max-position-embeddings {tokens}, or a shorter --seq-length"
    )


def _rope_head(config: Config) -> str | None:
    model = config.model
    turned = int(model.head_size * model.rotary_percent)
    if model.position_embedding_type != "rope" or (turned >= 2 and turned % 2 == 0):
        return None
    return (
        f"rotary_percent={model.rotary_percent} of a head of size {model.head_size} is {turned}, but RoPE turns pairs: "
        "it must be even and at least 2; change --rotary-percent, --kv-channels or --num-attention-heads"
    )


def _rope_scaling(config: Config) -> str | None:
    model = config.model
    if model.rope_scaling_type != "none" and model.position_embedding_type != "rope":
        return (
            f"rope_scaling_type={model.rope_scaling_type} needs position_embedding_type=rope, "
            f"not {model.position_embedding_type}; add --position-embedding-type rope, or leave the scaling out"
        )
    if model.rope_scaling == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        return (
            f"rope_high_freq_factor={model.rope_high_freq_factor} must be greater than "
            f"rope_low_freq_factor={model.rope_low_freq_factor}; Llama 3 has 4 and 1"
        )
    if model.rope_scaling == "yarn" and model.rope_beta_fast <= model.rope_beta_slow:
        return (
            f"rope_beta_fast={model.rope_beta_fast} must be greater than rope_beta_slow={model.rope_beta_slow}; "
            "the defaults are 32 and 1"
        )
    return None


def _batches(config: Config) -> str | None:
    batch, micro, dp = config.global_batch_size, config.training.micro_batch_size, config.layout.dp
    if batch % (micro * dp) == 0:
        return None
    nearest = max(1, round(batch / (micro * dp))) * micro * dp
    sizes = [size for size in range(1, min(batch, LARGEST_NAMED) + 1) if batch % (size * dp) == 0]
    other = f" or --micro-batch-size {one_of(sizes[:12])}" if sizes else ""
    return (
        f"global_batch_size={batch} must be divisible by micro_batch_size={micro} x data_parallel_size={dp}; "
        f"use --global-batch-size {nearest}{other}"
    )


def _ramp_up(config: Config) -> str | None:
    if config.training.rampup_batch_size is None:
        return None
    start, increment, samples = config.training.rampup_batch_size
    told = f"rampup_batch_size={start} {increment} {samples}"
    batch, micro, dp = config.global_batch_size, config.training.micro_batch_size, config.layout.dp
    if start < 1 or increment < 1 or samples < 0:
        return f"{told}: START and INCREMENT must be at least 1, SAMPLES not negative; start from {micro * dp}"
    if start % (micro * dp) or increment % (micro * dp):
        return (
            f"{told}: START and INCREMENT must be divisible by micro_batch_size={micro} x data_parallel_size={dp}; "
            f"use multiples of {micro * dp}"
        )
    if start > batch or (batch - start) % increment:
        return (
            f"{told}: global_batch_size={batch} must be START plus a whole number of INCREMENTs; "
            f"use --global-batch-size {start + max(1, round((batch - start) / increment)) * increment}"
        )
    return None


def _length_of_run(config: Config) -> str | None:
    if config.training.train_iters is None and config.training.train_samples is None:
        return "the length of the run is not given; add --train-iters or --train-samples"
    return None


def _at_least_a_step(config: Config) -> str | None:
    samples, batch = config.training.train_samples, config.global_batch_size
    if samples is None or samples >= batch:
        return None
    return f"train_samples={samples} must be at least global_batch_size={batch}; train longer, or on smaller batches"


def _warm_up(config: Config) -> str | None:
    training, optimizer = config.training, config.optimizer
    iters = (optimizer.lr_decay_iters, optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters)
    samples = (optimizer.lr_decay_samples, optimizer.lr_warmup_samples, optimizer.lr_wsd_decay_samples)
    counts = (("iters", training.train_iters, *iters), ("samples", training.train_samples, *samples))
    for unit, run, decay, warm_up, wsd in counts:
        whole_name, whole = (f"lr_decay_{unit}", decay) if decay is not None else (f"train_{unit}", run)
        if whole is None:
            continue
        if warm_up >= whole:
            return (
                f"lr_warmup_{unit}={warm_up} must be less than {whole_name}={whole}; "
                f"use a shorter warm-up, for example --lr-warmup-fraction 0.1"
            )
        if wsd is not None and wsd > whole:
            return (
                f"lr_wsd_decay_{unit}={wsd} must not exceed {whole_name}={whole}; "
                f"use --lr-wsd-decay-{unit} {whole} or less"
            )
    return None


def _wsd(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.lr_decay_style != "WSD" or optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples:
        return None
    unit = "samples" if config.training.train_samples is not None else "iters"
    return f"lr_decay_style=WSD needs the length of its last part; add --lr-wsd-decay-{unit}"


def _profile(config: Config) -> str | None:
    log, steps = config.log, config.training.train_iters
    first, end = log.profile_step_start, log.profile_step_end
    if not log.profile_schedule:
        return None
    if end <= first:
        return f"profile_step_end={end} must be greater than profile_step_start={first}; use {first + 1} for one step"
    if steps is not None and first > steps:
        return f"profile_step_start={first} is after the last step, train_iters={steps}; use an earlier one"
    return None


def _learning_rates(config: Config) -> str | None:
    optimizer = config.optimizer
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(optimizer, name)
        if optimizer.lr is not None and value > optimizer.lr:
            return f"{name}={value} must not exceed lr={optimizer.lr}; use a smaller one, or a larger --lr"
    return None


def _loss_scales(config: Config) -> str | None:
    training = config.training
    if not training.fp16 or training.min_loss_scale <= training.initial_loss_scale:
        return None
    return (
        f"min_loss_scale={training.min_loss_scale} must not exceed initial_loss_scale={training.initial_loss_scale}; "
        "use a smaller one, or a larger --initial-loss-scale"
    )


def _reduction_in_bf16(config: Config) -> str | None:
    if not config.parallel.grad_reduce_in_bf16 or config.training.bf16:
        return None
    return (
        f"grad_reduce_in_bf16 rounds gradients further than a run in {config.training.precision} does; "
        "add --bf16, or leave it out"
    )


def _weight_decay(config: Config) -> str | None:
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        if (start, end) == (None, None):
            return None
        return (
            f"start_weight_decay={start}, end_weight_decay={end} need a weight_decay_incr_style other than constant; "
            "add --weight-decay-incr-style linear or cosine, or use --weight-decay alone"
        )
    if start is None or end is None:
        return f"weight_decay_incr_style={style} needs both ends; add --start-weight-decay and --end-weight-decay"
    return None


def _attention(config: Config) -> str | None:
    dropout = config.model.attention_dropout
    if config.training.attention_backend != "flash" or dropout == 0:
        return None
    return (
        f"attention_backend=flash must have attention_dropout=0, not {dropout}: it draws masks of its own, which no "
        "other layout could draw again; add --attention-dropout 0, or use --attention-backend auto"
    )


def _data(config: Config) -> str | None:
    data = config.data
    if not (data.mock_data or data.data_path or data.train_data_path):
        return "no data is given; add --data-path PREFIX (of PREFIX.bin and PREFIX.idx), or --mock-data"
    if data.multiple_validation_sets and not (data.valid_data_path or data.data_path or data.mock_data):
        return "multiple_validation_sets needs several prefixes; add --valid-data-path, or leave it out"
    return None


def _blends(config: Config) -> str | None:
    data = config.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            parse_blend(getattr(data, name))
        except ValueError as error:
            return f"{name}={error}"
    return None


def _split(config: Config) -> str | None:
    try:
        train, _, _ = parse_split(config.data.split)
    except ValueError as error:
        return f"split={error}"
    if config.data.data_path and train == 0:
        return f"split={config.data.split!r} leaves nothing to train on; for example --split 969,30,1"
    return None


def _tokenizer(config: Config) -> str | None:
    data = config.data
    if data.mock_data:
        return None
    if data.tokenizer_type == "null" and data.vocab_size is None:
        return "tokenizer_type=null needs a vocabulary; add --vocab-size"
    if data.tokenizer_type == "sentencepiece" and data.tokenizer_model is None and config.checkpoint.load_hf:
        return (
            f"--load-hf {config.checkpoint.load_hf} holds no tokenizer that is known here (tokenizer.json, or "
            "tokenizer.model); let transformers save it anew, or name one with --tokenizer-model"
        )
    if data.tokenizer_type == "sentencepiece" and data.tokenizer_model is None:
        return (
            "tokenizer_type=sentencepiece needs its file; add --tokenizer-model FILE.model, or --tokenizer-type bytes, "
            "which needs none"
        )
    if data.tokenizer_type == "huggingface" and data.tokenizer_model is None:
        if (data.vocab_file is None) != (data.merge_file is None):
            return "vocab_file and merge_file belong together; add the other, or use --tokenizer-model tokenizer.json"
        if data.vocab_file is None:
            return (
                "tokenizer_type=huggingface needs its files; add --tokenizer-model tokenizer.json, or --vocab-file and "
                "--merge-file"
            )
    return None


def _starting_point(config: Config) -> str | None:
    keep = config.checkpoint
    if keep.load is not None or keep.load_hf is not None:
        return None
    if keep.finetune:
        return (
            "finetune takes its weights from a checkpoint, and none is given; add --load DIR, or leave --finetune out"
        )
    return None


def _arguments(config: Config) -> str | None:
    if not config.checkpoint.use_checkpoint_args or config.checkpoint.load is not None:
        return None
    return (
        "use_checkpoint_args takes the model's settings from a checkpoint, and none is given; add --load DIR, "
        "or leave --use-checkpoint-args out"
    )


def _kept_steps(config: Config) -> str | None:
    every, interval = config.checkpoint.keep_every, config.checkpoint.save_interval
    if every is None:
        return None
    if interval is None:
        return f"keep_every={every} keeps none of the steps in between without a save_interval; add --save-interval"
    if every % interval:
        return (
            f"keep_every={every} must be divisible by save_interval={interval}, or steps that it would keep are not "
            f"saved; use --keep-every {max(1, round(every / interval)) * interval}"
        )
    return None


_BATCH = (*MESH, "global_batch_size", "micro_batch_size")
_ROPE = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow")

RULES = (
    *PARALLEL_RULES,
    ConfigRule(("hidden_size", "num_attention_heads", "kv_channels"), _heads_of_hidden),
    ConfigRule(("num_attention_heads", "num_query_groups", "group_query_attention"), _key_value_heads),
    ConfigRule(("max_position_embeddings", "seq_length", "position_embedding_type"), _positions),
    ConfigRule(("hidden_size", "num_attention_heads", "kv_channels", "rotary_percent"), _rope_head),
    ConfigRule(("rope_scaling_type", "position_embedding_type", *_ROPE), _rope_scaling),
    ConfigRule(_BATCH, _batches),
    ConfigRule((*_BATCH, "rampup_batch_size"), _ramp_up),
    ConfigRule(("train_iters", "train_samples"), _length_of_run),
    ConfigRule((*_BATCH, "train_samples"), _at_least_a_step),
    ConfigRule((*STEPS, *SAMPLES), _warm_up),
    ConfigRule(("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"), _wsd),
    ConfigRule(("profile_schedule", "profile_step_start", "profile_step_end", "train_iters"), _profile),
    ConfigRule(("lr", "min_lr", "lr_warmup_init"), _learning_rates),
    ConfigRule(("fp16", "initial_loss_scale", "min_loss_scale"), _loss_scales),
    ConfigRule(("bf16", "fp16", "grad_reduce_in_bf16"), _reduction_in_bf16),
    ConfigRule(("attention_backend", "attention_dropout"), _attention),
    ConfigRule(("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"), _weight_decay),
    ConfigRule(("data_path", "train_data_path", "valid_data_path", "mock_data"), _data),
    ConfigRule(("data_path", "train_data_path", "valid_data_path", "test_data_path"), _blends),
    ConfigRule(("split",), _split),
    ConfigRule(("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"), _tokenizer),
    ConfigRule(("finetune", "load", "load_hf"), _starting_point),
    ConfigRule(("use_checkpoint_args", "load"), _arguments),
    ConfigRule(("keep_every", "save_interval"), _kept_steps),
)
