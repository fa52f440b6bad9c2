"""Tests of the choice of an operation for a tile: the table, what documents say of it, and calls of the operations.

Operations of CUDA are called on tensors without memory: torch checks names, types and shapes of what it is given.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from paths import ROOT

from megatronish.attention import tile
from megatronish.attention.operations import CUDNN, EFFICIENT, EXPLICIT, FLASH, FLASH_ON_CPU, Operation, TileMask
from megatronish.attention.tile import TABLE, TileProblem, row_for

HOPPER = TileProblem("cuda", torch.bfloat16, 128, capability=(9, 0), cudnn=91_002)
CHOSEN = {
    "Hopper": (HOPPER, "cuDNN"),
    "Blackwell": (HOPPER._replace(capability=(10, 0)), "cuDNN"),
    "Blackwell of a workstation": (HOPPER._replace(capability=(12, 0)), "FlashAttention 2"),
    "Ampere": (HOPPER._replace(capability=(8, 0)), "FlashAttention 2"),
    "Ada": (HOPPER._replace(capability=(8, 9), dtype=torch.float16), "FlashAttention 2"),
    "Turing": (HOPPER._replace(capability=(7, 5)), "memory-efficient"),
    "wide heads": (HOPPER._replace(head_size=192), "FlashAttention 2"),
    "wider heads": (HOPPER._replace(head_size=320), "memory-efficient"),
    "without cuDNN": (HOPPER._replace(cudnn=0), "FlashAttention 2"),
    "an old cuDNN": (HOPPER._replace(cudnn=8_907), "FlashAttention 2"),
    "FA3 activated": (HOPPER._replace(flash="FA3", head_size=192), "FlashAttention 3"),
    "FA3 elsewhere": (HOPPER._replace(flash="FA3", capability=(10, 0)), "cuDNN"),
    "fp32": (HOPPER._replace(dtype=torch.float32), "memory-efficient"),
    "a dense mask": (HOPPER._replace(mask="dense"), "memory-efficient"),
    "dropout": (HOPPER._replace(mask="dropout"), "explicit"),
    "dropout on a CPU": (TileProblem("cpu", torch.float32, 64, mask="dropout"), "explicit"),
    "a CPU": (TileProblem("cpu", torch.float64, 300, mask="dense"), "flash, of a CPU"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_first_row_that_takes_a_tile_computes_it(name: str) -> None:
    problem, expected = CHOSEN[name]
    assert row_for(problem).name == expected


def test_every_row_is_chosen_somewhere() -> None:
    assert {row.name for row in TABLE} == {expected for _, expected in CHOSEN.values()}
    operations = {row.name: row.operation for row in TABLE}
    assert list(operations.values()) == [EXPLICIT, FLASH_ON_CPU, FLASH, CUDNN, FLASH, EFFICIENT]


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs/SHARDING.md").read_text().partition("### Attention of a ring")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [f"| {row.name} | {row.when} | {row.why} |" for row in TABLE]


@pytest.mark.parametrize("operation", [FLASH, CUDNN, EFFICIENT], ids=["flash", "cuDNN", "efficient"])
@pytest.mark.parametrize("head_size", [64, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_operations_of_a_gpu_take_tiles_with_shared_heads(operation: Operation, head_size: int, causal: bool) -> None:
    keys = 64 if causal else 32
    make: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    q, k, v = (torch.empty(2, n, length, head_size, **make) for n, length in ((8, 64), (2, keys), (2, keys)))
    mask = TileMask(causal=causal)
    out, lse = operation.forward(q, k, v, mask)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    gradients = operation.backward(out, q, k, v, out, lse.contiguous(), mask)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


def test_what_torch_has_is_asked_for() -> None:
    """cuDNN that is switched off is none, and an implementation of flash attention is known by its name."""
    with patch.object(torch.backends.cudnn, "version", lambda: 91_002):
        assert tile._cudnn_version() == 91_002
        with patch.object(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False):
            assert tile._cudnn_version() == 0
    assert tile._flash_in_use() == "FA2"
    with patch.object(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3"):
        assert tile._flash_in_use() == "FA3"


def test_a_tile_on_a_cpu_is_flash_attention() -> None:
    q = torch.randn(1, 2, 4, 8)
    out, _ = tile.forward(q, q, q, tile_mask=TileMask(causal=True))
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(out, expected)
