"""What does a run take from the model it starts from, and what that it was told itself contradicts that model?

A run that starts from weights computes what they were trained to compute: the fields that say what that is come from
there, and to set them to anything else is an error. What training alone asks (dropout, ...) may be set to anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatronish.config.hf import read_hf_config, tokenizer_in
from megatronish.config.hf_json import CONFIG
from megatronish.config.model import ModelConfig
from megatronish.config.settings import Setting

TOKENIZER = "tokenizer"  # the folder of a checkpoint in which its tokenizer may lie
MEGATRONS = "latest_checkpointed_iteration.txt"
TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


class Start(NamedTuple):
    """A model to start from. `told` is how it was asked for, `tokenizer` has fields of DataConfig."""

    told: str
    model: ModelConfig
    vocab_size: int
    seq_length: int
    tokenizer: dict[str, Any]

    def fields(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What the config has where the user `told` nothing. A tokenizer of one's own is one as a whole."""
        tokenizer = {} if set(TOKENIZER_FIELDS) & told.keys() else self.tokenizer
        model = self.model
        if model.position_embedding_type == "learned_absolute" and "seq_length" in told:
            # Its table of positions keeps its rows, however many of them are used.
            rows = model.max_position_embeddings or self.seq_length
            model = replace(model, max_position_embeddings=None if rows == told["seq_length"] else rows)
        return {**vars(model), "vocab_size": self.vocab_size, "seq_length": self.seq_length, **tokenizer}


ReadCheckpoint = Callable[[Path, int | None], Start]


def tokenizer_named_by(path: Path) -> dict[str, Any]:
    """What --tokenizer-model alone says where `path` tells the kind: a folder of files, or a tokenizer.json."""
    if path.is_dir():
        return tokenizer_in(path, like_gpt2=True)
    return {"tokenizer_type": "huggingface"} if path.suffix == ".json" else {}


def of_another_format(load: Path) -> str | None:
    """What --load cannot take, with the remedy; None for all that may hold a checkpoint, and for what is not there."""
    if (load / "checkpoints").is_dir() or any(load.glob("step_*")) or (load / "state.json").is_file():
        return None
    if (load / CONFIG).is_file():
        return f"--load {load} holds no checkpoint; it holds a Hugging Face model: use --load-hf {load}"
    if (load / MEGATRONS).is_file():
        return (
            f"--load {load} holds no checkpoint; it holds Megatron-LM's: convert it with tools/convert_checkpoint.py "
            "--from megatron"
        )
    return None


def start_of_hf(folder: Path) -> Start:
    """The model of a Hugging Face folder; UserError if it is not one, or not known."""
    found = read_hf_config(folder)
    return Start(f"--load-hf {folder}", ModelConfig(**found.model), found.vocab_size, found.seq_length, found.data)


def start_of_state(state: Mapping[str, Any], folder: Path) -> Start:
    """The model of a checkpoint in `folder` with this state.json; KeyError or TypeError if that is not one."""
    config = state["config"]
    data = {name: config["data"][name] for name in TOKENIZER_FIELDS if name in config["data"]}
    told = f"--use-checkpoint-args of {folder}"
    seq_length = config["training"]["seq_length"]
    return Start(told, ModelConfig(**config["model"]), state["vocab_size"], seq_length, located(data, folder))


def located(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields of DataConfig with the tokenizer's files where they lie now: a checkpoint may have them in its folder."""
    found = dict(data)
    for name in TOKENIZER_FIELDS[1:]:
        if PurePosixPath(data.get(name) or "/").parts[0] == TOKENIZER and (folder / data[name]).exists():
            found[name] = str(folder / data[name])
    return found


def contradictions(start: Start, settings: Mapping[str, Setting], values: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that would make another model of it."""
    seq_length, computed = start.seq_length, function_of(start.model, seq_length=start.seq_length)
    model = ModelConfig(**{**vars(start.model), **computed})  # derived sizes stay what they are, whatever is set beside
    found = []
    for name, setting in settings.items():
        if name in vars(model):
            has = computed.get(name, getattr(model, name))
            changed = ModelConfig(**{**vars(model), name: values[name]})
            differs = function_of(changed, seq_length=seq_length) != computed
        else:
            has = start.vocab_size
            differs = name == "vocab_size" and values[name] != has
        if differs:
            told = str(has).lower() if isinstance(has, bool) else has
            found.append(f"{setting.spelled} contradicts {start.told}, which has {name}={told}; leave it out")
    return found


def stretched(start: Start, seq_length: int) -> list[str]:
    """What is said of sequences that are longer than those the model knows."""
    if seq_length <= start.seq_length:
        return []
    return [f"seq_length={seq_length} is longer than the {start.seq_length} tokens that {start.told} was made for"]


def function_of(model: ModelConfig, *, seq_length: int) -> dict[str, Any]:
    """Everything that says what a model computes, but for its vocabulary: equal functions, equal fields."""
    found: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_size,
        "position_embedding_type": model.position_embedding_type,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "swiglu": model.swiglu,
        "squared_relu": model.squared_relu,
        "openai_gelu": model.openai_gelu,
        "disable_bias_linear": model.disable_bias_linear,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "window_size": model.window_size,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
    }
    if model.position_embedding_type == "learned_absolute":
        found["max_position_embeddings"] = model.max_position_embeddings or seq_length
    if model.position_embedding_type == "rope":
        found |= {name: getattr(model, name) for name in ("rotary_base", "rotary_percent", "rotary_interleaved")}
        found["rope_scaling_type"] = model.rope_scaling_type
        found |= {name: getattr(model, name) for name in ROPE_SCALING[model.rope_scaling_type]}
    return found


ROPE_SCALING = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "llama3": (
        "rope_scaling_factor",
        "rope_original_max_positions",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
    ),
    "yarn": ("rope_scaling_factor", "rope_original_max_positions", "rope_beta_fast", "rope_beta_slow"),
}
