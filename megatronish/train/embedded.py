"""A rank of a run inside a program that continues afterwards: an actor of Ray, a notebook, a search over settings.

`train` of run.py belongs to a process that ends with it. Here what it changes of the process is put back: the process
group, signal handlers, torch's switches and the variables of the environment. So runs may follow each other.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatronish.config.config import Config
from megatronish.core.errors import RunError
from megatronish.launch.place import Place
from megatronish.parallel.mesh import leave
from megatronish.train.run import train
from megatronish.train.trainer import Hook


def train_rank(config: Config, place: Place, *, notes: Sequence[str] = (), hooks: Sequence[Hook] = ()) -> None:
    """Train as the rank at `place`, from the run's newest checkpoint if it has one; returns when the run has ended.

    All ranks call this, each in a process of its own and with a config of the same layout, whose size is that of the
    place. `hooks` see every step; every rank is given as many. UserError for what no second try would correct, RunError
    or another exception otherwise. In the main thread, SIGTERM saves and returns, as elsewhere.
    """
    if config.layout.world_size != place.world_size:
        raise RunError(
            f"the layout needs {config.layout.world_size} ranks but there are {place.world_size}; read the config with "
            "that world size"
        )
    with _put_back():
        train(config, notes, place, hooks=hooks)


@contextmanager
def _put_back() -> Iterator[None]:
    """Context that leaves the process as it was."""
    environ, matmul = dict(os.environ), torch.backends.cuda.matmul
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    reduced = matmul.allow_bf16_reduced_precision_reduction
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()} if in_main else {}
    try:
        yield
    finally:
        leave()
        for signum, handler in handlers.items():
            if handler is not None and signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        matmul.allow_bf16_reduced_precision_reduction = reduced
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
