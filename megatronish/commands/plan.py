"""Planner of layouts: which tp, pp, dp, cp, schedule, ZeRO and recomputation for a model and a machine.

    megatronish plan --config llama-70b --gpus 512 --device h100-sxm --gpus-per-node 8 --network 50GB/s
    megatronish plan --config llama-70b --gpus 512 --device h100-sxm --explain 1 --write plan.toml

Every legal layout is costed, memory first, then time, and the best of different meshes are printed, ranked by the worse
end of the interval. --explain takes a row, or a layout such as tp=8,pp=4,micro=1,zero=1. Flags that are not listed here
are those of pretrain (--seq-length, --global-batch-size, --vocab-size ...). See docs/PLANNER.md.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.config.arguments import read_arguments
from megatronish.config.config import Config
from megatronish.config.dump import to_toml
from megatronish.config.fields import fields_of
from megatronish.config.read import read_config
from megatronish.config.settings import flags_of
from megatronish.config.shipped import config_path
from megatronish.core.errors import UserError
from megatronish.core.files import refuse_input_as_output, unwritten
from megatronish.estimate.costs.candidate import UNASKED, Candidate, MeshSizes, complaints, config_of, without_layout
from megatronish.estimate.costs.parameters import num_parameters
from megatronish.estimate.planner import calibrate
from megatronish.estimate.planner.choose import ShortList, layout_does_not_fit, short_list
from megatronish.estimate.planner.devices import Device, find_device, network_gb_s
from megatronish.estimate.planner.estimators import Cluster, deepspeed_report, largest_module
from megatronish.estimate.planner.exact import Planned, plan_of, refusal
from megatronish.estimate.planner.named_layout import read_layout
from megatronish.estimate.planner.search import Search
from megatronish.estimate.planner.workload import Workload
from megatronish.formats.start import read_start
from megatronish.report.plan import explanation, short_report


@dataclass(frozen=True)
class PlanArguments:
    """Plan the layout of a run before a machine is paid for."""

    config: str
    """A config's TOML file, or the name of a shipped one: model and batch. Learning rate and data may be missing."""
    device: str = "h100-sxm"
    """A device of the table (a100-sxm, h100-sxm, h200, b200, mi300x ...), or a TOML file of one's own."""
    gpus: Annotated[int | None, tyro.conf.arg(aliases=["--world-size"])] = None
    """Devices in all."""
    gpus_per_node: int | None = None
    """Devices of a node. By default those of the device's row, 8 for most."""
    network: str | None = None
    """One direction of one device to other nodes, with its unit: 50GB/s, or 400Gb/s."""
    layouts: int = 6
    """Rows of the short list, each of another mesh."""
    explain: str | None = None
    """Where each second of a layout goes: a row of the list, or tp=8,pp=4,micro=1,zero=1,schedule=1f1b,sp."""
    write: Path | None = None
    """Write the config of the explained layout, or of the first one, to this file."""
    zero3_in_pipelines: bool = False
    """Try ZeRO-3 under a pipeline, too: its transfers are hard to predict."""
    estimator: Literal["deepspeed"] | None = None
    """Print the memory estimates of this program's own formulas instead."""
    probe: Path | None = None
    """Measure this machine's matrix products, memory and host, and the links of its GPUs (of --gpus ranks), and append
    them to this file."""
    calibrate: tuple[Path, ...] = ()
    """Files of measurements (of --probe, of collectives) that --device is corrected by."""
    write_device: Path | None = None
    """Write the calibrated device to this TOML file, which --device reads."""


MOST = 1_000_000  # devices, and rows of a list


PARTS = {
    name: part
    for part, names in {
        "tp=": ("tp", "tensor-model-parallel-size"),
        "pp=": ("pp", "pipeline-model-parallel-size"),
        "cp=": ("cp", "context-parallel-size"),
        "ep=": ("ep", "expert-model-parallel-size"),
        "etp=": ("etp", "expert-tensor-parallel-size"),
        "micro=": ("micro-batch-size",),
        "zero=": ("zero-stage",),
        "schedule=": ("pipeline-schedule",),
        "recompute=": ("recompute-granularity",),
        "sp": ("sequence-parallel",),
    }.items()
    for name in names
}
"""Flags of a layout, and what --explain calls each part."""
OWN = {flag for field in fields_of(PlanArguments).values() for flag in (field.flag, *field.aliases)}


