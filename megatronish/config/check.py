"""Check of a whole config whose values have their types (read.py): what is missing, ranges, rules over several fields.

The range of a field stands on the field (`marks.py`), the rules of a section in the file of that name in `rules/`.
"""

import math
from collections.abc import Collection, Iterator

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, Field, read_fields
from megatronish.config.marks import REQUIRED
from megatronish.config.rules import (
    adapter,
    chat,
    cuda_graph,
    data,
    experts,
    model,
    optimizer,
    parallel,
    pipeline,
    plugins,
    preference,
    recompute,
    run,
    training,
    zero,
)
from megatronish.config.sections.model import ModelConfig

MOST_ELEMENTS = 2**48  # of a tensor; torch counts bytes in 64 bits, and no model comes near

# In the order in which their complaints are printed.
RULES = (
    *parallel.CUT_RULES,
    *pipeline.STAGE_RULES,
    *recompute.RULES,
    *pipeline.MICROBATCH_RULES,
    *parallel.BACKEND_RULES,
    *zero.RULES,
    *model.RULES,
    *experts.RULES,
    *training.BATCH_RULES,
    *optimizer.LENGTH_RULES,
    *run.RECORD_RULES,
    *optimizer.RATE_RULES,
    *training.PRECISION_RULES,
    *cuda_graph.RULES,
    *optimizer.WEIGHT_DECAY_RULES,
    *data.RULES,
    *chat.RULES,
    *run.CHECKPOINT_RULES,
    *adapter.RULES,
    *preference.RULES,
    *plugins.RULES,
)


def problems(config: Config, *, invalid: Collection[str] = ()) -> list[str]:
    """Complaints about a config, a sentence each.

    Fields in `invalid` have a complaint already: they are skipped here, with the rules that read them.
    """
    missing = _missing(config, invalid=invalid)
    found = missing | _out_of_range(config, invalid={*invalid, *missing})
    without = {*invalid, *found}
    complaints = (rule.complaint(config) for rule in RULES if without.isdisjoint(rule.fields))
    return [*found.values(), *filter(None, complaints)]


def absurd_size(model: ModelConfig, *, vocab_size: int, seq_length: int) -> str | None:
    """Size beyond every maximum in a model that a file describes, asked for before its tensors are made."""
    values = {**vars(model), "ffn_hidden_size": model.ffn_size, "kv_channels": model.head_size}
    values |= {"vocab_size": vocab_size, "seq_length": seq_length}
    for name, value in values.items():
        for bound in FIELDS[name].ranges:
            if value is not None and bound.is_maximum and not bound.holds(value):
                return f"{name}={value} {bound.rule}"
    qkv_rows = (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_size
    rows = max(vocab_size, model.max_position_embeddings or seq_length, qkv_rows, 2 * model.ffn_size)
    if rows * model.hidden_size > MOST_ELEMENTS:
        return f"its largest tensor would have {rows * model.hidden_size} elements, and {MOST_ELEMENTS} is the limit"
    return None


def _missing(config: Config, *, invalid: Collection[str]) -> dict[str, str]:
    """{field: complaint} of required fields that are not given."""
    values, keep = read_fields(config), config.checkpoint
    found = {}
    for name, field in FIELDS.items():
        if REQUIRED not in field.marks or name in invalid or values[name] not in (None, field.default):
            continue
        remedy = f"set it in [{field.section}] of the config file, or add {field.flag}"
        if keep.load is not None and not keep.use_checkpoint_args and name in (*vars(config.model), "seq_length"):
            remedy = f"add --use-checkpoint-args, which takes it from --load {keep.load}, or {field.flag}"
        found[name] = f"{name} is not given; {remedy}"
    return found


def _out_of_range(config: Config, *, invalid: Collection[str]) -> dict[str, str]:
    """{field: complaint} of given numbers outside their range; of two complaints about one number the last."""
    return {
        name: complaint
        for name, value in read_fields(config).items()
        if name not in invalid and value is not None
        for complaint in _range_complaints(FIELDS[name], value)
    }


def _range_complaints(field: Field, value: float) -> Iterator[str]:
    for bound in field.ranges:
        if not (bound.holds(value) and value != math.inf):
            remedy = f"the default is {field.default}" if field.default else f"change {field.flag}"
            rule = "must be finite" if value != value or abs(value) == math.inf else bound.rule
            yield f"{field.name}={value} {rule}; {remedy}"
