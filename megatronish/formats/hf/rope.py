"""RoPE in config.json: rope_theta and rope_scaling of transformers 4, and rope_parameters of transformers 5.

The older spelling, which both versions read, is the one written.
"""

import math
from typing import Any

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.family import CORRECT, LARGEST_WHOLE, ConfigJson
from megatronish.formats.hf.window import FULL, SLIDING

ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    ORIGINAL,
    PARTIAL,
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
)
BASE = 10000.0
MSCALES = {"short_mscale": "rope_short_mscale", "long_mscale": "rope_long_mscale"}
"""Keys of LongRoPE's factors of cos and sin in a PhiMoE, and their fields."""
LONGROPE = {"short_factor": "rope_short_factor", "long_factor": "rope_long_factor"}
"""Keys of LongRoPE's factors, and their fields."""


def read_rope(
    config: ConfigJson, *, base: float = BASE, turned: float | None = None, latent: bool = False
) -> dict[str, Any]:
    """Fields of ModelConfig on RoPE; UserError for a kind of RoPE that is not implemented.

    `base` is the one that an absent key means. `turned` is the part of a head that RoPE turns where no key says it, in
    a family that has such a key. `latent`: of latent attention, in which yarn makes scores larger too.
    """
    rope, spelled = _parameters(config)
    fields: dict[str, Any] = {"rotary_base": rope.number("rope_theta", null=config.number("rope_theta", null=base))}
    kind = rope.values.get("rope_type", rope.values.get("type")) or "default"
    if kind == "proportional":  # pairs go through whole heads: of these, the part turns
        if turned is not None or rope.values.get("factor", 1) != 1:
            config.refuse(spelled, "is proportional with a factor, or where RoPE turns a part of each head")
        part = rope.number(PARTIAL, null=config.number(PARTIAL, null=1))
        return fields | {"rope_scaling_type": kind, "rotary_percent": part}
    if turned is None:
        config.must_be(PARTIAL, None, 1, why="is not supported: RoPE turns whole heads in this family")
        if rope.values.get(PARTIAL) not in (None, 1):
            config.refuse(spelled, "turns a part of each head, and in this family RoPE turns whole heads")
    else:
        if PARTIAL in config.values and config.values[PARTIAL] is None:
            config.refuse(PARTIAL, "is no number, and versions of transformers differ in what it means", remedy=CORRECT)
        fields["rotary_percent"] = rope.number(PARTIAL, null=config.number(PARTIAL, null=turned))
    if kind not in ("default", "linear", "llama3", "yarn", "longrope", "proportional"):
        known = "none, linear, llama3, yarn, longrope and proportional are supported"
        config.refuse(spelled, f"scales RoPE in the way of {kind!r}; {known}")
    if kind == "default":
        return fields
    if kind == "yarn":
        return fields | _yarn(config, rope, spelled, latent=latent)
    if kind == "longrope":
        return fields | _longrope(config, rope, spelled, part=fields.get("rotary_percent", 1.0))
    if latent and rope.values.get("mscale_all_dim"):
        config.refuse(spelled, f"makes scores larger by mscale_all_dim with {kind!r}, and here only yarn does")
    fields |= {"rope_scaling_type": kind, "rope_scaling_factor": rope.number("factor")}
    if kind == "linear":
        return fields
    return fields | {
        "rope_original_max_positions": _original(config, rope),
        "rope_low_freq_factor": rope.number("low_freq_factor"),
        "rope_high_freq_factor": rope.number("high_freq_factor"),
    }


