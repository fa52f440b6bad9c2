"""Dry runs over features dealt pairwise: waits of the host, bytes by axis and memory, against the formulas of costs/.

Each case builds the engine of one rank on fake CUDA tensors and takes a step; a tensor on the wrong device raises. The
cases with fused operators run in one process, and those without in another: whether there are any is decided where
operators are imported. `pytest --all-layouts` takes all cases, in which nearly every two features meet that can.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from dry_cases import CASES, FEW, KERNELS, LAYOUTS, SINGLE, Case, SingleCase, choices
from pairwise import covered_pairs, possible_pairs
from paths import ROOT, TESTS

from megatronish.ops.build import BuildError, find_compiler

ALL = [*CASES, *SINGLE]
MEMORY = 0.05  # of the peak
SECONDS = 900
Results = list[tuple[Case | SingleCase, dict[str, Any]]]


def needs_compiler() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"fake CUDA is C++: {error}")


@pytest.fixture(scope="module")
def numbers(request: pytest.FixtureRequest) -> list[int]:
    dealt = range(len(CASES)) if request.config.getoption("--all-layouts") else FEW
    return [*dealt, *range(len(CASES), len(ALL))]


@pytest.fixture(scope="module")
def results(numbers: list[int]) -> Results:
    """The reports of all cases, from a process for each kind of operators, both at the same time."""
    needs_compiler()
    started = []
    for kernels in KERNELS:
        mine = [str(number) for number in numbers if ALL[number].kernels == kernels]
        path = os.pathsep.join([str(ROOT), str(TESTS / "support")])
        environment = os.environ | {"MEGATRONISH_KERNELS": kernels, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(TESTS / "support" / "dry_runs.py"), *mine]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    lines = [line for child in started for line in child.communicate(timeout=SECONDS)[0].splitlines()]
    assert [child.returncode for child in started] == [0, 0]
    found = [json.loads(line) for line in lines]
    assert sorted(number for number, _ in found) == sorted(numbers)
    return [(ALL[number], result) for number, result in found]


def test_every_case_builds_and_takes_a_step(results: Results) -> None:
    """On tensors that refuse to meet those of another device."""
    failed = [f"{case.name}\n{result['error']}" for case, result in results if "error" in result]
    assert not failed, "\n".join(failed)


def test_the_host_waits_once_a_step_and_once_a_layer_of_experts(results: Results) -> None:
    """For loss and norm together, for the rows of the experts of every forward, and for gradients that it steps by."""
    for case, result in results:
        waits: Counter[str] = Counter()
        for site, number in result["host_waits"].items():
            waits[site.split(":")[0].split(" ")[0]] += number
        assert waits == case.waits, case.name


def test_bytes_by_axis_equal_the_formulas(results: Results) -> None:
    for case, result in results:
        sent = {f"{each['axis']} {each['collective']}": each["bytes"] for each in result["traffic"]}
        expected = {f"{each['axis']} {each['collective']}": each["expected"] for each in result["traffic"]}
        assert sent == expected | result["expected_only"], case.name


def test_the_peak_of_memory_is_near_the_expected_one(results: Results) -> None:
    far = {}
    for case, result in results:
        error = result["peak_bytes"] / result["expected_memory"]["total"] - 1
        if abs(error) > MEMORY:
            far[case.name] = f"{error:+.3f}"
    assert not far, far


def test_a_rank_is_built_in_less_memory_than_its_step_takes(results: Results) -> None:
    """So what fits a plan can be built: nothing is whole in fp32 that is kept in 16 bits or in parts."""
    for case, result in results:
        assert result["build_peak_bytes"] <= result["peak_bytes"], case.name


def test_model_state_is_what_is_expected_but_for_padding(results: Results) -> None:
    for case, result in results:
        owners, expected = result["owners"], result["expected_memory"]
        for owner, name in (("weights", "parameters"), ("optimizer", "optimizer")):
            assert owners[owner] == pytest.approx(expected[name], rel=2e-3), (case.name, owner)


def test_nearly_every_two_features_meet_and_every_value_is_among_the_few() -> None:
    dealt, some = [case.chosen for case in CASES], [CASES[number].chosen for number in FEW]
    possible = possible_pairs([choices(layout) for layout in LAYOUTS])
    assert len(possible & covered_pairs(dealt)) > 0.95 * len(possible)
    assert len(possible & covered_pairs(some)) > 0.8 * len(possible)
    assert {pair for chosen in dealt for pair in chosen.items()} == {pair for chosen in some for pair in chosen.items()}
