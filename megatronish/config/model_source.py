"""Model that a run starts from: what the run takes from it, and what flags must not contradict.

A run that starts from weights computes what the weights were trained to compute. The fields that decide what a model
computes come from the model; a flag that sets one of them to another value is an error. The fields that only training
reads (dropout, initialisation) may be set to anything. `formats/start.py` reads a `Start` from its files.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.dump import section_of
from megatronish.config.fields import FIELDS
from megatronish.config.flag_meaning import Setting
from megatronish.config.layer_pattern import canonical
from megatronish.config.marks import TRAINING_ONLY
from megatronish.config.portable import TOKENIZER_PATHS, with_copies
from megatronish.config.sections.latent import SIZES
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.pattern import READ_BY
from megatronish.config.sections.run import CheckpointConfig
from megatronish.config.sections.width import OF_MUP
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.core.names import BLOCK_NAMES
from megatronish.tokenizer.names import TEKKEN, TIKTOKEN, tokenizer_in, tokenizer_of_files

TIKTOKEN_FIELDS = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
TOKENIZER_FIELDS = ("tokenizer_type", *TOKENIZER_PATHS, *TIKTOKEN_FIELDS)


class Start(NamedTuple):
    """Model to start from. `source` is the flag that names it; `tokenizer` has fields of DataConfig."""

    source: str
    model: ModelConfig
    vocab_size: int
    seq_length: int
    tokenizer: dict[str, Any]

    def fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the config for all that `given` leaves open. A given type or file of a tokenizer replaces all."""
        tokenizer = {} if {"tokenizer_type", *TOKENIZER_PATHS} & given.keys() else self.tokenizer
        model = self.model
        if model.position_embedding_type == "learned_absolute" and "seq_length" in given:
            # The learned position table keeps its rows, also where shorter sequences use fewer of them.
            rows = model.max_position_embeddings or self.seq_length
            model = replace(model, max_position_embeddings=None if rows == given["seq_length"] else rows)
        seq_length = self.seq_length
        if model.has_encoder:  # which sees texts of any length: the sides say how long its rows are
            sides = [given.get(name, getattr(model, name)) for name in ("encoder_seq_length", "decoder_seq_length")]
            seq_length = 0 if None in sides else sum(sides)
        return {**vars(model), "vocab_size": self.vocab_size, "seq_length": seq_length, **tokenizer}


ReadStart = Callable[[CheckpointConfig], Start | None]


