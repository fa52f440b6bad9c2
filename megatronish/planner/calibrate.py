"""Calibration of a device by the user's own measurements: of `megatronish plan --probe`, and of collectives.

Files have one JSON object a line. A probe has the key "probe"; a collective has "collective", "bytes", "ranks",
"nodes" and a "fit" with "alpha_s", "bandwidth_bytes_per_s", "mean_error" and "accepted".
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatronish.errors import UserError
from megatronish.planner.devices import Device

STEPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Collectives that the model has links from, with how often each byte passes a link, and each rank's latency."""


class MeasuredLink(NamedTuple):
    """Bus bandwidth in bytes a second and latency of one step, by a fit that was accepted."""

    bandwidth: float
    latency: float
    ranks: int
    nodes: int


def calibrated(device: Device, paths: Sequence[Path]) -> Device:
    """The device with what the files measured; UserError if a file cannot be read or nothing in it can be used."""
    rows = [row for path in paths for row in _rows(path)]
    links, probes = list(_links(rows)), [row["probe"] for row in rows if "probe" in row]
    if not links and not probes:
        raise UserError(
            f"--calibrate {' '.join(map(str, paths))} has no probe and no accepted fit of a collective; measure with "
            "megatronish plan --probe, and with larger sizes on quiet links"
        )
    said = []
    if probes:
        probe = probes[-1]
        rate = probe.get("tflops")
        if probe.get("precision") == "fp32" and rate:  # the device keeps the rate of 16 bits; both have one fraction
            rate *= device.bf16_tflops / device.fp32_tflops
        device = replace(
            device,
            achievable_tflops=rate or device.achievable_tflops,
            sustained=1.0 if rate else device.sustained,
            host_us=1e6 * probe["host_seconds_a_layer"] if "host_seconds_a_layer" in probe else device.host_us,
        )
        said.append(f"matrix products and host of {probe.get('device', 'a device')}")
    inside, across = [link for link in links if link.nodes == 1], [link for link in links if link.nodes > 1]
    if inside:
        device = replace(
            device,
            all_reduce_gb_s=median(link.bandwidth for link in inside) / 1e9,
            latency_us=1e6 * median(link.latency for link in inside),
        )
        said.append(f"{len(inside)} collectives in a node")
    if across:
        per_card = median(link.bandwidth / max(1, link.ranks // link.nodes) for link in across)
        device = replace(device, network_all_reduce_gb_s=per_card / 1e9)
        said.append(f"{len(across)} collectives over nodes")
    return replace(device, calibrated=", ".join(said))


def to_toml(device: Device) -> str:
    """Text of a TOML file with this device, which --device reads."""
    lines = ["# A device as measured: megatronish plan --device FILE.toml", f"[{json.dumps(device.name)}]"]
    for each in fields(Device):
        value = getattr(device, each.name)
        if each.name != "name" and value is not None:
            lines.append(f"{each.name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, ""])


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--calibrate {path} cannot be read: {reason}; name files of measurements") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"--calibrate {path}, line {number} is not JSON: {error}; measure again") from error
        if not isinstance(row, dict):
            raise UserError(f"--calibrate {path}, line {number} is no object; measure again")
        yield row


def _links(rows: Iterable[Mapping[str, Any]]) -> Iterator[MeasuredLink]:
    """One link for each collective and group whose fit was accepted; of two fits by size that of the large ones."""
    found = {}
    for row in rows:
        fit = row.get("fit")
        if not isinstance(fit, dict) or not fit.get("accepted"):
            continue
        fit = {name: row[name] for name in ("collective", "ranks", "nodes", "axis") if name in row} | fit
        if fit.get("collective") in STEPS and fit["ranks"] > 1:
            found[fit["collective"], fit["ranks"], fit["nodes"], str(fit.get("axis"))] = fit
    for (name, ranks, nodes, _), fit in found.items():
        times = STEPS[name]
        bus = fit["bandwidth_bytes_per_s"] * times * (ranks - 1) / ranks
        yield MeasuredLink(bus, max(0.1e-6, fit["alpha_s"] / (times * log2(ranks))), ranks, nodes)
