"""Table of the flags of Megatron-LM that are not fields here, and the printer of docs/FLAGS.md.

A flag of Megatron-LM either is a field with the same name and meaning, or stands in `KNOWN`: it *means* a field of
another name, or it is *idle* (accepted, because the run does so in any case, or because it changes no number), or it is
*refused*, with a remedy. Values in `harmless` turn a refused flag into an idle one.
"""

import ast
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple, get_type_hints

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, Field
from megatronish.config.marks import REQUIRED
from megatronish.config.tokenizer_names import MEGATRON_TOKENIZERS


class Known(NamedTuple):
    """Flag of Megatron-LM that is not a field."""

    status: str  # "means" | "idle" | "refused"
    text: str  # why it is idle, or what to do instead
    num_values: int = 0
    harmless: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # (field, value) pairs that it means


def _means(field: str, value: str) -> Known:
    return Known("means", f"--{field.replace('_', '-')} {value}", settings=((field, value),))


def _idle(text: str, num_values: int = 0) -> Known:
    return Known("idle", text, num_values)


def _refused(text: str, num_values: int = 0, harmless: tuple[str, ...] = ()) -> Known:
    return Known("refused", text, num_values, harmless)


_ONE_IMPLEMENTATION = "there is one implementation, in torch"
_FUSION = "which operations are fused is decided at run time and told in the first lines of a run"
_SPLIT = "use --pipeline-split auto, which weighs the embedding and the head by what they cost"
_WANDB = "Weights & Biases is not there yet; leave it out, `wandb sync` reads the TensorBoard files of the run folder"
_REMOVED = "Megatron-LM removed it"

