"""The probe of `megatronish plan --probe`: products and attention at a model's own shapes, memory, host and links."""

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatronish.commands.configuration import read_config
from megatronish.core.errors import UserError
from megatronish.core.files import unwritten
from megatronish.estimate.costs.candidate import Candidate
from megatronish.estimate.links.bench import bench
from megatronish.estimate.links.settings import LinkArguments
from megatronish.estimate.planner.device_speed import Efficiencies, Machine, product_seconds
from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.workload import Workload
from megatronish.launch.local import launch
from megatronish.launch.place import Place
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

FEW, MANY = 2, 6  # layers of the two models whose difference is the time of a layer
TINY = (
    "--mock-data --vocab-size 128 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 10 --lr 1e-3 --run-dir never-written"
)
SECONDS = 0.3  # for each product
FEWEST_STEPS = 22  # of each of the two models
WARM_SECONDS, SQUARE = 3.0, 4096  # of products before the first one that is measured
COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}  # elements of 4 bytes
MOST_TOKENS = {"cpu": 512, "cuda": 1 << 20}
MEASURED_LINKS = ("all_reduce", "send_recv")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def probe(work: Workload, device: Device, candidate: Candidate, out: Path, gpus: int | None) -> str:
    """Measure this machine, append JSON lines to `out`, and say what was found.

    Links are those between the GPUs of this machine, at most `gpus`; on a CPU between so many ranks.
    """
    _refuse_unwritable(out)  # before minutes of measuring
    # Ranks are forked, so they come before CUDA is touched here; to count devices touches nothing.
    devices = torch.cuda.device_count()
    links = measured_links(min(gpus or devices, devices) if devices else gpus or 1)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if where.type == "cuda" else platform.processor() or platform.machine()
    record: dict[str, Any] = {
        "device": name,
        "type": where.type,
        "precision": work.precision,
        "tflops": achievable_tflops(work, device, candidate, where),
        "memory_gb_s": memory_gb_s(where),
        "host_seconds_a_layer": host_seconds_a_layer(where.type),
    }
    if work.attention == "flash":
        record["attention_tflops"] = attention_tflops(work, device, candidate, where)
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in ({"probe": record}, *links))
    return (
        f"{name}: {record['tflops']:.4g} TFLOP/s achievable in {work.precision} at the shapes of this model, "
        f"{1e6 * record['host_seconds_a_layer']:.0f} us of the host a layer and pass, "
        f"{record['memory_gb_s']:.4g} GB/s of memory{''.join(map(_said_of, links))}; added to {out}"
    )


def measured_links(num_ranks: int) -> list[dict[str, Any]]:
    """Fits of an all-reduce of so many ranks of this machine, and of transfers to the next; none of a single rank."""
    if num_ranks < 2:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.jsonl"
        arguments = LinkArguments(tp=num_ranks, collectives=MEASURED_LINKS, json=path)
        if launch(partial(bench, arguments, arguments.layout(num_ranks)), world_size=num_ranks):
            raise UserError(
                f"--probe: the links of {num_ranks} ranks were not measured; look at what is printed above, or leave "
                "them out with --gpus 1"
            )
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "fit" in line]


def _said_of(line: dict[str, Any]) -> str:
    """What a fit says of a link, and of a refused one why."""
    fit = line["fit"]
    if not fit["accepted"]:
        return f", {fit['collective']} refused: {fit['reason']}"
    return (
        f", {fit['collective']} of {fit['ranks']} ranks at {fit['bandwidth_bytes_per_s'] / 1e9:.4g} GB/s after "
        f"{1e6 * fit['alpha_s']:.0f} us"
    )


