"""Sliding-window attention in config.json: in every layer, in none, or, in Qwen's models, in those that it names."""

from dataclasses import replace
from typing import Any

from megatronish.config.layer_pattern import canonical
from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import CORRECT, ConfigJson

WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_WINDOW = ("window_size", "window_attn_skip_freq")
FULL, SLIDING = "full_attention", "sliding_attention"


def qwen_window(config: ConfigJson) -> dict[str, Any]:
    """Window of a Qwen model: in the layers from max_window_layers on, or in those that layer_types names."""
    slides = layers_that_slide(config)
    if not config.flag("use_sliding_window") or config.values["sliding_window"] is None:
        if slides and any(slides):
            config.refuse("layer_types", "gives layers a window, which use_sliding_window and sliding_window do not")
        return {"window_size": None}
    if slides is None:
        first = config.whole("max_window_layers", least=0)
        slides = tuple(layer >= first for layer in range(config.whole("num_hidden_layers")))
    if not any(slides):
        return {"window_size": None}
    pattern = None if all(slides) else canonical(slides)
    return {"window_size": config.whole("sliding_window"), "window_attn_skip_freq": pattern}


def write_qwen_window(model: ModelConfig) -> dict[str, Any]:
    """Keys of the window, those of every layer among them."""
    slides = model.windowed_layers
    return {
        "use_sliding_window": any(slides),
        "sliding_window": model.window_size if any(slides) else None,
        "max_window_layers": 0 if any(slides) else model.num_layers,
        "layer_types": [SLIDING if each else FULL for each in slides],
    }


def all_layers_slide(config: ConfigJson) -> bool | None:
    """Whether layer_types gives every layer a window, or none of them; None if the key is absent."""
    slides = layers_that_slide(config)
    if slides is None:
        return None
    if len(set(slides)) > 1:
        config.refuse("layer_types", "gives some layers a window and others none, which this family does not have")
    return slides[0]


def layers_that_slide(config: ConfigJson) -> tuple[bool, ...] | None:
    """Whether layer_types gives each layer a window; None if the key is absent."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    num_layers = config.whole("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.refuse("layer_types", f"must be a list with a kind for each of the {num_layers} layers", remedy=CORRECT)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            config.refuse("layer_types", f"has {kind!r}; {FULL} and {SLIDING} are known here")
    return tuple(kind == SLIDING for kind in kinds)


def read_layer_types(config: ConfigJson, *, every: int = 1, every_key: str | None = None) -> dict[str, Any]:
    """Window of the layers that layer_types names; without that key, each `every`-th layer has none.

    `every_key` is the key of that number, in a family that has one; it is not read where layer_types is given.
    """
    slides = layers_that_slide(config)
    if slides is None:
        every = every if every_key is None else config.whole(every_key)
        slides = tuple((layer + 1) % every != 0 for layer in range(config.whole("num_hidden_layers")))
    if not any(slides):
        return {"window_size": None}
    pattern = None if all(slides) else canonical(slides)
    return {"window_size": config.whole("sliding_window"), "window_attn_skip_freq": pattern}


def write_layer_types(model: ModelConfig) -> dict[str, Any]:
    """Keys of the window and of the layers that have it."""
    slides = model.windowed_layers
    return {
        "sliding_window": model.window_size if any(slides) else None,
        "layer_types": [SLIDING if each else FULL for each in slides],
    }


def rope_where_it_slides(fields: dict[str, Any]) -> dict[str, Any]:
    """The pattern of a model in which layers without a window have no RoPE, from its fields."""
    window = {key: fields[key] for key in _WINDOW if key in fields}
    slides = replace(ModelConfig(num_layers=fields["num_layers"]), **window).windowed_layers
    return {"no_rope_freq": None if all(slides) else canonical(tuple(not each for each in slides))}
