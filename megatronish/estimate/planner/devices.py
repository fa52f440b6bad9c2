"""Devices that a plan is made for: rows of devices.toml, a TOML file of one's own, and the network between nodes."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatronish.core.errors import UserError
from megatronish.core.foreign import is_finite, parse_toml, read_text

TABLE = Path(__file__).with_name("devices.toml")
ACHIEVABLE, RING = 0.8, 0.77
"""Parts of the peak and of a link that are taken where nothing was measured: those of H100 and A100."""
TEXTS = ("name", "calibrated", "source")
WHOLE = ("sms", "gpus_per_node")
TRUTHS = ("has_bf16",)
LARGEST = 1e9
ABOVE_SHEET = 1.3
"""Bus bandwidth over that of the data sheet that can be: switches that add up send less than a ring (H200: 1.05)."""
MEASURED = {
    "achievable_tflops": "bf16_tflops",
    "attention_tflops": "bf16_tflops",
    "all_reduce_gb_s": "node_gb_s",
    "network_all_reduce_gb_s": "network_gb_s",
    "send_gb_s": "node_gb_s",
    "send_us": "node_gb_s",
}
"""What was measured of a device, and the figure of its sheet that it belongs to."""
WITHOUT_SHEET = "cpu"
"""The row whose peak is no maker's, so a measurement may be above it."""


