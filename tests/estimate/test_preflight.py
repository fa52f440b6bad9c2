"""Tests of preflight: ranks that are ready, and each difference that is planted on one rank, told with whose it is."""

import contextlib
import io
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import MOCK, run_job, tiny, write_tokens
from ranks import run_ranks

from megatronish.config.read import read_config
from megatronish.core.errors import UserError
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.estimate.links import preflight
from megatronish.estimate.links.facts import Free, Needs, differing, lacking, ranks_text
from megatronish.estimate.links.preflight import Subject
from megatronish.formats.start import read_start
from megatronish.launch.place import Place
from megatronish.launch.rendezvous import refuse_addresses
from megatronish.parallel.mesh import Mesh
from megatronish.train.preflight import preflight_run

Patch = pytest.MonkeyPatch


def compare(place: Place, layout: Layout, plant: Callable[[Patch], None] | None, culprit: int) -> tuple[int, str]:
    """Preflight of a layout in which something is planted on one rank."""
    mesh = Mesh.start(Layout(dp=place.world_size), rank=place.rank, init_method=place.rendezvous)
    subject = Subject({}, layout, ExpertLayout(), Path("."), Needs())
    with Patch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        if plant is not None and place.rank == culprit:
            plant(patch)
        status = preflight.preflight(subject, mesh, backend="gloo")
    return status, output.getvalue()


def said_of(layout: Layout, plant: Callable[[Patch], None] | None = None, *, culprit: int = 1) -> tuple[int, str]:
    """The status of all ranks, and what rank 0 printed."""
    answers = run_ranks(layout.world_size, compare, layout, plant, culprit)
    assert len({status for status, _ in answers}) == 1
    return answers[0]


def test_ranks_that_are_ready_are_a_short_table() -> None:
    status, output = said_of(Layout(tp=2))
    assert status == 0, output
    title, *lines, ending = output.splitlines()
    assert title.startswith("preflight of 2 ranks on 1 machine, ")
    assert ending == "all ranks are ready"
    assert all(line.startswith("  ok ") for line in lines)
    names = {"torch", "Python", "megatronish", "variables", "disk", "memory", "clocks", "speed", "links"}
    assert names <= {line.split()[1] for line in lines}


# ---- planted on one rank


def another_torch(patch: Patch) -> None:
    patch.setattr(torch, "__version__", "2.12.9")


def a_variable(patch: Patch) -> None:
    patch.setenv("NCCL_ALGO", "Ring")


def a_clock_that_is_ahead(patch: Patch) -> None:
    patch.setattr(preflight, "clock_offsets", partial(preflight.clock_offsets, clock=lambda: time.time() + 7))


def a_slow_device(patch: Patch) -> None:
    product = torch.matmul

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.02)
        return product(*args)

    patch.setattr(torch, "matmul", slow)


def a_slow_link(patch: Patch) -> None:
    """Of rank 1 to rank 2, and no other."""
    send = preflight._send

    def slow(message: torch.Tensor, axis: Any, *, to: int) -> None:
        time.sleep(0.1 if message.numel() > 1 and to == 2 else 0.0)
        send(message, axis, to=to)

    patch.setattr(preflight, "_send", slow)


def a_full_disk(patch: Patch) -> None:
    patch.setattr(preflight.Free, "of", lambda *_args: Free("node7", 5 * 10**8, 10**12, None))


PLANTED = [
    (another_torch, 2, r"problem: torch is 2\.13\.0\S* on rank 0 and 2\.12\.9 on rank 1"),
    (a_variable, 2, r"problem: NCCL_ALGO is not set on rank 0 and Ring on rank 1"),
    (
        a_clock_that_is_ahead,
        2,
        r"problem: the clock of rank 1 on \S+ is 7\.0 s ahead of that of rank 0 on \S+; let NTP",
    ),
    (a_slow_device, 2, r"problem: rank 1 on \S+ is slow: a fixed matrix product takes \S+ ms, \S+ times the typical "),
    (a_slow_link, 4, r"problem: the link of rank 1 on \S+ to rank 2 on \S+ \(dp\) carries 0\.\d+ GB/s, below a third"),
    (
        a_full_disk,
        2,
        r"problem: rank 1 on node7 has 476\.8 MiB free in \., and a run writes there; free some, or choose",
    ),
]


