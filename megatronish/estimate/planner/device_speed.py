"""Speed of a device as the time model has it: constants, products, transfers, and what is known of their error.

Constants are few, each with physical bounds and a prior, most relative to what a device can achieve. Those of `FITTED`
are fitted to published steps (benchmarks/calibration.py), with a penalty towards the prior, because the data do not
identify them one by one; the others are fixed.

A matrix product takes the time of its tiles, in waves over the SMs, or of its bytes; transfers are alpha-beta, in a
node or over several.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.estimate.planner.devices import Device


class Bounds(NamedTuple):
    """Physical bounds of a constant, and where it is expected without data."""

    low: float
    prior: float
    high: float


FITTED = {
    "gemm": Bounds(0.80, 0.92, 1.0),
    "bmm": Bounds(0.3, 0.55, 0.8),
    "hbm": Bounds(0.6, 0.8, 0.95),
    "node": Bounds(0.7, 1.0, 1.1),
    "network": Bounds(0.5, 0.75, 0.95),
    "step_seconds": Bounds(0.002, 0.01, 0.03),
    "jitter": Bounds(0.0, 0.002, 0.006),
    "hop": Bounds(1.0, 1.5, 3.0),
    "host_us": Bounds(700.0, 1050.0, 1400.0),
    "queue": Bounds(2.0, 4.0, 10.0),
}
"""Bounds and priors of the fitted constants."""


class KnownError(NamedTuple):
    """What is known of the model's error for a kind of steps: a part of the seconds, either way, and why that."""

    part: float
    reason: str

    def interval(self, low: float, high: float, longer: float) -> tuple[float, float]:
        """Both ends with that error, and with what is not known of the schedule."""
        return low * (1 - self.part), high * (1 + self.part + longer)


FITTED_ON = ("a100-sxm", "a100-sxm-40")
MEAN = KnownError(
    0.12,
    "five of six of 276 published steps that were kept from the fit are as near (mean error 7 %)",
)
TENTH = 0.26
MEASURED = KnownError(
    0.21,
    "what steps of a calibrated CPU took more than was forecast while products, host and links alone were measured",
)


CONFIRMED = ("1f1b", "interleaved", "zb-h1")
UNCONFIRMED = 0.10
"""Part that a step may take longer under a schedule of which no published step was compared."""


def unconfirmed(schedule: str, stages: int) -> float:
    """The part that the schedule of so many stages adds to the worse end, by which layouts are ranked."""
    return UNCONFIRMED if stages > 1 and schedule not in CONFIRMED else 0.0


def known_error(device: Device, model: ModelConfig) -> KnownError:
    """The error to expect of a step: larger where the constants were fitted to nothing like it."""
    has_experts = model.num_experts is not None
    of_kind = [*(["experts"] if has_experts else []), *([] if device.name in FITTED_ON else [device.name])]
    if device.calibrated is not None and not has_experts:
        return MEASURED
    if not of_kind:
        return MEAN
    return KnownError(
        TENTH,
        f"no step of {' or '.join(of_kind)} is among those that the model was fitted to, and so far off was one in ten "
        "of 401 published steps before it was fitted to any of their kind",
    )


@dataclass(frozen=True)
class Efficiencies:
    """Constants of the time model; fractions of `Device` figures unless stated otherwise."""

    gemm: float = 0.935
    """Of the achievable FLOP/s: a large matrix product in a training step."""
    bmm: float = 0.571
    """The same of the products of explicit attention scores."""
    hbm: float = 0.826
    node: float = 1.01
    """Of the measured bus bandwidth inside a node."""
    network: float = 0.746
    step_seconds: float = 0.0083
    """Fixed time of a step."""
    jitter: float = 0.0021
    """Part of a step that ranks wait for the slowest, for each doubling of their number."""
    host_us: float = 1050.0
    """Time of the host to launch a pass of a dense layer without collectives: vtrain.csv has 1.0 to 1.1 ms."""
    queue: float = 3.8
    """Power of the mean of a pass's seconds on host and device: neither keeps the other one busy all the time."""
    hop: float = 1.5
    """Times that a transfer between stages takes longer than its bytes at full speed: two sides have to meet."""
    flash: float = 0.63
    """Of the achievable FLOP/s: flash attention forward, heads of 128, long sequences, by a kernel of the device's own
    generation. Alone cuDNN's reaches .73 on H100 (Shah et al. 2024, arXiv:2407.08608); in a step .6 at 8,192."""
    half_length: int = 400
    """Tokens at which it has half of that rate: there cuDNN has 225, 288, 363, 388 TFLOP/s at 512, 1k, 4k and 16k."""
    flash_backward: float = 2.5 * 1.15
    """FLOPs of its backward, over those of its forward, with its lower rate."""
    prologue: int = 128
    """Elements of the inner dimension that the start and the end of a tile cost."""
    fused: float = 0.7
    """Pointwise bytes of fused kernels or a compiled layer, over those without."""
    hidden: float = 0.8
    """Most of a transfer that overlapping computation hides."""
    uneven: float = 1.2
    """Load of the fullest rank of experts over the mean, at the worse end of the interval."""


