"""Calibration of a device by the user's own measurements: of `megatronish plan --probe`, and of collectives.

Files have one JSON object a line. A probe has the key "probe"; a collective has "collective", "bytes", "ranks",
"nodes", "device" and a "fit" with "alpha_s", "bandwidth_bytes_per_s", "mean_error" and "accepted". What was measured on
another device than the one that is calibrated is refused: by its name, and where links are faster than they can be.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatronish.config.dump import write_toml
from megatronish.core.errors import UserError
from megatronish.core.foreign import is_finite, read_text
from megatronish.estimate.planner.device_speed import Efficiencies
from megatronish.estimate.planner.devices import ABOVE_SHEET, LARGEST, WITHOUT_SHEET, Device, device_of, device_table

STEPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Collectives that the model has links from, with how often each byte passes a link, and each rank's latency."""
PAIR = "send_recv"
"""A transfer from each rank to the next: in a node the model has those between stages from it."""


MOST_RANKS, SLOWEST, LEAST_LATENCY = 1e6, 1e3, 0.1e-6


class Row(NamedTuple):
    """A line of a file of measurements, and where it is."""

    values: Mapping[str, Any]
    where: str

    def error(self, said: str) -> UserError:
        """The sentence about what cannot be used of it."""
        return UserError(f"--calibrate {self.where}: {said}; measure again, or remove the line")

    def number(
        self, values: Mapping[str, Any], key: str, *, most: float, least: float | None = None, whole: bool = False
    ) -> float:
        """A number above 0, or from `least` on; UserError for anything else."""
        value: Any = values.get(key)
        if isinstance(value, int | float) and is_finite(value) and value <= most:
            above = value > 0 if least is None else value >= least
            if above and (not whole or value == int(value)):
                return float(value)
        rule = f"{'a whole number' if whole else 'a number'} {'above 0' if least is None else f'from {least:g} on'}"
        raise self.error(f"{key}={str(value)[:40]} must be {rule}, and at most {most:g}")