def write_rope(model: ModelConfig, *, turned: bool = False, latent: bool = False) -> dict[str, Any]:
    """Keys of config.json for the RoPE of a model; `turned`: with that of the part of a head that it turns.

    `latent`: with those of yarn in latent attention.
    """
    part = {PARTIAL: model.rotary_percent} if turned else {}
    if model.rope_scaling == "none":
        return {"rope_theta": model.rotary_base, "rope_scaling": None, **part}
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if model.rope_scaling == "proportional":  # the part of all pairs, and no factor
        scaling = {"rope_type": model.rope_scaling, PARTIAL: model.rotary_percent}
        return {"rope_theta": model.rotary_base, "rope_scaling": scaling, **part}
    if model.rope_scaling != "linear":
        scaling[ORIGINAL] = model.rope_original_max_positions
    if model.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor}
    if model.rope_scaling == "yarn":
        scaling |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
        if not model.yarn_correction_range_round_to_int:
            scaling["truncate"] = False
    if model.rope_scaling == "longrope":
        scaling |= {key: list(getattr(model, field)) for key, field in LONGROPE.items()}
    if model.rope_scaling == "yarn" and latent:
        scaling |= {"mscale": model.rope_mscale, "mscale_all_dim": model.rope_mscale_all_dim}
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling, **part}


