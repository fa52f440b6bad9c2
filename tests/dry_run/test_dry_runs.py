"""Dry runs over features dealt pairwise: waits of the host, bytes by axis and memory, against estimate/costs/.

Each case builds the engine of one rank on fake CUDA tensors, takes a step and computes what hooks do after it; a
tensor on the wrong device raises. Some also evaluate, take a second step and look for a NaN, and a few generate. The
cases with fused operators run in other processes than those without: whether there are any is decided where
operators are imported. Every run takes cases in which every value of every feature occurs, `pytest --all-layouts` all:
in these nearly every two features meet that can.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dry_cases import CASES, FEW, FURTHER, KERNELS, LAYOUTS, SINGLE, Case, SingleCase, choices
from dry_generation import ENDS, GENERATIONS, NUM_TOKENS
from pairwise import covered_pairs, possible_pairs
from paths import ROOT, TESTS

from megatronish.commands.configuration import read_config
from megatronish.estimate.costs.traffic import why_no_traffic
from megatronish.ops.build import BuildError, find_compiler
from megatronish.specs.flops import hardware_flops_per_token

ALL = [*CASES, *SINGLE]
MEMORY = 0.05  # of the peak
SECONDS = 900
Results = list[tuple[Case | SingleCase, dict[str, Any]]]


def needs_compiler() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"fake CUDA is C++: {error}")


def is_whole(number: int) -> bool:
    """Whether a case also does what takes as long as a step: of those that every run takes, two of five.

    And those of single features that offload.
    """
    if number >= len(CASES):
        return ALL[number].name in WHOLE
    return number not in FEW or FEW.index(number) % 5 in (0, 2)


WHOLE = {"parameters on the host", "parameters on the host, with copies", "experts offloaded"}


@pytest.fixture(scope="module")
def numbers(request: pytest.FixtureRequest) -> list[int]:
    if request.config.getoption("--all-layouts"):
        return [*range(len(ALL))]
    return [*FEW, *(number for number in range(len(CASES), len(ALL)) if ALL[number].name not in FURTHER)]


PARTS = {"assumed": 2, "0": 1}
"""Processes for each kind of operators: a worker of xdist runs one of them while another goes on with other tests."""


def lines_of(kernels: str, part: int, numbers: list[int], folder: Path) -> list[tuple[int | str, Any]]:
    """The reports of a part of the cases and of all generations, which the first worker that asks leaves in a file."""
    needs_compiler()
    mine = [f"{'+' if is_whole(number) else ''}{number}" for number in numbers if ALL[number].kernels == kernels]
    mine = mine[part :: PARTS[kernels]]
    mine += ["generation", "planted"] if (kernels, part) == ("assumed", 0) else []
    path = os.pathsep.join([str(ROOT), str(TESTS / "support")])
    environment = os.environ | {"MEGATRONISH_KERNELS": kernels, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"dry_runs_{kernels}_{part}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until whoever was first has finished
        file.seek(0)
        text = file.read()
        if not text:
            command = [sys.executable, str(TESTS / "support" / "dry_runs.py"), *mine]
            ended = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False
            )
            assert ended.returncode == 0
            text = ended.stdout
            file.write(text)
    return [tuple(json.loads(line)) for line in text.splitlines()]


@pytest.fixture(scope="module")
def lines(numbers: list[int], session_folder: Path) -> list[tuple[int | str, Any]]:
    """The reports of all cases and generations; the last part first, as another worker may be at the first."""
    parts = [(kernels, part) for kernels, count in PARTS.items() for part in range(count)]
    return [line for part in reversed(parts) for line in lines_of(*part, numbers, session_folder)]


@pytest.fixture(scope="module")
def results(lines: list[tuple[int | str, Any]], numbers: list[int]) -> Results:
    """The report of every case."""
    found = [(number, result) for number, result in lines if isinstance(number, int)]
    assert sorted(number for number, _ in found) == sorted(numbers)
    return [(ALL[number], result) for number, result in found]


@pytest.mark.parametrize(("kernels", "part"), [(name, part) for name in KERNELS for part in range(PARTS[name])])
def test_every_case_builds_and_takes_a_step(kernels: str, part: int, numbers: list[int], session_folder: Path) -> None:
    """On tensors that refuse to meet those of another device."""
    found = lines_of(kernels, part, numbers, session_folder)
    failed = [
        f"{ALL[number].name}\n{said['error']}" for number, said in found if isinstance(number, int) and "error" in said
    ]
    assert found and not failed, "\n".join(failed)


def test_mistakes_that_a_gpu_would_find_are_found(lines: list[tuple[int | str, Any]]) -> None:
    """Each where it is made: what is stacked or written lies on two devices, or an axis of GPUs is handed the CPU's."""
    (said,) = [result for word, result in lines if word == "planted"]
    assert said.keys() == {"look_through_all", "hash_where_it_lies", "add_on_the_host", "add_a_number_in_place"}
    for name in ("look_through_all", "hash_where_it_lies"):
        assert said[name].startswith("aten.stack.default of tensors on several devices, which a GPU refuses")
    assert (
        "all-reduce over tp of a tensor on cpu, where this axis only moves tensors on cuda" in said["add_on_the_host"]
    )
    assert said["add_a_number_in_place"].startswith("aten.add_.Tensor of tensors on several devices")


