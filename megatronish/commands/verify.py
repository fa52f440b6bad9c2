"""Check that a layout trains the same model as one process, step by step.

Takes the flags of pretrain and --steps N: `megatronish verify --config demo --mock-data --dp 1 --tp 4 --steps 5`.
Where the two differ, it names the first layer whose output does. With experts, tokens are given the choices of the one
process; a token that would have chosen otherwise is an error where its scores are 1e-5 apart or more.
"""

import argparse
import sys
from collections.abc import Sequence

from megatronish.commands.configuration import read_config
from megatronish.config.settings import HELP, HELP_ALL
from megatronish.core.errors import UserError


def main(argv: Sequence[str], *, program: str = "megatronish verify") -> int:
    """Compare; the exit status: 0 for equal, 1 for different or failed, 2 for a user error."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=5)
    own, others = parser.parse_known_args(argv)
    try:
        if {*HELP, HELP_ALL} & set(others):
            print(f"{__doc__}\nThe flags of pretrain:\n")
        config, notes = read_config(others, program=program)
        if own.steps < 1:
            raise UserError(f"steps={own.steps} must be at least 1")
        if config.training.bf16:
            raise UserError("bf16 rounds differently in every layout; add --no-bf16: layouts are compared in fp32")
        if config.parallel.zero_quantized_gradients is not None:
            raise UserError(
                f"zero_quantized_gradients={config.parallel.zero_quantized_gradients} rounds what each rank sends, "
                "which depends on the layout; leave it out here: what it rounds has a bound (docs/SHARDING.md)"
            )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for note in notes:
        print(f"note: {note}")

    # torch is imported only now: --help and the errors of a config need not wait for it.
    from megatronish.verify.verify import verify

    return verify(config, num_steps=own.steps)