def _is_measured(line: str) -> bool:
    """Whether a line is of a file of measurements: of a probe, or of links."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and bool({"probe", "collective"} & record.keys())


def _refuse_unwritable(out: Path) -> None:
    try:
        with out.open("a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            line = file.readline(65_536).strip()
    except OSError as error:
        raise unwritten(f"--probe {out}", out, error) from error
    if line and not _is_measured(line):
        raise UserError(f"--probe {out} has other text than measurements, one JSON object a line; choose another file")


def achievable_tflops(work: Workload, device: Device, candidate: Candidate, where: torch.device) -> float:
    """TFLOP/s at which the model of products would predict the measured time of a layer's products."""
    machine = Machine.of(device, Efficiencies(), work.precision)
    _warm(where)
    tokens = min(candidate.micro_batch * work.seq_length // candidate.mesh.cp, MOST_TOKENS[where.type])
    measured = expected = 0.0
    for linear in dict.fromkeys(linear for kind in work.kinds for linear in kind.cost.linears if linear.copies == 1):
        inner = linear.in_features // (candidate.mesh.tp if linear.cut == "row" else 1)
        columns = linear.out_features // (candidate.mesh.tp if linear.cut == "column" else 1)
        measured += _seconds_of_product(tokens, inner, columns, DTYPES[work.precision], where)
        expected += product_seconds(machine, tokens, inner, columns)
    return device.flops(work.precision) / 1e12 * expected / measured


def attention_tflops(work: Workload, device: Device, candidate: Candidate, where: torch.device) -> float:
    """TFLOP/s at which the model of flash attention would predict the measured time of a layer's forward."""
    efficiencies, dtype = Efficiencies(), DTYPES[work.precision]
    machine, s = Machine.of(device, efficiencies, work.precision), min(work.seq_length, MOST_TOKENS[where.type])
    measured = expected = 0.0
    for core in dict.fromkeys(core for kind in work.kinds for core in kind.cost.cores):
        heads = core.num_heads // candidate.mesh.tp
        q, k = (torch.randn(1, heads, s, core.query_size, device=where).to(dtype) for _ in range(2))
        v = torch.randn(1, heads, s, core.value_size, device=where).to(dtype)
        measured += _median_seconds(partial(scaled_dot_product_attention, q, k, v, is_causal=True), where)
        flops = heads * s * (s + 1) * (core.query_size + core.value_size)  # of what causality shows
        expected += machine.flash_seconds(flops, s, core.query_size, efficiencies.half_length)
    return machine.attention / 1e12 * expected / measured


def memory_gb_s(where: torch.device) -> float:
    """10^9 bytes a second that a copy reads and writes, of a tensor that no cache holds."""
    whole = torch.zeros(COPIED[where.type], device=where)
    copy = torch.empty_like(whole)
    return 2 * whole.nbytes / 1e9 / _median_seconds(partial(copy.copy_, whole), where)


def _warm(where: torch.device) -> None:
    """Products for some seconds, until a GPU has the clock that its power limit leaves it for long."""
    square = torch.zeros(SQUARE, SQUARE, device=where)
    started = time.perf_counter()
    while where.type == "cuda" and time.perf_counter() - started < WARM_SECONDS:
        _median_seconds(partial(torch.mm, square, square), where)


def _seconds_of_product(rows: int, inner: int, columns: int, dtype: torch.dtype, where: torch.device) -> float:
    a = torch.randn(rows, inner, device=where).to(dtype)
    b = torch.randn(columns, inner, device=where).to(dtype)
    return _median_seconds(lambda: torch.nn.functional.linear(a, b), where)


def host_seconds_a_layer(device_type: str) -> float:
    """Seconds that the host needs for a pass of one layer: two tiny models of different depth, by the real engine.

    They step in turns, and the shortest steps count: what else the machine does only adds, and not to both alike.
    """
    where, steps = torch.device(device_type), list[Callable[[], object]]()
    for layers in (FEW, MANY):
        flags = [*TINY.split(), "--num-layers", str(layers), "--device", device_type, "--global-batch-size", "1"]
        config, _ = read_config(flags)
        job = TrainingJob.open(config, start_mesh(config, Place()))
        batches = job.batches_of(job.datasets.train)(0, 1)
        engine = job.build_engine()

        def step(engine: Any = engine, batches: Any = batches) -> object:
            return engine.step(batches, num_steps_done=1, learning_rate=1e-3, weight_decay=0.1)

        steps.append(step)
    times: list[list[float]] = [[], []]
    started = time.perf_counter()
    while len(times[0]) < FEWEST_STEPS or time.perf_counter() - started < 2 * SECONDS:
        for taken, of_step in zip(steps, times, strict=True):
            of_step.append(_seconds(taken, where))
    few, many = (min(of_step[2:]) for of_step in times)
    return max(1e-6, (many - few) / (MANY - FEW) / 2)  # a forward and a backward


def _median_seconds(work: Callable[[], object], where: torch.device) -> float:
    """Median time of a call, after two that warm up."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - started < SECONDS:
        times.append(_seconds(work, where))
    return statistics.median(times[2:])


def _seconds(work: Callable[[], object], where: torch.device) -> float:
    """Time of a call, with what it started on a GPU."""
    if where.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if where.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
