"""Tests of the kernels in Triton, compiled ahead of time for GPUs that are not here: `make test-triton`.

What ptxas says of each in bf16: registers, spills and shared memory; and whether accesses to memory have 16 bytes.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT, TESTS
from triton_builds import ARCHITECTURES, Build, Recorded, launches_of
from triton_launches import build_driver

from megatronish.attention import dropout_attention
from megatronish.ops import cross_entropy, dropout, nf4, norm, permutation, rope
from megatronish.ops.library import OperatorFamily, in_triton

CAN_COMPILE = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton, and no TRITON_INTERPRET: `make test-triton`")
MOST_SHARED = 99 * 2**10  # of a block of the smallest GPU since sm_80, which is sm_86
MOST_REGISTERS = 255
BF16, INTS = torch.bfloat16, torch.int64
PLACE = (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=INTS))


def launches(family: OperatorFamily, name: str, *given: Any) -> list[Recorded]:
    """What an operator starts."""
    (operator,) = (each for each in family.operators if each.name == name)
    return launches_of(in_triton(operator), *given)


def builds(recorded: list[Recorded], *, most_spilled: int = 0) -> list[Build]:
    """Each launch for each architecture; none spills more than this."""
    made = [each.build(architecture) for each in recorded for architecture in ARCHITECTURES]
    for build in made:
        assert build.spill_bytes <= most_spilled, f"{build.name} spills {build.spill_bytes} on sm_{build.architecture}"
        assert build.registers <= MOST_REGISTERS and build.shared_bytes <= MOST_SHARED, build[:-1]
    return made


def attention(size: int, *, dtype: torch.dtype = BF16, alibi: bool = False, **options: bool) -> list[Recorded]:
    """Forward and backward of 2,048 tokens with query heads that share a key/value head."""
    q, k = torch.empty(2048, 2, 16, size, dtype=dtype), torch.empty(2048, 2, 4, size, dtype=dtype)
    documents = torch.zeros(2, 2048, dtype=INTS) if options.get("documents") else None
    window = 1024 if options.get("windowed") else None
    sinks = torch.zeros(16, dtype=dtype) if options.get("sinks") else None
    given = (*PLACE, documents, torch.zeros(16) if alibi else None, 0, window, True, 0.1)
    family, lse = dropout_attention.FAMILY, torch.empty(2, 16, 2048)
    forward = launches(family, "dropped_attention", q, k, k, sinks, *given)
    return forward + launches(family, "dropped_attention_backward", q, q, k, k, sinks, q, lse, *given)


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
def test_attention_neither_spills_nor_asks_for_more_shared_memory_than_there_is(size: int) -> None:
    made = builds(attention(size))
    assert len(made) == 4 * len(ARCHITECTURES)
    assert size < 64 or all(build.widest("ld") == 16 for build in made)


def test_attention_with_every_kind_of_mask() -> None:
    builds(attention(128, alibi=True, documents=True, windowed=True, sinks=True))


@pytest.mark.parametrize("size", [64, 256])
def test_attention_in_fp32(size: int) -> None:
    builds(attention(size, dtype=torch.float32))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_reads_and_writes_by_16_bytes(interleaved: bool) -> None:
    x, angles = torch.empty(64, 2, 32, 128, dtype=BF16), torch.empty(64, 1, 1, 64)
    (launch,) = launches(rope.FAMILY, "rotate", x, angles, angles, interleaved, False)
    assert all(build.widest("ld") == build.widest("st") == 16 for build in builds([launch]))


@pytest.mark.parametrize("double", [False, True])
def test_nf4_writes_by_16_bytes(double: bool) -> None:
    stored = torch.empty(64, 16 * (33 if double else 36), dtype=torch.uint8)
    level = torch.empty(5) if double else None
    launch = launches(nf4.FAMILY, "nf4_unpack_", torch.empty(64, 1024, dtype=BF16), stored, level, 0, 16, 0)
    assert len(launch) == 1 and all(build.widest("st") == 16 for build in builds(launch))


@pytest.mark.parametrize("columns", [1024, 8192, 16384])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_read_and_write_by_16_bytes(kind: str, columns: int) -> None:
    x, weight, row = torch.empty(8, columns, dtype=BF16), torch.empty(columns, dtype=BF16), torch.empty(8, 1)
    of_bias, rows = ([weight], [row, row]) if kind == "layer" else ([], [row])
    forward = launches(norm.FAMILY, f"add_{kind}_norm", x, x, weight, *of_bias, 1e-5, False)
    backward = launches(norm.FAMILY, f"{kind}_norm_backward", x, x, x, weight, *rows, False)
    assert (len(forward), len(backward)) == (1, 3 if columns > 8192 else 2)
    made = builds(forward + backward, most_spilled=16 if columns == 16384 else 0)  # four registers of 128
    assert all(build.widest("ld") == build.widest("st") == 16 for build in made if "parts" not in build.name)


def test_cross_entropy_reads_and_writes_by_16_bytes() -> None:
    logits, labels, row = torch.empty(4, 128256, dtype=BF16), torch.zeros(4, dtype=INTS), torch.empty(4)
    forward = launches(cross_entropy.FAMILY, "cross_entropy_statistics", logits, labels, 0, 128256)
    backward = launches(cross_entropy.FAMILY, "cross_entropy_gradient_", logits, labels, row, row, row, 0, 128256)
    assert (len(forward), len(backward)) == (1, 1)
    assert all(build.widest("ld") == 16 for build in builds(forward + backward))
    assert all(build.widest("st") == 16 for build in builds(backward))


def test_experts_rows_are_read_and_written_by_16_bytes() -> None:
    x, order, weights = torch.empty(16, 2048, dtype=BF16), torch.arange(128), torch.empty(16, 8)
    rows = torch.empty(128, 2048, dtype=BF16)
    made = [
        launches(permutation.FAMILY, "spread", x, order, order, 8),
        launches(permutation.FAMILY, "collect", rows, weights, order, order, 8),
        launches(permutation.FAMILY, "collect", rows, None, order, order, 8),
        launches(permutation.FAMILY, "collect_backward", x, rows, weights, order, order),
    ]
    assert all(len(each) == 1 for each in made)
    assert all(build.widest("ld") == build.widest("st") == 16 for build in builds([each for (each,) in made]))


def test_dropout_reads_and_writes_by_16_bytes() -> None:
    x, samples = torch.empty(64, 2, 2048, dtype=BF16), PLACE[1]
    made = launches(dropout.FAMILY, "dropout_add", x, x, PLACE[0], samples, torch.arange(64), 0.1)
    assert all(build.widest("ld") == build.widest("st") == 16 for build in builds(made))
    scores, row = torch.empty(2, 3, 64, 2048), torch.empty(2, 3, 64)
    place = (*PLACE, None, None, 0, 0, 0, None, True, 0.1, 0.1)
    tile: Callable[..., list[Recorded]] = launches
    made = tile(dropout.FAMILY, "softmax_dropout", scores, row, *place)
    made += tile(dropout.FAMILY, "softmax_dropout_backward", scores, scores, row, row, *place)
    assert all(build.widest("ld") == build.widest("st") == 16 for build in builds(made))


GRIDS = """
_forward 1 12 256, _means 1 12 256, _gradients_of_keys 1 4 256, _gradients_of_queries 1 12 256, _add 800 1 128,
_softmax 480 1 128, _softmax 480 1 128, _rotate 80 1 64, _unpack 1 1 128, _statistics 4 1 256, _gradient 4 2 256,
_forward 4 1 32, _backward 4 1 32, _add_parts 1 2 128, _forward 4 1 32, _backward 4 1 32, _add_parts 1 1 128,
_spread 12 1 128, _collect 4 1 128, _gradient 12 1 128
"""


def test_kernels_go_through_tritons_own_launcher_down_to_the_driver(tmp_path: Path) -> None:
    """What an ahead-of-time build leaves out: arguments told apart at the call, kernels loaded, tuples flattened in C.

    Triton 3.7.1 refused here what 3.9.0 compiled.
    """
    build_driver(tmp_path, os.environ.get("CC") or shutil.which("gcc") or "clang")
    path = os.pathsep.join([str(ROOT), str(TESTS / "support")])
    here = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path}
    here |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(TESTS / "support" / "triton_launches.py")]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    launches = GRIDS.replace("\n", " ").strip().split(", ")
    assert done.stdout.splitlines() == 2 * launches


def test_sizes_of_one_are_compiled_too() -> None:
    """Triton takes an argument of 1 for a constant."""
    single = torch.empty(1, 1, 1, 64, dtype=BF16)
    lse = torch.empty(1, 1, 1)
    given = (PLACE[0], PLACE[1][:1], None, None, 1)
    for causal, window in ((True, 1), (True, None), (False, None)):
        rest = (*given, window, causal, 0.1)
        family = dropout_attention.FAMILY
        made = launches(family, "dropped_attention", single, single, single, None, *rest)
        made += launches(family, "dropped_attention_backward", *[single] * 4, None, single, lse, *rest)
        builds(made)
    x, one = torch.empty(1, 1, 1, 6, dtype=BF16), torch.empty(1, 1, 1, 1)
    builds(launches(rope.FAMILY, "rotate", x, one, one, True, False))
    row = torch.empty(1, 1, dtype=BF16)
    builds(launches(norm.FAMILY, "rms_norm_backward", row, None, row, row[0], torch.empty(1, 1), True))
    number = torch.zeros(1, dtype=INTS)
    builds(launches(cross_entropy.FAMILY, "cross_entropy_statistics", row, number, 0, 1))
    builds(launches(cross_entropy.FAMILY, "cross_entropy_gradient_", row, number, one, one, one, 1, 0))
    builds(launches(permutation.FAMILY, "spread", row, number, number, 1))
    builds(launches(permutation.FAMILY, "collect", row, one[0, 0], number, number, 1))
    builds(launches(permutation.FAMILY, "collect_backward", row, row, one[0, 0], number, number))
    builds(launches(nf4.FAMILY, "nf4_unpack_", torch.empty(1, 64), torch.empty(1, 33).byte(), torch.empty(2), 1, 1, 0))
    builds(launches(dropout.FAMILY, "dropout_add", x[0, :1], None, PLACE[0], number, number, 0.5))