def main(argv: Sequence[str], *, program: str = "megatronish plan") -> int:
    """Run the command; the exit status, 2 with a sentence for what cannot be planned."""
    try:
        own, others = split(argv)
        arguments = read_arguments(PlanArguments, own, program=program, description=__doc__)
        if "--calibrate" in own and not arguments.calibrate:
            raise UserError("--calibrate names no file; add the files that --probe and the benchmark of links wrote")
        print(answer(arguments, others))
    except UserError as error:
        print(f"{Path(program).stem}: {error}", file=sys.stderr)
        return 2
    return 0


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of this command's flags, and words of the config's."""
    own, others = list[str](), list[str]()
    for flag, values in flags_of(argv):
        is_own = flag.replace("_", "-") in {*OWN, "--no-zero3-in-pipelines", "-h", "--help", ""}
        words = [f"{flag}={values[0]}", *values[1:]] if values and flag else [flag, *values]
        (own if is_own else others).extend(word for word in words if word)
    return own, others


def answer(arguments: PlanArguments, flags: Sequence[str]) -> str:
    """What the command prints; UserError for what cannot be planned."""
    read = (config_path(arguments.config), arguments.device, *arguments.calibrate)
    for flag, output in (("--write", arguments.write), ("--write-device", arguments.write_device)):
        refuse_input_as_output(flag, output, read)
    if arguments.write is not None and arguments.write == arguments.write_device:
        raise UserError(f"--write and --write-device are both {arguments.write}, and one would replace the other")
    device = _device(arguments)
    # A probe measures the layout of the file; a plan tries others, so what the file says of one is no reason to refuse.
    config_and_notes = read_config(
        ["--config", arguments.config, *flags],
        read_start=read_start,
        unasked=UNASKED,
        settle_layout=None if arguments.probe is not None else without_layout,
    )
    config = config_and_notes.config
    vocab_size = _vocab_size(config)
    work = Workload.of(config, vocab_size)
    if arguments.probe is None:
        _refuse_layouts(flags)
    if arguments.estimator is not None:
        return _estimates(arguments, device, work)
    if arguments.probe is not None:
        from megatronish.commands.probing import probe  # torch: only where it is used

        layout = config.layout
        return probe(
            work,
            device,
            Candidate(MeshSizes(tp=layout.tp, cp=layout.cp), config.training.micro_batch_size),
            arguments.probe,
            arguments.gpus,
        )
    if arguments.gpus is None:
        if arguments.calibrate:
            return _calibration(arguments, device)
        raise UserError("--gpus is not given; say how many devices there are, for example --gpus 64")
    search = Search(
        config, work, device, _positive("--gpus", arguments.gpus), zero3_in_pipelines=arguments.zero3_in_pipelines
    )
    if (lack := device.lacks(work.precision)) is not None:
        raise UserError(f"--device {arguments.device}: {lack}; use --fp16, or another device")
    texts = [_calibration(arguments, device)] if arguments.calibrate else []
    if arguments.explain is not None and not arguments.explain.isdecimal():
        planned = _named(search, arguments.explain)
        texts.append(explanation(search, planned))
    else:
        named, most = arguments.explain or "1", _positive("--layouts", arguments.layouts)
        row = int(named.lstrip("0")[:9] or "0")  # of too many digits the first ones make too large a number, too
        if not 1 <= row <= most:  # before the search, which may take a minute
            raise UserError(
                f"--explain {named[:40]} is no row of the list, which has at most {most}; name one of them, or ask for "
                "more rows with --layouts"
            )
        chosen = short_list(search, number=most)
        planned = _row(chosen, row)
        texts.append(short_report(search, chosen) if arguments.explain is None else explanation(search, planned))
    if arguments.write is not None:
        texts.append(_written(planned.config, arguments.write))
    return "\n\n".join(texts)


def _refuse_layouts(flags: Sequence[str]) -> None:
    """UserError for a flag of a layout: a plan tries all of them, and would not look at it."""
    for flag, values in flags_of(flags):
        if (part := PARTS.get(flag.removeprefix("--").replace("_", "-"))) is not None:
            typed = " ".join([flag, *values])
            raise UserError(
                f"{typed} is a part of a layout, and a plan tries all layouts; leave it out, or name one with "
                f"--explain {part}{values[0] if values and part.endswith('=') else ''}"
            )


def _positive(flag: str, number: int) -> int:
    if not 1 <= number <= MOST:
        rule = "at least 1" if number < 1 else f"at most {MOST:,}"
        raise UserError(f"{flag} {str(number)[:40]} must be {rule}; write for example {flag} 8")
    return number


def _device(arguments: PlanArguments) -> Device:
    """The device, with what flags and measurements say of it."""
    if arguments.gpus is not None:
        _positive("--gpus", arguments.gpus)
    device = find_device(arguments.device)
    if arguments.gpus_per_node is not None:
        device = replace(device, gpus_per_node=_positive("--gpus-per-node", arguments.gpus_per_node))
    if arguments.network is not None:
        device = replace(device, network_gb_s=network_gb_s(arguments.network))
    return calibrate.calibrated(device, arguments.calibrate) if arguments.calibrate else device


def _calibration(arguments: PlanArguments, device: Device) -> str:
    """What was measured of the device, and where it was written."""
    text = calibrate.to_toml(device)
    if arguments.write_device is None:
        return text
    return _write(arguments.write_device, text, "--write-device") + f": {device.calibrated}"


def _vocab_size(config: Config) -> int:
    """The vocabulary, by the config or by its tokenizer."""
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    try:
        from megatronish.tokenizer.build import build_tokenizer  # where the config does not say it

        return build_tokenizer(config.data).vocab_size
    except (UserError, OSError) as error:
        raise UserError(
            "the vocabulary is not known: the config names no tokenizer, or its files are not on this machine; add "
            "--vocab-size 50257, or what it has"
        ) from error


def _named(search: Search, text: str) -> Planned:
    """A layout that the user wrote; UserError if no run could have it."""
    has_experts = search.config.model.num_experts is not None
    candidate = read_layout(text, gpus=search.gpus, has_experts=has_experts)
    if not search.is_legal(candidate):
        raise UserError(f"--explain {text}: {complaints(config_of(search.config, candidate))[0]}")
    planned = plan_of(search, candidate)
    if refusal(search, planned) is not None:
        raise UserError(layout_does_not_fit(search, planned))
    return planned


def _row(chosen: ShortList, number: int) -> Planned:
    """A row of the short list, which begins with 1."""
    if not 1 <= number <= len(chosen.planned):
        raise UserError(f"--explain {number} is no row of the list, which has {len(chosen.planned)}; name one of them")
    return chosen.planned[number - 1]


def _estimates(arguments: PlanArguments, device: Device, work: Workload) -> str:
    """The estimates of DeepSpeed for the model on these devices."""
    gpus = _positive("--gpus", arguments.gpus if arguments.gpus is not None else device.gpus_per_node)
    per_node = min(gpus, device.gpus_per_node)
    if gpus % per_node:
        raise UserError(
            f"--gpus {gpus} must be whole nodes of {per_node} for DeepSpeed's formulas; use --gpus "
            f"{gpus // per_node * per_node}, or --gpus-per-node with a divisor of {gpus}"
        )
    parameters = num_parameters(work.model, vocab_size=work.vocab_size, seq_length=work.seq_length)
    return deepspeed_report(parameters, largest_module(work), Cluster(per_node, gpus // per_node))


def _written(config: Config, path: Path) -> str:
    return (
        _write(path, to_toml(config), "--write")
        + f"; start it with: megatronish pretrain --config {shlex.quote(str(path))}"
    )


def _write(path: Path, text: str, flag: str) -> str:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritten(f"{flag} {path}", path, error) from error
    return f"written to {path}"
