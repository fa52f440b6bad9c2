"""Names that torch gives devices, and the rows of the planner's table that they mean."""

import re

from megatronish.estimate.planner.devices import Device, device_table

BY_WORDS = (
    ("laptop", ""),
    ("h200 nvl", ""),
    ("h200", "h200"),
    ("gh200", ""),
    ("gb200", "gb200-nvl72"),
    ("b200", "b200"),
    ("h100 pcie", "h100-pcie"),
    ("h100 nvl", ""),
    ("h100", "h100-sxm"),
    ("a100 pcie", ""),
    ("a100 40gb", "a100-sxm-40"),
    ("a100", "a100-sxm"),
    ("mi300x", "mi300x"),
    ("l40s", "l40s"),
    ("h20 3e", ""),
    ("h20", "h20"),
    ("v100 sxm2 32gb", "v100-sxm"),
    ("v100 sxm3 32gb", "v100-sxm"),
    ("t4", "t4"),
    ("a10", "a10"),
    ("a6000", "a6000"),
    ("3090 ti", ""),
    ("rtx 3090", "rtx-3090"),
    ("rtx 4090 d", ""),
    ("rtx 4090", "rtx-4090"),
)
"""Words of a device's name by torch -> its row of the table; the first fitting row counts, "" is no row."""


def device_of(name: str) -> Device | None:
    """Row of the table for a device that torch names so; None where there is none."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    for fitting, row in BY_WORDS:
        if words.issuperset(fitting.split()):
            return device_table()[row] if row else None
    return None