def without_alpha(config: ConfigJson) -> ConfigJson:
    """The config with a larger base in the place of a RoPE that a fixed `alpha` stretches (Hunyuan).

    Hunyuan calls it dynamic, but no frequency depends on the length of a text: the base is that much larger.
    """
    rope, spelled = _parameters(config)
    kind = rope.values.get("rope_type", rope.values.get("type"))
    if kind != "dynamic" or not rope.values.get("alpha"):
        return config
    heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
    size = config.whole("head_dim", null=max(1, hidden_size // heads))
    if size <= 2:
        config.refuse(spelled, f"stretches the base of RoPE by a power of the size of a head, and {size} is too small")
    alpha = rope.number("alpha")
    if alpha > LARGEST_WHOLE:
        config.refuse(spelled, f"has an alpha of more than {LARGEST_WHOLE}", remedy=CORRECT)
    base = rope.number("rope_theta", null=config.number("rope_theta", null=BASE)) * alpha ** (size / (size - 2))
    plain = {key: value for key, value in config.values.items() if key not in ("rope_scaling", "rope_parameters")}
    return ConfigJson(config.path, plain | {"rope_theta": base}, {})


def split_rope(config: ConfigJson) -> tuple[ConfigJson, float | None]:
    """The config with the RoPE of layers without a window alone, and the base in those with one, if keys say it.

    Of families in which the two kinds of layers may turn by other angles, and those with a window are not stretched.
    """
    for key in ("rope_scaling", "rope_parameters"):
        values = config.values.get(key)
        if not isinstance(values, dict) or not values:
            continue
        if any(isinstance(value, dict) for value in values.values()):
            if not values.keys() <= {FULL, SLIDING} or not all(isinstance(each, dict) for each in values.values()):
                config.refuse(key, f"must have an object for {FULL} and one for {SLIDING}")
            local = ConfigJson(config.path, values.get(SLIDING, {}), {})
            if local.values.get("rope_type", "default") != "default":
                config.refuse(key, "stretches RoPE in the layers with a window, which is not supported")
            base = local.number("rope_theta") if local.values.get("rope_theta") is not None else None
            return ConfigJson(config.path, {**config.values, key: values.get(FULL, {})}, {}), base
        if key == "rope_parameters":
            config.refuse(key, "must have an object for each kind of layer, or its base is not read")
    return config, None


def write_both_ropes(model: ModelConfig) -> dict[str, Any]:
    """Keys of the RoPE of each kind of layer, which transformers 5 reads besides those of `write_rope`."""
    keys = write_rope(model)
    base = model.window_rotary_base if model.has_window_rotation else model.rotary_base
    everywhere = {"rope_type": "default", **(keys["rope_scaling"] or {}), "rope_theta": keys["rope_theta"]}
    return {"rope_parameters": {FULL: everywhere, SLIDING: {"rope_type": "default", "rope_theta": base}}}


def _parameters(config: ConfigJson) -> tuple[ConfigJson, str]:
    """Object with the parameters of RoPE, and the key that it stands under."""
    for key in ("rope_scaling", "rope_parameters"):
        values = config.values.get(key)
        if isinstance(values, dict) and any(isinstance(value, dict) for value in values.values()):
            first, *others = values.values()
            if not first or any(other != first for other in others):
                config.refuse(key, "gives some layers another RoPE than others, which is not supported")
            values = first
        if values:
            if not isinstance(values, dict):
                config.refuse(key, "must be an object")
            return ConfigJson(config.path, values, {}), key
    return ConfigJson(config.path, {}, {}), "rope_scaling"


def _original(config: ConfigJson, rope: ConfigJson) -> int:
    """Context length before RoPE scaling. Versions of transformers differ in which of two places they read."""
    inner, outer = rope.values.get(ORIGINAL), config.values.get(ORIGINAL)
    if inner is not None and outer is not None and inner != outer:
        config.refuse(ORIGINAL, f"contradicts the {inner} of RoPE's other parameters", remedy=CORRECT)
    return (config if inner is None else rope).whole(ORIGINAL, null=config.whole("max_position_embeddings"))


def _longrope(config: ConfigJson, rope: ConfigJson, spelled: str, *, part: float) -> dict[str, Any]:
    heads, original = config.whole("num_attention_heads"), _original(config, rope)
    pairs = int(config.whole("head_dim", null=max(1, config.whole("hidden_size") // heads)) * part) // 2
    factor = rope.number("factor", null=config.whole("max_position_embeddings") / original)
    factors: dict[str, tuple[float, ...]] = {}
    for key, field in LONGROPE.items():
        numbers = rope.values.get(key)
        if not isinstance(numbers, list) or any(
            type(number) not in (int, float) or not 0 < number < LARGEST_WHOLE for number in numbers
        ):
            config.refuse(spelled, f"must have a list of numbers above 0 under {key}", remedy=CORRECT)
        if len(numbers) != pairs:
            config.refuse(
                spelled,
                f"has {len(numbers)} numbers under {key}, and RoPE turns {pairs} pairs of a head",
                remedy=CORRECT,
            )
        factors[field] = tuple(map(float, numbers))
    ours = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    theirs = rope.number("attention_factor", null=ours)
    if not math.isclose(theirs, ours, rel_tol=1e-6):
        config.refuse(
            spelled, f"multiplies attention by {theirs:.6g}, and longrope with a factor of {factor:g} by {ours:.6g}"
        )
    return {
        "rope_scaling_type": "longrope",
        "rope_scaling_factor": factor,
        "rope_original_max_positions": original,
        **factors,
    }


def _yarn(config: ConfigJson, rope: ConfigJson, spelled: str, *, latent: bool) -> dict[str, Any]:
    original = _original(config, rope)
    factor = rope.number("factor", null=config.whole("max_position_embeddings") / original)
    mscale, mscale_all_dim = rope.number("mscale", null=0), rope.number("mscale_all_dim", null=0)
    if latent and mscale not in (0, 1) and not mscale_all_dim:
        config.refuse(spelled, "has mscale without mscale_all_dim, and versions differ in what that means")
    has_both = bool(mscale and mscale_all_dim)
    plain = _attention_factor(factor)
    ratio = _attention_factor(factor, mscale) / _attention_factor(factor, mscale_all_dim)
    theirs = rope.number("attention_factor", null=ratio if has_both else plain)
    growth = {"rope_mscale": mscale or 1.0, "rope_mscale_all_dim": mscale_all_dim} if latent else {}
    ours = _attention_factor(factor, mscale or 1.0) / _attention_factor(factor, mscale_all_dim) if latent else plain
    if not math.isclose(theirs, ours, rel_tol=1e-6):
        config.refuse(
            spelled, f"multiplies attention by {theirs:.6g}, and yarn with a factor of {factor:g} by {ours:.6g} here"
        )
    return {
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": factor,
        "rope_original_max_positions": original,
        "rope_beta_fast": rope.number("beta_fast", null=0) or 32.0,
        "rope_beta_slow": rope.number("beta_slow", null=0) or 1.0,
        "yarn_correction_range_round_to_int": rope.values.get("truncate") is None or rope.flag("truncate"),
        **growth,
    }


def _attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Factor of yarn on cos and sin."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
