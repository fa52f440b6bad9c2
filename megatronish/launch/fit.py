"""Layout of a config, cut down to the GPUs of this machine: python -m megatronish.launch.fit CONFIG.toml FLAGS

It prints flags for pretrain_gpt.py. `make pretrain` uses it, so that the demo runs on the GPUs of any machine. There is
nothing to print without a GPU (the CPU takes any number of ranks), where the GPUs suffice, and where FLAGS choose a
layout or a device. A --config among the FLAGS takes the place of CONFIG.toml, as it does for pretrain_gpt.py.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatronish.config.shipped import config_path
from megatronish.core.foreign import LARGEST_TOML, parse_toml, read_text
from megatronish.core.layout import Layout
from megatronish.launch.device import visible_devices

SIZES = {
    "dp": "data_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
CHOSEN_BY = {"device", *SIZES, "ep", "etp", *(name.replace("_", "-") for name in (*SIZES.values(), EP, ETP))}


def fitted(layout: Layout, num_devices: int) -> Layout:
    """The layout with at most `num_devices` ranks. It gives up copies of the model (dp) first, and tp last.

    A size becomes a divisor of itself, so that what it divides (heads, layers, samples of a step) is still divided.
    """
    for axis in ("dp", "cp", "pp", "tp"):
        while layout.world_size > max(num_devices, 1) and (size := getattr(layout, axis)) > 1:
            largest = next(divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0)
            layout = replace(layout, **{axis: largest})
    return layout


def fitted_experts(parallel: Mapping[str, Any], layout: Layout) -> list[str]:
    """Flags of the grid of experts of a config on the ranks of another layout: sizes become common divisors."""
    flags = []
    width = layout.dp * layout.cp * layout.tp
    if ETP in parallel:
        etp = math.gcd(parallel[ETP], layout.tp)
        flags += ["--etp", str(etp)]
    else:
        etp = layout.tp
    return [*flags, "--ep", str(math.gcd(parallel[EP], width // etp))] if EP in parallel else flags


def config_of(config_file: Path, argv: Sequence[str]) -> Path:
    """The file that the last --config of the flags names, or `config_file`."""
    given = [str(config_file)]
    for word, after in pairwise([*argv, ""]):
        name, _, value = word.partition("=")
        if name.lstrip("-") == "config" and name.startswith("-"):
            given.append(value or after)
    return config_path(given[-1])


def flags_for(config_file: Path, argv: Sequence[str], *, num_devices: int) -> list[str]:
    """Flags that make a config fit on this machine's GPUs."""
    if num_devices == 0 or {word.partition("=")[0].lstrip("-").replace("_", "-") for word in argv} & CHOSEN_BY:
        return []
    config_file = config_of(config_file, argv)
    try:
        parallel = parse_toml(read_text(config_file, LARGEST_TOML)).get("parallel", {})
    except (OSError, ValueError):
        return []  # pretrain_gpt.py says what is wrong with the file
    sizes = [parallel.get(name, 1) for name in (*SIZES.values(), EP, ETP)] if isinstance(parallel, dict) else [None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return []
    layout = Layout(**{axis: parallel.get(name, 1) for axis, name in SIZES.items()})
    fits = fitted(layout, num_devices)
    if fits == layout:
        return []
    gpus = "1 GPU" if num_devices == 1 else f"{num_devices} GPUs"
    print(f"{gpus}: {fits} instead of {layout} of {config_file}", file=sys.stderr)
    flags = [word for axis in SIZES for word in (f"--{axis}", str(getattr(fits, axis)))]
    return flags + fitted_experts(parallel, fits)


if __name__ == "__main__":
    print(*flags_for(Path(sys.argv[1]), sys.argv[2:], num_devices=visible_devices().count))