PRECISIONS = {"highest": "fp32", "high": "TF32 at half of the rate of 16 bits", "medium": "bf16"}


def reservations(config: Config) -> list[str]:
    """Sentences about times that no published step has confirmed, or that are left out."""
    sentences = []
    if config.adapter.is_used:
        text = (
            "adapters: the products of rank r and the frozen layers without weight gradients are counted; no "
            "measured step has confirmed them, and the host's part, twice that of a plain layer, is a guess"
        )
        if config.adapter.quantize_base is not None:
            text += "; decoding a quantised base is counted by its bytes alone, so steps may be longer"
        sentences.append(text)
    if OBJECTIVE_NAMES[config.training.objective].learns_from != "text":
        sentences.append(
            f"objective {config.training.objective}: rows are taken to be full, both completions of a pair in one; "
            "forward passes of a reference cost what the model's own do, and filling its pipeline; the loss over pairs "
            "is not counted"
        )
    if config.optimizer.optimizer == "muon":
        sentences.append(
            f"muon: {config.optimizer.muon_num_ns_steps} Newton-Schulz iterations of three products in "
            f"{PRECISIONS[config.optimizer.muon_fp32_matmul_prec]} for each matrix that a rank owns, and the exchange "
            "of all matrices are counted; no measured step has confirmed them"
        )
    if config.measures_logits:
        sentences.append(
            "largest logits: a product of queries and keys more in each forward is counted, whose scores are written "
            "and read once; no measured step has confirmed it"
        )
    if config.parallel.optimizer_cpu_offload or config.parallel.param_cpu_offload:
        disk = "" if config.parallel.offload_folder is None else "; what the disk reads and writes is counted"
        sentences.append(
            "offloading: transfers over PCIe and the update by the CPU are not modelled, so every step is longer than "
            f"printed{disk}"
        )
    if config.parallel.num_copies > 1 or config.parallel.zero_hpz_partition_size is not None:
        sentences.append(
            "copies: what ZeRO shards is counted as if all data ranks shared it, so where copies keep it in a node, "
            "steps over slow links are shorter than printed"
        )
    if config.parallel.outer_optimizer is not None:
        sentences.append(
            "islands: gradients are counted as if all data ranks summed them in every step, and outer steps are left "
            "out, so steps over slow links are shorter than printed"
        )
    return sentences


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.6))
"""Rows and columns of the tiles of libraries, and the part of the rate that each reaches."""
WITHOUT_TENSOR_CORES = 3.0  # sizes that are no multiple of 16 bytes
ALIGNED = 8  # elements of 16 bits
NARROW = 0.75
"""Rate of flash attention with heads of 64 over that of 128: cuDNN .69, FlashAttention 2 .88 (Shah et al. 2024)."""


class Machine(NamedTuple):
    """Rates of a device as the model uses them: FLOP/s of large products, bytes a second of its memory, its SMs."""

    flops: float
    hbm: float
    sms: int
    prologue: int
    element_bytes: int
    attention: float
    """FLOP/s of flash attention, with heads of 128 and long sequences."""

    @classmethod
    def of(cls, device: Device, efficiencies: Efficiencies, precision: str) -> "Machine":
        """The rates for a precision of training."""
        part = device.fp32_tflops / device.bf16_tflops if precision == "fp32" else 1.0
        attention = efficiencies.flash * device.flops(precision)
        if device.attention_tflops is not None:
            attention = 1e12 * part * device.attention_tflops
        return cls(
            device.flops(precision) * efficiencies.gemm,
            1e9 * device.hbm_gb_s * efficiencies.hbm,
            device.sms,
            efficiencies.prologue,
            4 if precision == "fp32" else 2,
            attention,
        )

    def flash_seconds(self, flops: float, seq_length: int, size: int, half_length: int) -> float:
        """Seconds of flash attention forward: short sequences and narrow heads, or misaligned ones, are slower."""
        fits = 0.5 + 0.5 * size / (64 * ceil(size / 64)) if size % ALIGNED == 0 else 1 / WITHOUT_TENSOR_CORES
        fits *= seq_length / (seq_length + half_length) * (NARROW if size <= 64 else 1.0)
        return flops / (self.attention * fits)