class MeasuredLink(NamedTuple):
    """Bus bandwidth in bytes a second and latency of one step, by a fit that was accepted."""

    bandwidth: float
    latency: float
    ranks: int
    nodes: int
    row: Row
    is_pair: bool = False

    @property
    def per_card(self) -> float:
        """Bytes a second of each network card, one a rank of a node."""
        return self.bandwidth / max(1, self.ranks // self.nodes)


def calibrated(device: Device, paths: Sequence[Path]) -> Device:
    """The device with what the files measured; UserError if a file cannot be read or nothing in it can be used."""
    rows = [row for path in paths for row in _rows(path)]
    links, probes = list(_links(rows)), [row for row in rows if "probe" in row.values]
    if not links and not probes:
        raise UserError(
            f"--calibrate {' '.join(map(str, paths))} has no probe and no accepted fit of a collective; measure with "
            "megatronish plan --probe, and with larger sizes on quiet links"
        )
    said = []
    if probes:
        device, name = _probed(device, probes[-1])
        said.append(f"matrix products and host of {name}")
    for link in links:
        _refuse_other_links(device, link)
    pairs, across = [link for link in links if link.is_pair], [link for link in links if link.nodes > 1]
    inside = [link for link in links if link.nodes == 1 and not link.is_pair]
    if inside:
        device = replace(
            device,
            all_reduce_gb_s=median(link.bandwidth for link in inside) / 1e9,
            latency_us=1e6 * median(link.latency for link in inside),
        )
        said.append(f"{len(inside)} collectives in a node")
    if across:
        per_card = median(link.per_card for link in across)
        device = replace(device, network_all_reduce_gb_s=per_card / 1e9)
        said.append(f"{len(across)} collectives over nodes")
    if pairs:
        device = replace(
            device,
            send_gb_s=median(link.bandwidth for link in pairs) / 1e9,
            send_us=1e6 * median(link.latency for link in pairs),
        )
        said.append("transfers between two devices")
    return replace(device, calibrated=", ".join(said))


def _probed(device: Device, row: Row) -> tuple[Device, str]:
    """The device with what a probe measured, and what the probe calls it."""
    probe = row.values["probe"]
    if not isinstance(probe, dict):
        raise row.error(f"probe={probe!r} is no object")
    name = str(probe.get("device", "a device"))
    _refuse_other(device, row, WITHOUT_SHEET if probe.get("type") == "cpu" else name)
    if "tflops" in probe:
        rate = row.number(probe, "tflops", most=LARGEST)
        if probe.get("precision") == "fp32":  # the device keeps the rate of 16 bits; both have one fraction
            rate *= device.bf16_tflops / device.fp32_tflops
        if rate > device.bf16_tflops and device.name != WITHOUT_SHEET:
            raise row.error(f"tflops={probe['tflops']!r} is above the peak of {device.name}, {device.bf16_tflops:g}")
        device = replace(device, achievable_tflops=rate, sustained=1.0)
    if "attention_tflops" in probe:
        rate = row.number(probe, "attention_tflops", most=LARGEST)
        scale = device.bf16_tflops / device.fp32_tflops if probe.get("precision") == "fp32" else 1.0
        device = replace(device, attention_tflops=rate * scale)
    if "memory_gb_s" in probe:
        copied = row.number(probe, "memory_gb_s", most=LARGEST)
        if copied > device.hbm_gb_s and device.name != WITHOUT_SHEET:
            raise row.error(f"memory_gb_s={copied:g} is above hbm_gb_s of {device.name}, {device.hbm_gb_s:g}")
        device = replace(device, hbm_gb_s=copied / Efficiencies().hbm)  # of the sheet's the model takes that part
    if "host_seconds_a_layer" in probe:
        device = replace(device, host_us=1e6 * row.number(probe, "host_seconds_a_layer", most=SLOWEST))
    if "tflops" not in probe and "host_seconds_a_layer" not in probe:
        raise row.error("the probe has neither tflops nor host_seconds_a_layer")
    return device, name


def _refuse_other(device: Device, row: Row, name: str) -> None:
    """UserError if a device with this name is not the row of the table that is calibrated."""
    other = device_table()[WITHOUT_SHEET] if name == WITHOUT_SHEET else device_of(name)
    if other is not None and other.name != device.name and device.name in device_table():
        raise UserError(
            f"--calibrate {row.where} measured {name}, which is {other.name}, and --device is {device.name}; name that "
            "device, or measure on this one"
        )


def _refuse_other_links(device: Device, link: MeasuredLink) -> None:
    """UserError if links are not those of the device: of another one, or faster than its own can be."""
    _refuse_other(device, link.row, str(link.row.values.get("device", "")))
    if device.name == WITHOUT_SHEET:
        return
    inside = link.nodes == 1
    reached, sheet = (link.bandwidth, device.node_gb_s) if inside else (link.per_card, device.network_gb_s)
    if reached > ABOVE_SHEET * 1e9 * sheet:
        where = "in its node" if inside else "to other nodes"
        remedy = "write its node_gb_s into a TOML file" if inside else f"say --network {reached / 1e9:.0f}GB/s"
        raise UserError(
            f"--calibrate {link.row.where} measured {reached / 1e9:.3g} GB/s, and a device of {device.name} has "
            f"{sheet:g} GB/s {where}; name the device that was measured, or {remedy}"
        )


def to_toml(device: Device) -> str:
    """Text of a TOML file with this device, which --device reads."""
    values = {field.name: getattr(device, field.name) for field in fields(Device) if field.name != "name"}
    table = {device.name: {name: value for name, value in values.items() if value is not None}}
    return write_toml(table, before=["A device as measured: megatronish plan --device FILE.toml"])


def _rows(path: Path) -> Iterator[Row]:
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--calibrate {path} cannot be read: {reason}; name files of measurements") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--calibrate {path}, line {number} is not JSON: {error}; measure again") from error
        if not isinstance(row, dict):
            raise UserError(f"--calibrate {path}, line {number} is no object; measure again")
        yield Row(row, f"{path}, line {number}")


def _links(rows: Iterable[Row]) -> Iterator[MeasuredLink]:
    """One link for each collective and group whose fit was accepted; of two fits by size that of the large ones."""
    fit_by_group = {}
    for row in rows:
        fit = row.values.get("fit")
        if not isinstance(fit, dict) or fit.get("accepted") is not True:
            continue
        fit = {
            name: row.values[name] for name in ("collective", "ranks", "nodes", "axis", "device") if name in row.values
        } | fit
        name = fit.get("collective")
        if not isinstance(name, str):
            raise row.error(f"collective={name!r} is no name")
        if name not in STEPS and name != PAIR:
            continue
        ranks, nodes = (int(row.number(fit, key, most=MOST_RANKS, whole=True)) for key in ("ranks", "nodes"))
        if ranks > 1 and (nodes == 1 or name != PAIR):
            fit_by_group[name, ranks, nodes, str(fit.get("axis"))] = row, fit
    for (name, ranks, nodes, _), (row, fit) in fit_by_group.items():
        is_pair, rate = name == PAIR, row.number(fit, "bandwidth_bytes_per_s", most=1e9 * LARGEST)
        alpha = row.number(fit, "alpha_s", most=SLOWEST, least=0.0)
        passes, steps = (1.0, 1.0) if is_pair else (STEPS[name] * (ranks - 1) / ranks, STEPS[name] * log2(ranks))
        measured = Row(fit, row.where)
        yield MeasuredLink(rate * passes, max(LEAST_LATENCY, alpha / steps), ranks, nodes, measured, is_pair)