KNOWN: dict[str, Known] = {
    # model
    "use-rotary-position-embeddings": _means("position_embedding_type", "rope"),
    "use-rope-scaling": _means("rope_scaling_type", "llama3"),
    "no-use-rope-scaling": _means("rope_scaling_type", "none"),
    "padded-vocab-size": _idle("the padded size is derived, and padding never reaches the loss", 1),
    "apply-query-key-layer-scaling": _idle("it only moves fp16 rounding; the softmax is computed in fp32"),
    "attention-softmax-in-fp32": _idle("the softmax is always computed in fp32"),
    # parallel
    "account-for-embedding-in-pipeline-split": _refused(_SPLIT),
    "account-for-loss-in-pipeline-split": _refused(_SPLIT),
    "microbatch-group-size-per-virtual-pipeline-stage": _refused("it is the number of stages here; leave it out", 1),
    "hierarchical-context-parallel-sizes": _refused("use --cp-comm-type p2p or a2a alone, and leave it out", 2),
    "expert-model-parallel-size": _refused("experts are not there yet; use 1, or leave it out", 1, ("1",)),
    "data-parallel-sharding-strategy": _refused(
        "use --zero-stage 0, 1, 2 or 3 (no_shard, optim, optim_grads, optim_grads_params)", 1, ("no_shard",)
    ),
    "no-overlap-p2p-communication": _idle("stages talk as their schedule says"),
    "tp-comm-overlap": _idle("it changes speed alone, and which collectives overlap is decided here"),
    "use-tp-pp-dp-mapping": _refused("ranks lie in the order tp-cp-dp-pp, Megatron-LM's default; leave it out"),
    "use-cpu-initialization": _idle("initial weights are the same on every device"),
    # training
    "step-batch-size-schedule": _refused("it is not there yet; use --rampup-batch-size START INCREMENT SAMPLES", 1),
    "exit-signal-handler": _idle("SIGTERM always saves and leaves"),
    "override-opt-param-scheduler": _idle("the schedule of the config always counts"),
    "use-checkpoint-opt-param-scheduler": _refused(
        "the schedule of the config always counts; pass the old run's by --config RUN_DIR/config.toml"
    ),
    "calculate-per-token-loss": _idle("the loss is always a mean over all tokens of a step that count"),
    "manual-gc": _idle("it changes speed alone"),
    "empty-unused-memory-level": _idle("it changes no number of the run", 1),
    # optimizer
    "muon-use-nesterov": _means("muon_nesterov", "true"),
    "muon-no-split-qkv": _refused("queries, keys and values are matrices of their own; leave it out"),
    "muon-tp-mode": _refused(
        "a matrix is made orthogonal as a whole, however it is cut; leave it out", 1, ("duplicated", "distributed")
    ),
    "muon-fp32-matmul-prec": _idle("the iteration computes in fp32, more exactly than any of its choices", 1),
    "muon-scalar-optimizer": _refused("what is no matrix of a layer is adam's; leave it out", 1, ("adam",)),
    # precision
    "accumulate-allreduce-grads-in-fp32": _idle("gradients are in fp32 unless --grad-reduce-in-bf16 says otherwise"),
    "fp32-residual-connection": _refused("it is not there yet; leave it out, or train in fp32 without --bf16"),
    # recomputation and fusion
    "recompute-activations": _means("recompute_granularity", "selective"),
    "recompute-modules": _refused("selective recomputes the core of attention; leave it out", 1, ("core_attn",)),
    "cpu-offloading": _refused("use --recompute-granularity full --offload-saved-activations"),
    "cpu-offloading-num-layers": _refused("use --recompute-granularity full --offload-saved-activations", 1),
    "no-masked-softmax-fusion": _idle("the softmax is fused with --attention-backend auto or fused_softmax alone"),
    "no-bias-gelu-fusion": _idle(_FUSION),
    "no-bias-swiglu-fusion": _idle(_FUSION),
    "no-bias-dropout-fusion": _idle(_FUSION),
    "no-rope-fusion": _idle(_FUSION),
    "no-gradient-accumulation-fusion": _idle(_FUSION),
    "cross-entropy-loss-fusion": _idle(_FUSION),
    "transformer-impl": _idle(_ONE_IMPLEMENTATION, 1),
    "use-flash-attn": _idle("--attention-backend auto takes it wherever there is no attention dropout"),
    "use-mcore-models": _idle(_ONE_IMPLEMENTATION),
    # data and tokenizer
    "data-args-path": _refused("write data_path = [...] into [data] of the config file", 1),
    "no-mmap-bin-files": _idle("it changes speed alone; files are memory-mapped"),
    "dataloader-type": _refused(
        "samples come in one seeded order (Megatron-LM's single); leave it out", 1, ("single",)
    ),
    "no-create-attention-mask-in-dataloader": _idle("masks are always made where attention needs them"),
    "num-dataset-builder-threads": _idle("it changes speed alone", 1),
    "vocab-extra-ids": _refused("put extra tokens into the tokenizer's file, or leave it out", 1, ("0",)),
    # checkpoints
    "pretrained-checkpoint": _refused("use --load DIR --finetune: a run's own checkpoints come before those", 1),
    "no-save-rng": _idle("random values are functions of names; there is no generator state"),
    "no-load-rng": _idle("random values are functions of names; there is no generator state"),
    "ckpt-format": _refused(
        "checkpoints are torch.distributed.checkpoint's; leave it out, and use tools/convert_checkpoint.py for others",
        1,
        ("torch_dist",),
    ),
    "dist-ckpt-optim-fully-reshardable": _idle("every checkpoint loads in every layout"),
    "ckpt-convert-format": _refused("use tools/convert_checkpoint.py", 1),
    "ckpt-convert-save": _refused("use tools/convert_checkpoint.py", 1),
    "non-persistent-save-interval": _refused("use a smaller --save-interval with --async-save --keep-last N", 1),
    # logging
    "log-throughput": _idle("throughput is always logged"),
    "timing-log-level": _idle("a step is timed as a whole", 1),
    "log-timers-to-tensorboard": _idle("the time of a step is always logged"),
    "log-memory-to-tensorboard": _idle("peak memory is always logged"),
    "log-validation-ppl-to-tensorboard": _idle("perplexity is always logged"),
    "wandb-project": _refused(_WANDB, 1, ("",)),
    "wandb-exp-name": _refused(_WANDB, 1, ("",)),
    "wandb-save-dir": _refused(_WANDB, 1, ("",)),
    "profile": _refused("Nsight's markers are not there; use --profile-schedule, which records the pipeline's actions"),
    "profile-ranks": _refused("the pipeline of rank 0 is recorded; leave it out", 1, ("0",)),
    "yaml-cfg": _refused("use --config FILE.toml", 1),
    # removed by Megatron-LM itself
    "batch-size": _refused(f"{_REMOVED}; use --micro-batch-size", 1),
    "model-parallel-size": _refused(f"{_REMOVED}; use --tensor-model-parallel-size", 1),
    "warmup": _refused(f"{_REMOVED}; use --lr-warmup-fraction", 1),
    "checkpoint-activations": _refused(f"{_REMOVED}; use --recompute-granularity full"),
}

# Values that Megatron-LM spells otherwise.
VALUES: dict[str, Mapping[str, str]] = {
    "tokenizer_type": MEGATRON_TOKENIZERS,
    "attention_backend": {"fused": "flash", "local": "fused_softmax"},
}

