#!/usr/bin/env python
"""Pretrain a GPT: read the config, start the ranks, train. `--help` lists every flag."""

import sys
from functools import partial

from megatronish.config.plans import refuse_unrunnable_plans
from megatronish.config.read import read_config
from megatronish.errors import UserError
from megatronish.formats.start import read_start
from megatronish.launch.place import Place, place_from_environment


def main(argv: list[str]) -> int:
    """The exit status: 0 finished, 2 the user's to mend, 1 a failure."""
    place = None
    try:
        place = place_from_environment()
        world_size = place.world_size if place else None
        config, notes = read_config(argv, world_size=world_size, read_start=read_start)
        refuse_unrunnable_plans(config)

        # torch is imported only now: --help and the errors of a config need not wait for it.
        from megatronish.inference.sample import print_sample
        from megatronish.launch.local import launch
        from megatronish.train.run import train
        from megatronish.train.summary import dry_run

        if config.log.dry_run:
            return dry_run(config, notes) if is_main(place) else 0
        run = partial(train, config, notes)
        status = launch(run, world_size=config.layout.world_size, log_dir=config.run_dir / "logs")
        return status or (print_sample(config) if place is None else 0)
    except UserError as error:
        if is_main(place):
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def is_main(place: Place | None) -> bool:
    """Whether this process speaks for all."""
    return place is None or place.rank == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