def test_generation_waits_once_a_token_and_has_no_kernel_planned(lines: list[tuple[int | str, Any]]) -> None:
    """Once on each rank, for the tokens, also when a text ends or the cache is full; nor does decoding ask cuDNN."""
    cases = {case.name: case for case in GENERATIONS}
    (found,) = [result for word, result in lines if word == "generation"]
    assert found.keys() == cases.keys()
    for name, result in found.items():
        assert result["tokens"] == [NUM_TOKENS, ENDS, NUM_TOKENS]
        waits = Counter({site.split(":")[0]: number for site, number in result["waits"].items()})
        layers = cases[name].num_expert_layers
        assert (
            waits
            == Counter({"inference/generate.py": NUM_TOKENS, "layers/dispatch.py": layers * NUM_TOKENS}) - Counter()
        )
        assert not any(may_plan for _, _, may_plan in result["calls"])
        assert {1, 30, 40} <= {queries for queries, _, _ in result["calls"]}, "decode, and prefill before and after"


def test_the_host_waits_once_a_step_and_once_a_layer_of_experts(results: Results) -> None:
    """For loss and norm together, for the rows of the experts of every forward, and for gradients that it steps by."""
    for case, result in results:
        waits: Counter[str] = Counter()
        for site, number in result["host_waits"].items():
            waits[site.split(":")[0].split(" ")[0]] += number
        assert waits == case.waits, case.name


def test_flops_of_experts_are_counted_to_the_digit(results: Results) -> None:
    """By torch's grouped product and, in fp32, by a loop that adds up weight gradients in place."""
    found = {case.name: (case, result) for case, result in results if case.name.startswith("Qwen3-30B-A3B")}
    assert len(found) == 2
    for case, result in found.values():
        config = read_config(case.argv).config
        length, step = config.training.seq_length, config.global_batch_size
        token = hardware_flops_per_token(config.model, padded_vocab_size=1024, seq_length=length, attention="full")
        assert sum(result["flops"].values()) == token * length * step, case.name
        assert not result["uncounted_products"]


def test_bytes_by_axis_equal_the_formulas(results: Results) -> None:
    for case, result in results:
        if "--quantize-base" in case.argv and why_no_traffic(read_config(case.argv).config) is not None:
            continue
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
    """Among the few more than half of the pairs meet, too."""
    dealt, some = [case.chosen for case in CASES], [CASES[number].chosen for number in FEW]
    possible = possible_pairs([choices(layout) for layout in LAYOUTS])
    assert len(possible & covered_pairs(dealt)) > 0.95 * len(possible)
    assert len(possible & covered_pairs(some)) > 0.55 * len(possible)
    assert {pair for chosen in dealt for pair in chosen.items()} == {pair for chosen in some for pair in chosen.items()}
    singles = {case.name for case in SINGLE}
    assert FURTHER.keys() < singles and {*FURTHER.values()} <= singles - FURTHER.keys()