@dataclass(frozen=True)
class Device:
    """A device, its node and its network. Rates are TFLOP/s and 10^9 bytes a second in one direction of one device."""

    name: str
    bf16_tflops: float
    """Dense peak in 16 bits, by the data sheet: bf16, or fp16 where there is no bf16."""
    fp32_tflops: float
    memory_gib: float
    hbm_gb_s: float
    """Of the device's own memory."""
    sms: int
    """Processors over which the tiles of a product are dealt."""
    node_gb_s: float
    """To the other devices of its node."""
    network_gb_s: float
    """To other nodes, over its network card."""
    gpus_per_node: int = 8
    achievable_tflops: float | None = None
    """What the best matrix product reaches for a long time, as measured; None: .8 of the peak."""
    attention_tflops: float | None = None
    """What flash attention reaches forward, with heads of 128 and long sequences, as measured; None: the model's."""
    sustained: float = 0.88
    """Part of the achievable rate that the power limit leaves in a training step; 1 where a probe measured it there."""
    all_reduce_gb_s: float | None = None
    network_all_reduce_gb_s: float | None = None
    """As measured over nodes, for each network card; None: the part of `network_gb_s` that the model has."""
    latency_us: float = 20.0
    """Of one step of a collective."""
    send_gb_s: float | None = None
    """To one other device of its node, as measured while that one sends, too; None: the model's part of `node_gb_s`."""
    send_us: float | None = None
    """Latency of such a transfer, as measured; None: that of a collective's step."""
    host_us: float | None = None
    """Time that the host needs to launch a pass of one dense layer, as measured; None: that of the model."""
    nvme_gb_s: float = 6.0
    """Of the local disk of a node, reading or writing, which the ranks there share: of a usual NVMe disk."""
    has_bf16: bool = True
    """Whether the device multiplies matrices of bf16."""
    calibrated: str | None = None
    """What was measured on this device, if anything was."""
    source: str = ""

    def flops(self, precision: str) -> float:
        """FLOP/s that the best matrix product reaches for a long time."""
        reached = (self.achievable_tflops or ACHIEVABLE * self.bf16_tflops) / self.bf16_tflops
        return 1e12 * reached * self.sustained * (self.fp32_tflops if precision == "fp32" else self.bf16_tflops)

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet, for MFU."""
        return 1e12 * (self.fp32_tflops if precision == "fp32" else self.bf16_tflops)

    def lacks(self, precision: str) -> str | None:
        """Sentence about a precision that the device does not have; None if it does."""
        if precision == "bf16" and not self.has_bf16:
            return f"{self.name} has no bf16, which it would emulate many times slower"
        return None

    @property
    def ring_bytes_per_second(self) -> float:
        """Bus bandwidth of a collective inside a node."""
        return 1e9 * (self.all_reduce_gb_s or RING * self.node_gb_s)


@cache
def device_table() -> dict[str, Device]:
    """{name: device} of all rows of devices.toml."""
    return {name: _device(name, row, "devices.toml") for name, row in tomllib.loads(TABLE.read_text()).items()}


def find_device(given: str) -> Device:
    """Device of a name of the table, or of a TOML file; UserError with a suggestion if there is none."""
    table = device_table()
    name = given.lower().replace("_", "-").replace(" ", "-")
    if name in table:
        return table[name]
    if given.endswith(".toml"):
        return read_device(Path(given))
    likely = difflib.get_close_matches(name, table, n=1, cutoff=0.8)  # a1000-sxm is a100-sxm rather than a10
    begun = likely + [each for each in table if name and (each.startswith(name) or name.startswith(each))]
    first_words = {each.partition("-")[0]: each for each in reversed(table)}  # h100 -> h100-sxm
    close = difflib.get_close_matches(name.partition("-")[0], first_words, n=1, cutoff=0.5)
    nearest = begun or [first_words[each] for each in close]
    meant = f"did you mean {nearest[0]}? " if nearest else ""
    raise UserError(
        f"--device {given or repr(given)} is not known; {meant}use one of {', '.join(table)}, or a FILE.toml of your "
        "own"
    )


def read_device(path: Path) -> Device:
    """Device of a TOML file with one table; UserError if it cannot be read or lacks a number."""
    try:
        tables = parse_toml(read_text(path))
    except OSError as error:
        raise UserError(f"--device {path} cannot be read: {error.strerror}; name a device or a TOML file") from error
    except ValueError as error:  # of TOML, of its encoding, or of a number of thousands of digits
        raise UserError(f"--device {path} is not TOML: {error}; correct that line") from error
    rows = {name: row for name, row in tables.items() if isinstance(row, dict)}
    if len(rows) != 1:
        raise UserError(f"--device {path} must have one table, such as [my-device], and has {len(rows)}; correct it")
    ((name, row),) = rows.items()
    return _device(name, row, str(path))


def _device(name: str, row: Mapping[str, Any], path: str) -> Device:
    """Device of a row. A row that names another one with `like` takes what it lacks from it.

    What was measured of the other one is not taken where the row has its own figure of the sheet.
    """
    row = dict(row)
    if "like" in row:
        base = _base(name, row.pop("like"), path)
        others = {key: None for key, sheet in MEASURED.items() if sheet in row}  # of another link, or another chip
        row = {field.name: getattr(base, field.name) for field in fields(Device)} | others | row
    row["name"] = name
    known = {each.name: each for each in fields(Device)}
    for key in row:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
            raise UserError(f"{path}: {key} is not a key of a device; {remedy}")
    required = [each.name for each in fields(Device) if each.default is each.default_factory]
    missing = [each for each in required if each not in row]
    if missing:
        raise UserError(f"{path}: {name} lacks {', '.join(missing)}; add them, or like = 'h100-sxm'")
    if (complaint := complaint_about(row)) is not None:
        raise UserError(f"{path}: {complaint}")
    return Device(**row)


def _base(name: str, given: object, path: str) -> Device:
    """The row of the table that a device is like."""
    table = device_table()
    if not isinstance(given, str) or given not in table:
        raise UserError(f"{path}: like={given!r} of {name} is no row of the table; use one of {', '.join(table)}")
    return table[given]


def complaint_about(values: Mapping[str, Any]) -> str | None:
    """What no device has, of these values of its keys, with a remedy; None if all is possible."""
    name = values["name"]
    for key, value in values.items():
        said = f"{key}={value!r} of {name}"
        if value is None:
            continue
        if key in TEXTS:
            if not isinstance(value, str):
                return f"{said} must be a text; write it in quotation marks"
            continue
        if key in TRUTHS:
            if not isinstance(value, bool):
                return f"{said} must be true or false; correct it"
            continue
        if not (is_finite(value) and 0 < value <= LARGEST):
            return f"{said} must be a number above 0, and at most {LARGEST:g}; correct it"
        if key in WHOLE and value != int(value):
            return f"{said} must be a whole number; correct it"
    sustained, rate, peak = (values.get(key) for key in ("sustained", "achievable_tflops", "bf16_tflops"))
    if sustained is not None and sustained > 1:
        return f"sustained={sustained:g} of {name} is a part of what is achievable, at most 1; correct it"
    if rate is not None and peak is not None and rate > peak and name != WITHOUT_SHEET:
        return (
            f"achievable_tflops={rate:g} of {name} is above bf16_tflops={peak:g}, its peak; correct one of them, or "
            "name the device that was measured"
        )
    links = ("all_reduce_gb_s", "node_gb_s"), ("network_all_reduce_gb_s", "network_gb_s"), ("send_gb_s", "node_gb_s")
    for measured, sheet in links:
        bus, link = values.get(measured), values.get(sheet)
        if bus is not None and link is not None and bus > ABOVE_SHEET * link and name != WITHOUT_SHEET:
            return (
                f"{measured}={bus:g} of {name} is over {ABOVE_SHEET:g} times {sheet}={link:g}, which no collective "
                "reaches; correct one of them"
            )
    return None


UNITS = {"B": 1e-9, "kB": 1e-6, "MB": 1e-3, "GB": 1.0, "TB": 1e3, "b": 1e-9 / 8, "Mb": 1e-3 / 8, "Gb": 1 / 8}


def network_gb_s(given: str) -> float:
    """ "50GB/s" -> 50.0, "400Gb/s" -> 50.0: one direction of one device; UserError without a unit."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kMGT]?[Bb])(?:/s|ps|it/s)?\s*", given)
    if match is None or match[2] not in UNITS:
        raise UserError(
            f"--network {given} needs a number and a unit: GB/s are bytes and Gb/s are bits, of one direction of one "
            "device; write --network 50GB/s, which is 400Gb/s"
        )
    try:
        value = float(match[1]) * UNITS[match[2]]
    except ValueError:
        value = 0.0
    if value <= 0:
        raise UserError(f"--network {given} must be above 0; write --network 50GB/s")
    return value


