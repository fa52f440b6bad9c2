"""Peaks of devices: dense TFLOP/s by the name that torch gives a device."""

import re
from typing import Literal, NamedTuple


class Peak(NamedTuple):
    """Dense TFLOP/s of a device, from its maker's data sheet. `bf16` None: the device has no bf16 units."""

    bf16: float | None
    fp16: float
    fp32: float


# Words of a device's name -> its peak; the first row whose words are all in the name counts, so variants come first.
# Data sheets that print sparse numbers are halved. fp32 is without TF32, which torch does not use unless told.
PEAKS: tuple[tuple[str, Peak | None], ...] = (
    ("laptop", None),  # anything between a third and all of the desktop card
    ("gb200", Peak(2500, 2500, 80)),
    ("b200", Peak(2250, 2250, 75)),
    ("h200 nvl", Peak(835, 835, 60)),
    ("h200", Peak(989, 989, 67)),
    ("gh200", Peak(989, 989, 67)),
    ("h100 pcie", Peak(756, 756, 51)),
    ("h100 nvl", Peak(835, 835, 60)),
    ("h100", Peak(989, 989, 67)),
    ("h800 pcie", Peak(756, 756, 51)),
    ("h800", Peak(989, 989, 67)),
    ("h20", Peak(148, 148, 44)),
    ("a100", Peak(312, 312, 19.5)),
    ("a800", Peak(312, 312, 19.5)),
    ("a40", Peak(149.7, 149.7, 37.4)),
    ("a30", Peak(165, 165, 10.3)),
    ("a10g", Peak(70, 70, 35)),
    ("a10", Peak(125, 125, 31.2)),
    ("a6000", Peak(154.8, 154.8, 38.7)),
    ("6000 ada", Peak(364.2, 364.2, 91.1)),
    ("l40s", Peak(362, 362, 91.6)),
    ("l40", Peak(181, 181, 90.5)),
    ("l4", Peak(121, 121, 30.3)),
    ("5090", Peak(209.5, 209.5, 104.8)),
    ("4090", Peak(165.2, 165.2, 82.6)),
    ("3090 ti", Peak(80, 80, 40)),
    ("3090", Peak(71, 71, 35.6)),
    ("v100 pcie", Peak(None, 112, 14)),
    ("v100", Peak(None, 125, 15.7)),
    ("t4", Peak(None, 65, 8.1)),
    ("mi325x", Peak(1307, 1307, 163.4)),
    ("mi300x", Peak(1307, 1307, 163.4)),
    ("mi250x", Peak(191.5, 191.5, 23.9)),  # of one of its two dies, which is one device to torch
)


def peak_tflops(device_name: str, dtype: Literal["bf16", "fp16", "fp32"]) -> float | None:
    """Peak of a device by the name that torch gives it; None where it is not known."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    for name, peak in PEAKS:
        if words.issuperset(name.split()):
            return peak and getattr(peak, dtype)
    return None
