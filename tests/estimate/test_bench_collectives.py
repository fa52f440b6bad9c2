"""Tests of the measurement of links: definitions, results of every collective, fits, files and errors of the user."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paths import ROOT
from ranks import run_ranks

from megatronish.commands.bench_collectives import main
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.estimate.links import measure as measuring
from megatronish.estimate.links.bench import bench
from megatronish.estimate.links.definitions import COLLECTIVES, DTYPES, bus_factor, num_elements, uneven
from megatronish.estimate.links.fit import LinkFit, SizeTimes, fits_of
from megatronish.estimate.links.measure import Runs, measure, operation
from megatronish.estimate.links.settings import LinkArguments, groups_of
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh

# ---- definitions


def test_bus_bandwidth_is_defined_as_in_nccl_tests() -> None:
    for ranks in (2, 3, 8):
        part = (ranks - 1) / ranks
        expected = {"all_reduce": 2 * part, "broadcast": 1, "reduce": 1, "send_recv": 1}
        expected |= dict.fromkeys(("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all"), part)
        assert {name: bus_factor(name, ranks) for name in expected} == pytest.approx(expected)


def test_all_to_all_v_counts_the_largest_that_a_rank_sends_without_what_it_keeps() -> None:
    assert uneven(3) == [[1, 2, 1], [2, 1, 2], [1, 2, 1]]
    assert bus_factor("all_to_all_v", 3) == pytest.approx(4 / 5)  # rank 1 sends 5 parts, 1 of them to itself
    assert num_elements("all_to_all_v", 1024, dtype="fp32", num_ranks=3) == 255


def test_sizes_are_rounded_down_to_whole_parts_and_have_an_element_for_each_rank() -> None:
    assert num_elements("all_gather", 1024, dtype="bf16", num_ranks=3) == 510
    assert num_elements("scatter", 1, dtype="fp32", num_ranks=8) == 8
    assert num_elements("all_reduce", 1024, dtype="fp32", num_ranks=3) == 256


def test_axes_of_the_same_ranks_are_measured_once() -> None:
    assert list(groups_of(Layout(tp=2, pp=2), ExpertLayout())) == ["tp", "pp"]
    assert list(groups_of(Layout(cp=2, dp=2), ExpertLayout())) == ["cp", "dp", "dp_cp"]
    assert list(groups_of(Layout(dp=4, tp=2), ExpertLayout(ep=4, etp=1))) == ["tp", "dp", "ep", "edp"]


# ---- results


def results(place: Place) -> list[str]:
    """Collectives that bring a wrong result, on the ranks of the world."""
    tp = Mesh.start(Layout(tp=place.world_size), rank=place.rank, init_method=place.rendezvous).tp
    wrong = []
    for collective in COLLECTIVES:
        for dtype, width in DTYPES.items():
            made = operation(collective, 1000, axis=tp, dtype=dtype, device=torch.device("cpu"))
            assert made.num_bytes <= 1000
            assert made.num_bytes > 1000 - width * tp.size * 2
            made.run()
            wrong += [] if made.is_right() else [f"{collective} {dtype}"]
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_brings_what_it_must(world_size: int) -> None:
    assert run_ranks(world_size, results) == [[]] * world_size


def wrong_sum(place: Place) -> bool:
    """Whether a row is checked whose collective brought something else on the last rank alone."""
    mesh = Mesh.start(Layout(tp=2), rank=place.rank, init_method=place.rendezvous)
    with pytest.MonkeyPatch.context() as patch:

        def planted(*args: object, **options: object) -> object:
            made = operation(*args, **options)  # type: ignore[arg-type]
            return made._replace(expected=lambda: torch.zeros(1)) if place.rank else made

        patch.setattr(measuring, "operation", planted)
        runs = Runs("fp32", torch.device("cpu"), num_warmups=0, num_runs=2)
        return measure("all_reduce", 64, axis=mesh.tp, world=mesh.world, num_nodes=1, runs=runs).checked


def test_a_wrong_result_of_one_rank_is_told_on_all() -> None:
    assert run_ranks(2, wrong_sum) == [False, False]


# ---- fits


def times(alpha: float, bandwidth: float, sizes: Sequence[int], *, spread: float = 1.2) -> list[SizeTimes]:
    seconds = [alpha + size / bandwidth for size in sizes]
    return [SizeTimes(size, each, spread * each) for size, each in zip(sizes, seconds, strict=True)]


SIZES = [1024 * 4**i for i in range(9)]


def test_a_fit_finds_latency_and_bandwidth() -> None:
    (fit,) = fits_of(times(50e-6, 10e9, SIZES))
    assert fit.accepted
    assert (fit.alpha_s, fit.bandwidth_bytes_per_s) == (pytest.approx(50e-6), pytest.approx(10e9))
    assert fit.mean_error < 1e-9
    assert (fit.bytes_min, fit.bytes_max) == (SIZES[0], SIZES[-1])
    named = fit.as_json(collective="all_reduce", axis="tp", ranks=2, nodes=1)["fit"]
    names = "collective axis ranks nodes"
    values = "alpha_s bandwidth_bytes_per_s mean_error bytes_min bytes_max num_left_out reason accepted"
    assert list(named) == [*names.split(), *values.split()]


def test_two_protocols_are_two_lines() -> None:
    sizes = times(10e-6, 1e9, SIZES[:4]) + times(400e-6, 20e9, SIZES[4:])
    small, large = fits_of(sizes)
    assert small.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert large.alpha_s == pytest.approx(400e-6)
    assert (small.bytes_max, large.bytes_min) == (SIZES[3], SIZES[4])
    assert small.accepted and large.accepted


def test_noise_of_a_third_is_fitted_and_not_accepted() -> None:
    alternating = [1.0, 2.2] * 4 + [1.0]
    sizes = [
        SizeTimes(size, each * factor, 1.1 * each * factor)
        for (size, each, _), factor in zip(times(50e-6, 10e9, SIZES), alternating, strict=True)
    ]
    assert any("off by" in (fit.reason or "") for fit in fits_of(sizes))


def test_sizes_whose_runs_differ_by_more_than_three_are_left_out_and_too_many_refuse_the_fit() -> None:
    sizes = times(50e-6, 10e9, SIZES)
    for i in (0, 3, 4, 8):
        sizes[i] = SizeTimes(sizes[i].num_bytes, 1.5 * sizes[i].shortest, 6.0 * sizes[i].shortest)
    (fit,) = fits_of(sizes)
    assert fit.accepted
    assert (fit.num_left_out, fit.bytes_min, fit.bytes_max) == (4, SIZES[1], SIZES[7])
    assert fit.bandwidth_bytes_per_s == pytest.approx(10e9)
    sizes[5] = sizes[5]._replace(longest=4.5 * sizes[5].shortest)
    (fit,) = fits_of(sizes)
    assert fit.reason is not None
    assert fit.reason.startswith("at 5 of 9 sizes the slowest run took more than 3 times the quickest, at ")
    assert fit.reason.endswith(" bytes 4.5 times")
    assert not fit.accepted


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    (fit,) = fits_of([SizeTimes(size, 1e-4, 1e-4) for size in SIZES])
    assert fit.reason == "time does not grow with size"
    assert fit.seconds(SIZES[-1]) == pytest.approx(1.01e-4)
    assert fits_of(times(1e-6, 1e9, SIZES[:2])) == []


# ---- the command


ROW = "collective hccl dtype bytes ranks nodes axis device seconds_min seconds_median seconds_max algbw busbw checked"


def bench_on(place: Place, arguments: LinkArguments, layout: Layout) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = bench(arguments, layout, place)
    return status, output.getvalue()


def test_a_layout_is_measured_into_a_table_json_lines_and_a_picture(tmp_path: Path) -> None:
    arguments = LinkArguments(tp=2, dp=2, max_bytes="16K", runs=3, warmups=1)
    arguments = replace(arguments, json=tmp_path / "new" / "links.jsonl", png=tmp_path / "links.png")
    (status, output), *others = run_ranks(4, bench_on, arguments, Layout(tp=2, dp=2))
    assert status == 0
    assert others == [(0, "")] * 3
    lines = [json.loads(line) for line in (tmp_path / "new" / "links.jsonl").read_text().splitlines()]
    rows, fits = ([line for line in lines if ("fit" in line) == is_fit] for is_fit in (False, True))
    assert [list(row) for row in rows] == [ROW.split()] * len(rows)
    assert {(row["axis"], row["collective"]) for row in rows} == {(a, c) for a in ("tp", "dp") for c in COLLECTIVES}
    assert len(rows) == 2 * len(COLLECTIVES) * 3
    assert {(fit["fit"]["axis"], fit["fit"]["collective"]) for fit in fits} == {
        (r["axis"], r["collective"]) for r in rows
    }
    assert {fit["fit"]["device"] for fit in fits} == {"cpu"}
    for row in rows:
        assert row["checked"] and (row["ranks"], row["nodes"], row["dtype"], row["device"]) == (2, 1, "fp32", "cpu")
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds_median"])
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor(row["collective"], 2))
    assert output.count(" right\n") == len(rows)
    assert "HcclAllReduce" in output
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_the_data_ranks_are_what_is_left_of_the_ranks_that_were_started() -> None:
    assert LinkArguments().layout(2) == Layout(dp=2)
    assert LinkArguments(tp=2, cp=2).layout(8) == Layout(tp=2, cp=2, dp=2)


@pytest.mark.sweep
def test_under_torchrun_the_data_ranks_are_what_is_left(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = ["--collectives", "broadcast", "--max-bytes", "4K", "--runs", "2", "--json", "links.jsonl"]
    done = subprocess.run(
        [*torchrun, "-m", "megatronish", "bench-collectives", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "links.jsonl").read_text().splitlines()]
    assert [(row["axis"], row["bytes"]) for row in rows] == [("dp", 1024), ("dp", 4096)]


def bench_in_a_shell(flags: str, *, then: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} {ROOT / 'tools' / 'bench_collectives.py'} {flags} {then}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=100)


def test_fewer_sizes_than_a_line_needs_are_said_in_place_of_the_fits() -> None:
    arguments = LinkArguments(dp=2, collectives=("broadcast", "all_to_all_v"), max_bytes="4K", runs=2)
    (status, output), _ = run_ranks(2, bench_on, arguments, Layout(dp=2))
    assert status == 0
    assert output.endswith(
        "\nno fit: 2 sizes of 3 that a line needs; give a larger --max-bytes, or a smaller --min-bytes or --factor\n"
    )
    assert "alpha us" not in output


@pytest.mark.sweep
def test_a_reader_that_leaves_ends_the_measurement_without_a_message() -> None:
    done = bench_in_a_shell("--dp 2 --max-bytes 4K --runs 2", then="| head -n 1")
    assert done.stdout.startswith("axis") and done.stdout.count("\n") == 1
    assert not done.stderr


WRONG = {
    "": "one rank has no links; give a layout of more, for example --dp 2",
    "--tp 0": "tp=0 must be at least 1",
    "--dp 2 --ep 3": "ep=3 x etp=1 must divide the 2 ranks of a stage",
    "--dp 2 --max-bytes 4X": "max_bytes=4X must be a number of bytes above 0, as 1024, 64K, 16M or 1G",
    "--dp 2 --min-bytes 2M --max-bytes 1M": "min_bytes=2M must not be above max_bytes=1M",
    "--dp 2 --factor 1": "factor=1 must be at least 2: sizes grow by it",
    "--dp 2 --axes pp": "axes=pp has no two ranks in this layout; it has dp",
    "--dp 2 --collectives all-reduce": "collectives=all-reduce is not known; use some of all_reduce, ",
    "--dp 2 --png links.jpg": "png=links.jpg must end in .png",
    "--dp 2 --json /proc/links.jsonl": "--json /proc/links.jsonl cannot be written: ",
    f"--dp 2 --json {ROOT}": f"--json {ROOT} cannot be written: Is a directory; choose another",
    "--dp 2 --warmups -1": "warmups=-1 must not be negative",
}


@pytest.mark.parametrize("flags", WRONG)
def test_a_mistake_is_one_sentence(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith(WRONG[flags])
    assert said.err.count("\n") == 1
    assert not said.out


def test_an_accepted_fit_tells_the_time_of_any_size() -> None:
    fit = LinkFit(1e-5, 1e9, 0.0, 1, 2)
    assert fit.seconds(1e6) == pytest.approx(1.01e-3)