def implied_tokenizer(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of DataConfig that follow from the files of a tokenizer, where some are given.

    --tokenizer-model alone: a folder of files, a tokenizer.json, a tiktoken.model or a tekken.json. --vocab-file and
    --merge-file: GPT-2's tokenizer. A Hugging Face tokenizer without a file lies in the folder of --load.
    """
    kind, model, load = (given.get(name) for name in ("tokenizer_type", "tokenizer_model", "load"))
    gpt2 = given.get("vocab_file") is not None and given.get("merge_file") is not None
    if kind is None and model is not None:
        if Path(model).is_dir():
            return tokenizer_in(Path(model), like_gpt2=True)
        if (name := Path(model).name) in (TIKTOKEN, TEKKEN):
            return tokenizer_of_files([name], folder=Path(model).parent, like_gpt2=False)
        return {"tokenizer_type": "huggingface"} if Path(model).suffix == ".json" else {}
    if kind is None and gpt2:
        return {"tokenizer_type": "huggingface"}
    if kind == "huggingface" and model is None and not gpt2 and load is not None and Path(load).is_dir():
        return tokenizer_in(Path(load), like_gpt2=False)
    return {}


def start_of_state(state: Mapping[str, Any], folder: Path) -> Start:
    """Model of the checkpoint in `folder`, from its state.json; KeyError or TypeError for other fields than ours."""
    config = with_copies(state, folder)
    refuse_unknown_block(config, folder)
    saved = {name: config["data"][name] for name in TOKENIZER_FIELDS if name in config["data"]}
    data = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    source = f"--use-checkpoint-args of {folder}"
    seq_length = config["training"]["seq_length"]
    return Start(source, section_of(ModelConfig, config["model"]), state["vocab_size"], seq_length, data)


def refuse_unknown_block(config: Mapping[str, Any], folder: Path) -> None:
    """UserError for the block of a checkpoint that no plug-in which is imported has registered.

    A checkpoint names its plug-ins and imports none: reading a checkpoint runs no code.
    """
    block = config["model"].get("block", "transformer")
    if block not in BLOCK_NAMES:
        named = config.get("plugins", {}).get("plugin") or ["MODULE"]
        # The names are of whoever wrote the checkpoint: pasted into a shell, they are one word each.
        flags = " ".join(f"--plugin {shlex.quote(shown(plugin))}" for plugin in named)
        raise UserError(
            f"{folder} is of a model with block={shown(block)}, which a plug-in of its run registers; add {flags}, "
            "which runs that code"
        )


def contradictions(start: Start, settings: Mapping[str, Setting], values: Mapping[str, Any]) -> list[str]:
    """Complaints about settings that would change what the model to start from computes."""
    seq_length, computed = start.seq_length, function_of(start.model, seq_length=start.seq_length)
    # With derived sizes written out, so that setting one size changes no other.
    model = ModelConfig(**{**vars(start.model), **computed})
    complaints = []
    for name, setting in settings.items():
        if name in vars(model):
            has = computed.get(name, getattr(model, name))
            changed = ModelConfig(**{**vars(model), name: values[name]})
            differs = function_of(changed, seq_length=seq_length) != computed
        else:
            has = start.vocab_size
            differs = name == "vocab_size" and values[name] != has
        if differs:
            text = str(has).lower() if isinstance(has, bool) else has
            complaints.append(f"{setting.spelled} contradicts {start.source}, which has {name}={text}; leave it out")
    return complaints


def stretched(start: Start, seq_length: int) -> list[str]:
    """Note about sequences longer than those the model was made for."""
    if seq_length <= start.seq_length or start.model.has_encoder:
        return []
    return [f"seq_length={seq_length} is longer than the {start.seq_length} tokens that {start.source} was made for"]


def function_of(model: ModelConfig, *, seq_length: int) -> dict[str, Any]:
    """Fields that decide what a model computes, its vocabulary aside: equal functions have equal fields.

    Every field of ModelConfig counts, with derived sizes written out, except those marked TRAINING_ONLY and those that
    this model does not read. A new field counts by itself: weights of another model cannot continue a run unnoticed.
    """
    model = model.written_out
    fields = vars(model) | {
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_size,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_layer_freq": "1" if all(model.expert_layers) else canonical(model.expert_layers),
        "disable_bias_linear": not (model.attention_bias and model.mlp_bias),
        "add_attention_bias": model.attention_bias,
        "add_mlp_bias": model.mlp_bias,
        "add_qkv_bias": model.qkv_bias,
        "moe_router_scores_per_group": model.scores_per_group,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "max_position_embeddings": model.max_position_embeddings or seq_length,
        "softmax_scale": None if model.score_factor is None else model.softmax_scale,
        "window_attn_skip_freq": _pattern(model.windowed_layers),
        "rope_short_mscale": model.rotary_growths[0],
        "rope_long_mscale": model.rotary_growths[1],
        "window_rotary_base": model.window_rotary_base if model.has_window_rotation else None,
        "latent_norm_epsilon": model.latent_epsilon,
        "no_rope_freq": _pattern(tuple(not rotated for rotated in model.rotated_layers)),
    }
    idle = _idle_fields(model)
    return {
        name: value for name, value in fields.items() if name not in idle and TRAINING_ONLY not in FIELDS[name].marks
    }


def _idle_fields(model: ModelConfig) -> set[str]:
    """Fields that a model of this kind does not read."""
    idle = {"group_query_attention", *OF_MUP}  # contained in the number of query groups, and in factors
    if model.position_embedding_type != "learned_absolute":
        idle |= {"max_position_embeddings", "position_offset"}
    if model.position_embedding_type != "rope":
        idle |= {"rope_scaling_type", "no_rope_freq", *ROPE}
    if not any(model.windowed_layers):
        idle |= {"window_size", "window_attn_skip_freq", "attention_pattern"}
    read = READ_BY[model.attention_pattern] if any(model.windowed_layers) else ()
    idle |= {name for names in READ_BY.values() for name in names} - set(read)
    if model.moe_router_score_function != "sparsemixer":
        idle.add("moe_sparsemixer_eps")
    if not any(model.expert_layers):
        idle |= {"num_experts", *(name for name in vars(model) if name.startswith("moe_"))}
    if model.multi_latent_attention:  # which has parts of heads in place of these
        idle |= {"kv_channels", "rotary_percent"}
    else:
        idle |= {*SIZES, "rope_mscale", "rope_mscale_all_dim"}
    if not model.qk_layernorm:
        idle |= {"qk_layernorm_across_heads", "qk_layernorm_by_head", "qk_layernorm_1p"}
    if not (model.qk_layernorm and any(model.rotated_layers)):
        idle.add("qk_layernorm_after_rope")
    if model.attn_temperature_scale is None:
        idle.add("attn_temperature_floor")
    if not model.is_gated:
        idle |= {"glu_linear_offset", "activation_func_clamp_value"}
    return idle | set().union(*ROPE_SCALING.values()) - set(ROPE_SCALING[model.rope_scaling])


def _pattern(marks: tuple[bool, ...]) -> str | None:
    """Pattern of layers, written out; None where all layers are alike, which is what no pattern means."""
    return canonical(marks) if len(set(marks)) > 1 else None


ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved")
# The fields that each kind of RoPE scaling reads.
ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "none": (),
    "proportional": (),
    "linear": ("rope_scaling_factor",),
    "llama3": (
        "rope_scaling_factor",
        "rope_original_max_positions",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
    ),
    "longrope": (
        *("rope_scaling_factor", "rope_original_max_positions", "rope_short_factor", "rope_long_factor"),
        *("rope_short_mscale", "rope_long_mscale"),
    ),
    "yarn": (
        "rope_scaling_factor",
        "rope_original_max_positions",
        "rope_beta_fast",
        "rope_beta_slow",
        "yarn_correction_range_round_to_int",
        "rope_mscale",
        "rope_mscale_all_dim",
    ),
}