@pytest.mark.parametrize(("plant", "world_size", "sentence"), PLANTED, ids=[each[0].__name__ for each in PLANTED])
def test_a_difference_is_told_with_its_rank(plant: Callable[[Patch], None], world_size: int, sentence: str) -> None:
    status, output = said_of(Layout(dp=world_size), plant)
    assert status == 1
    problems = [line for line in output.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 1, output
    assert re.match(sentence, problems[0]), output
    assert output.count("  PROBLEM ") == 1


# ---- config and data of a run


def of_run(place: Place, argvs: list[list[str]], folders: list[str]) -> tuple[int, str]:
    """Preflight of a run whose ranks have command lines and working directories of their own."""
    before = os.getcwd()
    os.chdir(folders[place.rank])
    try:
        config, notes = read_config(argvs[place.rank], read_start=read_start)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            return preflight_run(config, notes, place), output.getvalue()
    finally:
        os.chdir(before)


def said_of_run(argvs: list[list[str]], folders: list[Path]) -> tuple[int, str]:
    return run_ranks(2, of_run, argvs, [str(folder) for folder in folders])[0]


def test_a_config_that_differs_is_told_before_a_group_of_the_layout_is_made(tmp_path: Path) -> None:
    argvs = [tiny(tmp_path / "run", "--tp 2 --lr 1e-3"), tiny(tmp_path / "run", "--dp 2 --lr 2e-3")]
    status, output = said_of_run(argvs, [tmp_path, tmp_path])
    assert status == 1
    assert "config optimizer.lr is 0.001 on rank 0 and 0.002 on rank 1" in output
    assert "config parallel.tensor_model_parallel_size is 2 on rank 0 and 1 on rank 1" in output
    assert "not measured: the ranks first need one config" in output


def test_data_of_another_content_is_told(tmp_path: Path) -> None:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write_tokens(folder / "corpus", seed=seed)
    argv = tiny(tmp_path / "run", "--dp 2", data="--data-path corpus --tokenizer-type null")
    status, output = said_of_run([argv, argv], folders)
    assert status == 1
    assert "problem: data train is " in output
    (folders[1] / "corpus.idx").write_bytes(b"no index")
    status, output = said_of_run([argv, argv], folders)
    assert status == 1
    assert "problem: data train is " in output
    assert " on rank 0 and unreadable (" in output
    status, output = said_of_run([argv, argv], [folders[1], folders[1]])
    assert status == 1, "equal on all ranks, and no data"
    assert re.search(r"problem: data train is unreadable \(.*corpus.idx.*\) on ranks 0-1", output)


def test_a_run_compares_its_ranks_and_ends(tmp_path: Path) -> None:
    ready = run_job(tiny(tmp_path / "run", "--tp 2 --preflight"), tmp_path)
    assert ready.status == 0, ready.output + ready.errors
    assert "all ranks are ready" in ready.output
    assert not (tmp_path / "run").exists()
    huge = "--num-layers 120 --hidden-size 24576 --num-attention-heads 96 --ffn-hidden-size 98304 --tp 2 --preflight"
    lacking = run_job(tiny(tmp_path / "run", huge, data=MOCK), tmp_path)
    assert lacking.status == 1, lacking.errors
    assert "and a checkpoint takes 9.5 TiB; free some, or choose another --save" in lacking.output
    assert "its 2 ranks need about " in lacking.output


# ---- sentences


WRONG_ADDRESSES = {
    "MASTER_PORT=70000": "MASTER_PORT=70000 is no port; export a free one of 1 to 65535 to all ranks",
    f"MASTER_ADDR={'a' * 70}": f"MASTER_ADDR={'a' * 70} does not resolve on ",
    "GLOO_SOCKET_IFNAME=none0": "GLOO_SOCKET_IFNAME=none0 is no network interface of ",
}


@pytest.mark.parametrize("variable", WRONG_ADDRESSES)
def test_a_wrong_address_is_a_sentence(variable: str) -> None:
    name, _, value = variable.partition("=")
    with pytest.raises(UserError, match=re.escape(WRONG_ADDRESSES[variable])):
        refuse_addresses({name: value})
    refuse_addresses({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"})


def test_values_are_told_with_their_ranks() -> None:
    facts = [{"torch": "a"}] * 3 + [{"torch": "b"}] + [{"torch": "a"}]
    assert differing(facts) == {"torch": "torch is a on ranks 0-2, 4 and b on rank 3"}
    five = [{"x": str(rank)} for rank in range(5)]
    assert differing(five)["x"] == "x is 0 on rank 0, 1 on rank 1, 2 on rank 2 and 2 other values elsewhere"
    assert differing([{"x": "1"}] * 2) == {}
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_what_a_run_lacks_is_told_with_its_machine() -> None:
    gib = 2**30
    ranks = [Free("a", 50 * gib, 64 * gib, 80 * gib), Free("b", 9 * gib, 64 * gib, 30 * gib)]
    found = lacking(ranks, Needs(disk=10 * gib, memory=60 * gib), Path("/save"))
    assert found["disk"].startswith("rank 1 on b has 9.0 GiB free in /save, and a checkpoint takes 10.0 GiB")
    assert found["memory"].startswith("rank 1 on b has 30.0 GiB of its device free, and needs about 60.0 GiB")
    on_cpu = [Free("a", 50 * gib, 64 * gib, None)] * 2
    assert "its 2 ranks need about 60.0 GiB each" in lacking(on_cpu, Needs(memory=60 * gib), Path("."))["memory"]
    assert lacking(ranks, Needs(), Path(".")) == {}
