"""Sliding-window attention in config.json: one window in every layer, or none; a window in some layers is refused."""

from megatronish.formats.hf.config_json import CORRECT, ConfigJson

_SOME = "gives some layers a window and others none, which is not supported"
WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def qwen_window(config: ConfigJson) -> int | None:
    """Window of a Qwen model: in the layers from max_window_layers on, or in those that layer_types names."""
    slides = all_layers_slide(config)
    if not config.flag("use_sliding_window") or config.values["sliding_window"] is None:
        if slides:
            config.refuse("layer_types", "gives layers a window, which use_sliding_window and sliding_window do not")
        return None
    if slides is None:
        first = config.whole("max_window_layers", least=0)
        if 0 < first < config.whole("num_hidden_layers"):
            config.refuse("max_window_layers", _SOME)
        slides = first == 0
    return config.whole("sliding_window") if slides else None


def all_layers_slide(config: ConfigJson) -> bool | None:
    """Whether layer_types gives every layer a window, or none of them; None if the key is absent."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    num_layers = config.whole("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.refuse("layer_types", f"must be a list with a kind for each of the {num_layers} layers", remedy=CORRECT)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", f"has {kind!r}; full_attention and sliding_attention are supported")
    if kinds.count(kinds[0]) < num_layers:
        config.refuse("layer_types", _SOME)
    return bool(kinds[0] == "sliding_attention")
