"""Compare another trainer's gradients of one batch with those of the same weights in one process here.

A hook of forty lines in the trainer writes the dump (examples/conform/): its batch, its loss, and a checkpoint with the
gradient of each weight in its place. The first gradient that differs is named, with the likely trap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.hub import local_model
from megatronish.config.marks import greater_than
from megatronish.config.plugins import import_plugins
from megatronish.core.foreign import shown
from megatronish.formats.start import FormatName


@dataclass(frozen=True)
class ConformArguments:
    """What is compared with what."""

    dump: tyro.conf.Positional[Path]
    """Folder of the dump: batch.safetensors, gradients/, dump.json."""
    load: Path
    """The weights that the trainer had when it computed them, in its format."""
    source: Annotated[FormatName, tyro.conf.arg(name="from")] = "hf"
    """The format of the weights and of the gradients: hf, megatron (torch or torch_dist), or our own."""
    loss_of: Literal["predictions", "samples"] = "predictions"
    """What the trainer's loss is a mean of: all predictions of the batch alike, or the means of its samples."""
    tolerance: Annotated[float, greater_than(0)] = 1e-4
    """Largest difference of a gradient, relative to its norm. In fp32 1e-5 is reached; of bf16 take 0.03."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""


def main(argv: Sequence[str], *, program: str = "megatronish conform") -> int:
    """Run the command; the exit status: 0 where all gradients agree, 1 where one differs, 2 for a user error."""
    return exit_status(lambda: run(read_arguments(ConformArguments, argv, program=program, description=__doc__)))


def run(arguments: ConformArguments) -> int:
    """Compare, and print what agrees and what does not."""
    from megatronish.verify.conform import compare, read_dump  # torch: --help need not wait for it
    from megatronish.verify.traps import likely_trap

    import_plugins(arguments.plugin)
    load = local_model(arguments.load, flag="--load") if arguments.source == "hf" else arguments.load
    dump = read_dump(arguments.dump, source=arguments.source)
    comparison = compare(load, dump, source=arguments.source, loss_of=arguments.loss_of)
    about = ", ".join(shown(dump.about[name]) for name in ("trainer", "layout") if name in dump.about)
    loss = (
        "not in the dump" if dump.loss is None else f"{dump.loss:.8g}, relative difference {comparison.loss_error:.1e}"
    )
    print(f"{arguments.dump}{f' ({about})' if about else ''}")
    print(f"loss: ours {comparison.expected_loss:.8g}, theirs {loss}")
    differing = comparison.differing(arguments.tolerance)
    number = len(comparison.gradients)
    if not differing and comparison.loss_error <= arguments.tolerance:
        worst = max(comparison.gradients, key=lambda each: each.error)
        print(f"all {number} gradients agree: at most {worst.error:.1e} apart ({worst.name})")
        return 0
    print(f"{number - len(differing)} of {number} gradients agree to {arguments.tolerance:g}")
    if differing:
        print("those that differ, in the order of the backward pass:")
        print("\n".join(f"  {each.name}  {each.error:.1e}{_times(each.factor)}" for each in differing[:SHOWN]))
        if len(differing) > SHOWN:
            print(f"  and {len(differing) - SHOWN} more")
        print(f"the first is {differing[0].name}")
        print(f"likely: {likely_trap(comparison, arguments.tolerance)}")
    else:
        print("the losses differ and the gradients do not: what is logged is another mean than what is minimised")
    return 1


SHOWN = 12


def _times(factor: float | None) -> str:
    return "" if factor is None else f"  ({factor:.6g} times ours)"
