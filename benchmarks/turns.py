"""Turns of several programs: each is kept alive in processes of its own and takes a step only when it is told to.

The others sleep meanwhile, so that what else the machine does falls on all alike, and every round goes through them
in another order. A program that fails or does not answer leaves; the others go on.
"""

import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST_STEP_SECONDS, STEP_SECONDS = 600.0, 300.0
STEPS_THAT_COMPILE = 4


class ContestantError(Exception):
    """A contestant that left, and why."""


class RankProcess:
    """One process of a contestant, and the pipe over which it is told what to do."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; `answer` waits for what comes back."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ContestantError(f"its process ended: {self.last_words()}") from None

    def answer(self) -> dict[str, Any]:
        """The next answer; ContestantError if it is an error, or if there will be none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ContestantError(f"its process ended: {self.last_words()}")
        found: dict[str, Any] = json.loads(line)
        for kind in ("error", "unavailable"):
            if kind in found:
                raise ContestantError(found[kind])
        return found

    def last_words(self) -> str:
        """The last line of what it wrote, such as the message of an exception."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end(self) -> None:
        """Close the pipes and end the process."""
        self.process.kill()
        self.process.communicate()


@dataclass
class Runner:
    """A contestant that takes turns: all its ranks, and what they measured."""

    name: str
    ranks: list[RankProcess]
    parameters: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    """What the first rank answered to each step."""
    peak: int = 0
    period: int = 1
    """It takes a turn in every so many rounds."""
    failure: str | None = None

    def ask(self, request: Mapping[str, Any], *, timeout: float = STEP_SECONDS) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        for rank in self.ranks:
            rank.ask(request)
        return self.answers(timeout)

    def answers(self, timeout: float) -> list[dict[str, Any]]:
        """The next answer of each rank. Where one failed, the others are not waited for: they wait for it."""
        deadline, found = time.monotonic() + timeout, {}
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                assert rank.process.stdout is not None
                selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ContestantError(f"did not answer within {timeout:.0f} s")
                for key, _ in ready:
                    found[id(key.data)] = key.data.answer()
                    selector.unregister(key.fileobj)
        return [found[id(rank)] for rank in self.ranks]

    def step(self, number: int, *, measured: bool) -> None:
        """Take a turn. A step lasts as long as on the slowest rank; its loss is the mean over ranks that have one."""
        timeout = FIRST_STEP_SECONDS if len(self.losses) < STEPS_THAT_COMPILE else STEP_SECONDS
        found = self.ask({"step": number}, timeout=timeout)
        losses = [answer["loss"] for answer in found if answer["loss"] is not None]
        self.losses.append(sum(losses) / len(losses) if losses else None)
        self.facts.append(found[0])
        if measured:
            self.seconds.append(max(answer["seconds"] for answer in found))

    def leave(self, reason: str) -> None:
        """Take no further turn."""
        self.failure = reason
        self.end()

    def end(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            rank.end()
        self.ranks = []


def free_port() -> int:
    """A port of the loopback interface on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment_of_rank(rank: int, world_size: int, *, port: int, threads: int) -> dict[str, str]:
    """Environment of a rank: that of torchrun, without what the caller has of another run."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if world_size > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"),
        }
    return environment


def start(name: str, commands: Sequence[Sequence[str]], *, threads: int, folder: Path) -> Runner:
    """The processes of a contestant, one for each command."""
    port, world_size = free_port(), len(commands)
    ranks = []
    for rank, command in enumerate(commands):
        environment = environment_of_rank(rank, world_size, port=port, threads=threads)
        log = folder / f"{name.replace(' ', '_')}.{rank}.log"
        ranks.append(RankProcess(command, environment, log))
    return Runner(name, ranks)


def take_turns(runners: Sequence[Runner], numbers: range, *, measured: bool) -> None:
    """Steps of these numbers, in rounds of one step of each contestant; the order of every round is another."""
    for number in numbers:
        first = number % len(runners)
        order = [*runners[first:], *runners[:first]]
        for runner in order if number % 2 == 0 else reversed(order):
            if runner.failure is None and number % runner.period == 0:
                try:
                    runner.step(number, measured=measured)
                except ContestantError as error:
                    runner.leave(str(error))


def ask_all(runners: Sequence[Runner], request: Mapping[str, Any]) -> list[tuple[Runner, list[dict[str, Any]]]]:
    """The answers of those that have not left."""
    found = []
    for runner in runners:
        if runner.failure is None:
            try:
                found.append((runner, runner.ask(request)))
            except ContestantError as error:
                runner.leave(str(error))
    return found


def wait_until_built(runner: Runner) -> None:
    """Wait until all ranks have built the model, or one said why not."""
    if runner.failure is not None:
        return
    try:
        runner.parameters = max(answer["parameters"] for answer in runner.answers(FIRST_STEP_SECONDS))
    except ContestantError as error:
        runner.leave(str(error))