@lru_cache(maxsize=200_000)
def product_seconds(machine: Machine, rows: int, inner: int, columns: int, groups: int = 1) -> float:
    """Seconds of `groups` products [rows, inner] x [inner, columns], started together."""
    if min(rows, inner, columns) < 1:
        return 0.0
    flops, sms = machine.flops, machine.sms
    quantised = min(
        ceil(groups * ceil(rows / tm) * ceil(columns / tn) / sms)
        * (2.0 * tm * tn * (inner + machine.prologue) * sms / (flops * rate))
        for tm, tn, rate in TILES
    )
    plain = 2.0 * groups * rows * inner * columns / flops
    moved = machine.element_bytes * groups * (rows * inner + inner * columns + rows * columns) / machine.hbm
    slower = WITHOUT_TENSOR_CORES if rows % ALIGNED or inner % ALIGNED or columns % ALIGNED else 1.0
    return max(slower * (quantised + plain) / 2, moved)


def gradient_seconds(machine: Machine, rows: int, inner: int, columns: int, groups: int = 1) -> float:
    """Seconds of the weight gradients of such products, which are added to sums in fp32."""
    product = product_seconds(machine, columns, rows, inner, groups)
    return max(product, 8.0 * groups * columns * inner / machine.hbm)


class Links(NamedTuple):
    """Bytes a second inside a node and over the network card of one device, latency, and devices of a node.

    `pair` and `pair_latency` are of a transfer between two devices of a node.
    """

    node: float
    network: float
    latency: float
    gpus_per_node: int
    hop: float
    pair: float
    pair_latency: float

    @classmethod
    def of(cls, device: Device, efficiencies: Efficiencies) -> "Links":
        """The links of a device's nodes."""
        measured, node = device.network_all_reduce_gb_s, device.ring_bytes_per_second * efficiencies.node
        return cls(
            node,
            1e9 * (measured if measured is not None else device.network_gb_s * efficiencies.network),
            1e-6 * device.latency_us,
            device.gpus_per_node,
            efficiencies.hop,
            node / efficiencies.hop if device.send_gb_s is None else 1e9 * device.send_gb_s,
            1e-6 * (device.latency_us if device.send_us is None else device.send_us),
        )

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes a second of a ring over ranks that are `stride` apart; those of one node use a network card each."""
        in_node = max(1, min(size, self.gpus_per_node // stride))
        if in_node >= size and size * stride <= self.gpus_per_node:
            return self.node
        return min(in_node * self.network, self.node)

    def gather(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds of an all-gather of `nbytes` in all, or of a reduce-scatter."""
        if size == 1:
            return 0.0
        return (size - 1) / size * nbytes / self.bandwidth(size, stride) + log2(size) * self.latency

    def all_reduce(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds of an all-reduce of `nbytes` on each rank."""
        return 2 * self.gather(size, stride, nbytes)

    def all_to_all(self, size: int, stride: int, nbytes: float) -> float:
        """Seconds of an all-to-all in which each rank sends `nbytes`, to all ranks alike."""
        if size == 1:
            return 0.0
        in_node = max(1, min(size, self.gpus_per_node // stride))
        inside, outside = nbytes * (in_node - 1) / size, nbytes * (size - in_node) / size
        return max(inside / self.node, outside / self.network) + 2 * self.latency

    def send(self, stride: int, stages: int, nbytes: float) -> float:
        """Mean seconds of a transfer to the next of so many stages, `stride` ranks away; both sides have to meet."""
        leaves = min(1.0, stride / self.gpus_per_node) if stride * stages > self.gpus_per_node else 0.0
        seconds = nbytes * (self.hop * leaves / self.network + (1 - leaves) / self.pair)
        return seconds + (self.latency if leaves == 1 else self.pair_latency)
