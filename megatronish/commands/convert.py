"""Converter of models between Hugging Face, Megatron-LM and megatronish, one tensor at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.hub import local_model
from megatronish.config.plugins import import_plugins
from megatronish.core.errors import UserError
from megatronish.formats.hf.family import CONFIG
from megatronish.formats.start import FormatName, of_another_format


@dataclass(frozen=True)
class ConvertArguments:
    """What is converted into what."""

    source: Annotated[FormatName, tyro.conf.arg(name="from")]
    """The format of --load. megatron: what Megatron-LM saved, in its format torch or torch_dist."""
    target: Annotated[Literal["hf", "megatronish", "megatron", "megatron-dist", "peft"], tyro.conf.arg(name="to")]
    """The format of --save. megatron: its format torch; megatron-dist: its torch_dist; peft: an adapter by itself."""
    load: Path
    """A Hugging Face folder, or org/name of its hub, or Megatron-LM's folder, or our run folder or one in it."""
    save: Path
    """A new folder. In the format megatronish it is a run's `checkpoints` folder, for --load."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
    ckpt_step: int | None = None
    """megatronish: read this step instead of the newest."""
    adapter: Path | None = None
    """A folder with an adapter of the model, of PEFT or of a run with --adapter-type, to merge into the weights."""
    vocab_size: int | None = None
    """Megatron-LM: the true vocabulary that is read, where its arguments do not say it."""
    target_tensor_parallel_size: int | None = None
    """Megatron-LM: cut every layer into so many parts. Derived: 1."""
    target_pipeline_parallel_size: int | None = None
    """Megatron-LM: cut the layers into so many stages. Derived: 1."""
    target_expert_parallel_size: int | None = None
    """Megatron-LM: deal the experts of a layer to so many ranks; megatron-dist: for a run that does. Derived: 1."""
    target_expert_tensor_parallel_size: int | None = None
    """Megatron-LM: cut every expert into so many parts. Derived: --target-tensor-parallel-size."""
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Megatron-LM: write the names that this implementation of it has. Derived: transformer_engine."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Store weights in this type. Derived: the one they come in."""
    allow_unmatched: tuple[str, ...] | None = None
    """Leave out tensors that have no counterpart, instead of ending with an error: all, or those that are named,
    also by patterns such as *.inv_freq."""
    prove: bool = False
    """Read --save again and compare it bit by bit; with Hugging Face, compare logits with those of transformers."""
    max_shard_bytes: int | None = None
    """Hugging Face: bytes of one file at most. Derived: 5 GB."""


def main(argv: Sequence[str], *, program: str = "megatronish convert") -> int:
    """Run the command; the exit status."""
    return exit_status(lambda: run(read_arguments(ConvertArguments, argv, program=program)))


def run(arguments: ConvertArguments) -> int:
    """Convert, and report what was done; the exit status."""
    import torch  # late: --help need not wait for it

    from megatronish.formats.convert import convert, export_adapter
    from megatronish.formats.prove import prove

    import_plugins(arguments.plugin)
    if arguments.source == "hf":
        arguments = replace(arguments, load=local_model(arguments.load, flag="--load"))
    _refuse_other_format(arguments)
    if arguments.target == "peft":
        _refuse_for_peft(arguments)
        number = export_adapter(arguments.load, arguments.save, step=arguments.ckpt_step)
        print(f"{number} tensors of the adapter\nsaved {arguments.save}")
        return 0
    asked = {"step": arguments.ckpt_step, "vocab_size": arguments.vocab_size}
    reading = {name: value for name, value in asked.items() if value is not None}
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    writing = {
        "tensor_parallel_size": arguments.target_tensor_parallel_size,
        "pipeline_parallel_size": arguments.target_pipeline_parallel_size,
        "expert_parallel_size": arguments.target_expert_parallel_size,
        "expert_tensor_parallel_size": arguments.target_expert_tensor_parallel_size,
        "transformer_impl": arguments.transformer_impl,
        "max_shard_bytes": arguments.max_shard_bytes,
    }
    allowed = arguments.allow_unmatched is not None and (arguments.allow_unmatched or True)
    report = convert(
        arguments.load,
        arguments.save,
        source=arguments.source,
        target=arguments.target,
        reading=reading,
        writing={name: value for name, value in writing.items() if value is not None},
        dtype=dtype,
        allow_unmatched=allowed,
        adapter=arguments.adapter,
    )
    print(report)
    print(f"saved {arguments.save}")
    if arguments.prove:
        lines = prove(
            arguments.load,
            arguments.save,
            source=arguments.source,
            target=arguments.target,
            reading=reading,
            dtype=dtype,
            allow_unmatched=allowed,
            adapter=arguments.adapter,
        )
        print("\n".join(lines))
    return 0


def _refuse_other_format(arguments: ConvertArguments) -> None:
    """UserError for a Hugging Face folder that is called one of ours."""
    load = arguments.load
    if arguments.source == "megatronish" and of_another_format(load) is not None and (load / CONFIG).is_file():
        raise UserError(f"--load {load} holds a Hugging Face model, not --from megatronish; use --from hf")


def _refuse_for_peft(arguments: ConvertArguments) -> None:
    """UserError for flags that say nothing about an adapter by itself."""
    if arguments.source != "megatronish":
        raise UserError(f"--to peft writes the adapter of a run of ours, not of --from {arguments.source}")
    if arguments.adapter is not None or arguments.prove or arguments.dtype is not None:
        raise UserError("--to peft writes an adapter as it is; leave --adapter, --dtype and --prove out")