# Where a flag of the same name starts from another value, or reads its value otherwise, than in Megatron-LM.
DIFFERENCES: dict[str, str] = {
    "log_interval": "Megatron-LM's default is 100; here every step is logged.",
    "overlap_grad_reduce": "Off by default in Megatron-LM; here on, `--no-overlap-grad-reduce` switches it off.",
    "distributed_backend": "Megatron-LM's default is nccl; here `auto` takes gloo on CPU.",
    "tokenizer_type": "No default in Megatron-LM. "
    "Its names are accepted: "
    + ", ".join(f"`{theirs}` = `{ours}`" for theirs, ours in MEGATRON_TOKENIZERS.items())
    + ".",
    "num_query_groups": "Without `--group-query-attention` Megatron-LM ignores it in silence; here that is an error.",
    "max_position_embeddings": "Required in Megatron-LM; here it is the sequence length where it is not given.",
    "loss_scale": "Megatron-LM applies it to bf16, too; here it is idle without `--fp16`.",
    "rampup_batch_size": "Refused together with --train-iters by Megatron-LM; here accepted with either. Lengths given "
    "in steps (`--train-iters`, `--lr-warmup-iters`, ...) count the samples that these steps consume.",
    "openai_gelu": "Megatron-LM's default activation is the exact GELU without its bias-GELU fusion and the tanh form "
    "with it; here it is exact unless this flag is given.",
    "cp_comm_type": "Megatron-LM has all_gather and a2a+p2p, too, and a value for each layer; here one of p2p and a2a.",
    "recompute_method": "No default in Megatron-LM, which wants it with full; here uniform.",
    "recompute_num_layers": "No default in Megatron-LM, which wants it with full; here 1.",
    "pipeline_schedule": "Not in Megatron-LM, where the schedule follows from virtual stages alone.",
    "window_size": "Counts the token itself: Megatron-LM's `--window-size W,0` is `--window-size W+1` here.",
    "attention_backend": "Megatron-LM's `fused` (cuDNN's attention) is `flash` here, where SDPA chooses for the "
    "device; its `local` is `fused_softmax`. Its `unfused` is TransformerEngine's, with a fused softmax too; here it "
    "is plain torch.",
    "position_embedding_type": "`alibi` is Megatron-DeepSpeed's; Megatron-LM has no ALiBi.",
    "embed_layernorm": "Not in Megatron-LM; Megatron-DeepSpeed has it.",
    "glu_linear_offset": "With `--swiglu` Megatron-LM wants `--no-bias-swiglu-fusion` for it; here it is always there.",
    "activation_func_clamp_value": "With `--swiglu` Megatron-LM's fused activation ignores it in silence; here it "
    "clamps either gated activation.",
    "no_rope_freq": "A number N must divide the number of layers in Megatron-LM; here it need not.",
    "decoupled_min_lr": "Ignored in silence by Megatron-LM without `--decoupled-lr`; here that is an error.",
    "muon_coefficient_type": "Megatron-LM has more sets; here a set beyond the last repeats the last.",
    "use_checkpoint_args": "In Megatron-LM the checkpoint wins in silence; here what contradicts it is an error.",
    "num_workers": "Batches prepared ahead by a thread, where Megatron-LM starts processes.",
}

_TWICE = (
    "any | Given twice with different values it is an error; Megatron-LM takes the last. So to change what a launch "
    "script sets, replace the flag there instead of adding another at the end."
)

_STATUSES = {"means": "Other names", "idle": "Accepted and idle", "refused": "Refused"}

_INTRODUCTION = """# Flags

Printed by `python -m megatronish.config.flags > docs/FLAGS.md`; a test checks that it is current.

A config is a TOML file (`--config FILE.toml`) with the sections below, and flags that override it. A flag
`--num-layers 12` is `num_layers = 12` in its section; `--num_layers` and `--num-layers=12` work too. Switches have both
forms, `--swiglu` and `--no-swiglu`. Names and meanings are Megatron-LM's where it has the flag.
"""


def flags_markdown() -> str:
    """Text of the page docs/FLAGS.md."""
    parts = [_INTRODUCTION]
    for section, section_type in get_type_hints(Config).items():
        meanings = _meanings(section_type)
        rows = [_field_row(field, meanings[field.name]) for field in FIELDS.values() if field.section == section]
        parts.append(_table(f"## [{section}]", "flag | default | meaning", rows))
    differing = [f"`{FIELDS[name].flag}` | {text}" for name, text in DIFFERENCES.items()]
    parts.append(_table("## Where a flag differs from Megatron-LM", "flag | difference", [_TWICE, *differing]))
    for status, title in _STATUSES.items():
        rows = []
        for name, known in KNOWN.items():
            harmless = f" (accepted with {' '.join(known.harmless)})" if any(known.harmless) else ""
            if known.status == status:
                rows.append(f"`--{name}` | {known.text}{harmless}")
        parts.append(_table(f"## {title}", "flag of Megatron-LM | " + ("is" if status == "means" else "because"), rows))
    return "\n".join(parts)


def _table(title: str, head: str, rows: list[str]) -> str:
    line = " | ".join("---" for _ in head.split(" | "))
    return "\n".join([title, "", *(f"| {row} |" for row in [head, line, *rows]), ""])


def _field_row(field: Field, meaning: str) -> str:
    flag = " ".join(f"`{name}`" for name in (field.flag, *field.aliases))
    empty = field.default is None or field.default == () or REQUIRED in field.marks
    default = "" if empty else f"`{str(field.default).lower() if field.type is bool else field.default}`"
    values = f" ({field.wants.removeprefix('one of ')})" if field.choices else ""
    return f"{flag} | {default} | {meaning}{values}"


def _meanings(section_type: type) -> dict[str, str]:
    """{field: the text under it}, read from the source, as Python keeps no docstrings of fields."""
    (section,) = ast.parse(inspect.getsource(section_type)).body
    assert isinstance(section, ast.ClassDef)
    texts = {}
    for field, text in pairwise(section.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = str(ast.literal_eval(text.value))
    return texts


if __name__ == "__main__":
    print(flags_markdown(), end="")
