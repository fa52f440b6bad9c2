"""A run on many hosts over ssh, with a hostfile in DeepSpeed's form.

    megatronish launch --hostfile hosts -- pretrain --config configs/llama-8b-8gpu.toml
    megatronish launch --hostfile hosts --include "worker-0@worker-1:0,2" -- pretrain ...
    megatronish launch --hostfile hosts --no-ssh --node-rank 1 -- pretrain ...    (on each host by itself)

A hostfile has a line for each host, "worker-0 slots=8": the ranks of a run, in this order, one for each slot. What
follows "--" is a command of megatronish, or a Python file, with its flags; it runs in the same folder and with the same
Python on each host. Hosts must be reached by ssh without a password.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import tyro

from megatronish.config.arguments import read_arguments
from megatronish.core.errors import UserError
from megatronish.launch.host import HostPlan, run_host
from megatronish.launch.hostfile import Host, chosen, read_hostfile
from megatronish.launch.ssh import Reach, address_of, exported, is_here, run_hosts

END_OF_FLAGS = "--"
LARGEST_PORT = 65_535


@dataclass(frozen=True)
class LaunchArguments:
    """Run a command on the hosts of a hostfile: megatronish launch --hostfile FILE -- pretrain FLAGS."""

    hostfile: Annotated[Path, tyro.conf.arg(aliases=["-H"])]
    """Lines such as "worker-0 slots=8": a host and how many devices a run may use there."""
    include: Annotated[str, tyro.conf.arg(aliases=["-i"])] = ""
    """Hosts and slots to use alone: "worker-0@worker-1:0,2"."""
    exclude: Annotated[str, tyro.conf.arg(aliases=["-e"])] = ""
    """Hosts and slots not to use, in the same form."""
    num_nodes: int | None = None
    """The first so many hosts."""
    num_gpus: int | None = None
    """The first so many slots of each host."""
    master_addr: str = ""
    """Address of the first host, where ranks meet. By default what `hostname -I` says there first."""
    master_port: int = 29500
    """A free port of the first host."""
    ssh_port: int | None = None
    """Port of ssh. By default what ~/.ssh/config says, or 22."""
    export: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A variable for all hosts, NAME or NAME=VALUE, in addition to those of NCCL, gloo, torch and the like."""
    no_ssh: bool = False
    """Start the ranks of this host alone, without ssh: the same command on each host, with its --node-rank."""
    node_rank: int | None = None
    """With --no-ssh: the number of this host among those that are used, from 0."""


def main(argv: list[str], *, program: str) -> int:
    """Read the flags, start the hosts, and wait for them; the exit status of the run."""
    own, command = _cut(argv, program)
    arguments = read_arguments(LaunchArguments, own, program=program, description=__doc__)
    hosts = chosen(
        read_hostfile(arguments.hostfile),
        include=arguments.include,
        exclude=arguments.exclude,
        num_nodes=arguments.num_nodes,
        num_gpus=arguments.num_gpus,
    )
    _check(arguments, hosts)
    reach = Reach() if arguments.ssh_port is None else Reach(("-p", str(arguments.ssh_port)))
    words = _command(command)
    plans = _plans(hosts, words, arguments, _master(arguments, hosts, reach))
    if arguments.no_ssh:
        assert arguments.node_rank is not None
        return run_host(plans[arguments.node_rank], None)
    print(_line(hosts, plans), flush=True)
    return run_hosts(hosts, plans, reach=reach, folder=os.getcwd(), python=sys.executable)


def _cut(argv: Sequence[str], program: str) -> tuple[list[str], list[str]]:
    """The flags of this command, and the command that is run."""
    if END_OF_FLAGS not in argv:
        if "--help" in argv or "-h" in argv:
            return list(argv), []
        raise UserError(f"what is to run comes after --, as in: {program} --hostfile hosts -- pretrain --config a.toml")
    place = list(argv).index(END_OF_FLAGS)
    return list(argv[:place]), list(argv[place + 1 :])


def _check(arguments: LaunchArguments, hosts: Sequence[Host]) -> None:
    """UserError for flags that do not fit each other or the hosts."""
    for name, least, most in (
        ("num_nodes", 1, None),
        ("num_gpus", 1, None),
        ("master_port", 1, LARGEST_PORT),
        ("ssh_port", 1, LARGEST_PORT),
    ):
        value, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value is not None and (value < least or (most is not None and value > most)):
            raise UserError(f"{flag} {value} must be {f'between {least} and {most}' if most else 'at least 1'}")
    if arguments.no_ssh and arguments.node_rank is None:
        raise UserError(f"--no-ssh needs the number of this host; add --node-rank, 0 to {len(hosts) - 1}")
    if arguments.node_rank is not None and not arguments.no_ssh:
        raise UserError("--node-rank is for --no-ssh; leave it out, and every host is started from here")
    if arguments.node_rank is not None and not 0 <= arguments.node_rank < len(hosts):
        raise UserError(
            f"--node-rank {arguments.node_rank} must be 0 to {len(hosts) - 1}: the hosts are "
            f"{', '.join(host.name for host in hosts)}"
        )


def _command(command: Sequence[str]) -> tuple[str, ...]:
    """Words that each rank runs."""
    from megatronish.commands.main import COMMANDS  # it has this command, too

    if not command:
        raise UserError("nothing follows --; give the command that is to run, such as -- pretrain --config a.toml")
    name = command[0]
    if name.endswith(".py"):
        return (sys.executable, *command)
    if name not in COMMANDS or name == "launch":
        raise UserError(f"{name} after -- is neither a command of megatronish nor a Python file; give pretrain, say")
    return (sys.executable, "-m", "megatronish", *command)


def _master(arguments: LaunchArguments, hosts: Sequence[Host], reach: Reach) -> str:
    """Address where the ranks meet."""
    if arguments.master_addr:
        return arguments.master_addr
    if arguments.no_ssh:
        return hosts[0].name
    if len(hosts) == 1 and is_here(hosts[0].name):
        return "127.0.0.1"
    return address_of(hosts[0].name, reach)


def _plans(
    hosts: Sequence[Host], words: tuple[str, ...], arguments: LaunchArguments, master_addr: str
) -> list[HostPlan]:
    """The part of each host. Ranks are counted through the hosts, in their order."""
    ends = list(accumulate(len(host.slots) for host in hosts))
    variables = exported(os.environ, arguments.export)
    return [
        HostPlan(words, host.slots, end - len(host.slots), ends[-1], master_addr, arguments.master_port, variables)
        for host, end in zip(hosts, ends, strict=True)
    ]


def _line(hosts: Sequence[Host], plans: Sequence[HostPlan]) -> str:
    """What is started where."""
    parts = [
        f"{host.name} ranks {plan.first_rank} to {plan.first_rank + len(host.slots) - 1} on devices "
        f"{','.join(map(str, host.slots))}"
        for host, plan in zip(hosts, plans, strict=True)
    ]
    at = f"{plans[0].master_addr}:{plans[0].master_port}"
    return f"{plans[0].world_size} ranks on {len(hosts)} hosts, which meet at {at}: {'; '.join(parts)}"