class Peak(NamedTuple):
    """Dense TFLOP/s of a device without a row, by its maker's data sheet. `bf16` None: the device has no bf16 units."""

    bf16: float | None
    fp16: float
    fp32: float


H100_NVL, H100, A100 = Peak(835, 835, 60), Peak(989, 989, 67), Peak(312, 312, 19.5)
BY_WORDS: tuple[tuple[str, str | Peak | None], ...] = (
    ("laptop", None),  # anything between a third and all of the desktop card
    ("gb200", "gb200-nvl72"),
    ("b200", "b200"),
    ("h200 nvl", H100_NVL),
    ("h200", "h200"),
    ("gh200", H100),
    ("h100 pcie", "h100-pcie"),
    ("h100 nvl", H100_NVL),
    ("h100", "h100-sxm"),
    ("h800 pcie", Peak(756, 756, 51)),
    ("h800", H100),
    ("h20 3e", Peak(148, 148, 44)),
    ("h20", "h20"),
    ("a100 pcie", A100),
    ("a100 40gb", "a100-sxm-40"),
    ("a100", "a100-sxm"),
    ("a800", A100),
    ("a40", Peak(149.7, 149.7, 37.4)),
    ("a30", Peak(165, 165, 10.3)),
    ("a10g", Peak(70, 70, 35)),
    ("a10", "a10"),
    ("a6000", "a6000"),
    ("6000 ada", Peak(364.2, 364.2, 91.1)),
    ("l40s", "l40s"),
    ("l40", Peak(181, 181, 90.5)),
    ("l4", Peak(121, 121, 30.3)),
    ("5090", Peak(209.5, 209.5, 104.8)),
    ("4090 d", Peak(165.2, 165.2, 82.6)),
    ("4090", "rtx-4090"),
    ("3090 ti", Peak(80, 80, 40)),
    ("3090", "rtx-3090"),
    ("v100 pcie", Peak(None, 112, 14)),
    ("v100 sxm2 32gb", "v100-sxm"),
    ("v100 sxm3 32gb", "v100-sxm"),
    ("v100", Peak(None, 125, 15.7)),
    ("t4", "t4"),
    ("mi325x", Peak(1307, 1307, 163.4)),
    ("mi300x", "mi300x"),
    ("mi250x", Peak(191.5, 191.5, 23.9)),  # of one of its two dies, which is one device to torch
)
"""Words of a device's name by torch -> its row of the table, or its peak alone. The first row whose words are all in
the name counts, so variants come first. Data sheets that print sparse numbers are halved; fp32 is without TF32."""


def device_of(name: str) -> Device | None:
    """Row of the table for a device that torch names so; None where there is none."""
    device = _named(name)
    return device if isinstance(device, Device) else None


def peak_tflops(name: str, dtype: Literal["bf16", "fp16", "fp32"]) -> float | None:
    """Peak of a device by the name that torch gives it; None where it is not known."""
    device = _named(name)
    if isinstance(device, Device):
        device = Peak(device.bf16_tflops if device.has_bf16 else None, device.bf16_tflops, device.fp32_tflops)
    return device and getattr(device, dtype)


def _named(name: str) -> Device | Peak | None:
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    known = next((known for fitting, known in BY_WORDS if words.issuperset(fitting.split())), None)
    return device_table()[known] if isinstance(known, str) else known
