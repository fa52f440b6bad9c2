"""NF4 and int8 against bitsandbytes: codes, absmax and values have its bits, and so has its own nested state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatronish.layers.int8 import Int8Form
from megatronish.layers.linear import ALONE
from megatronish.layers.nf4 import NF4Form
from megatronish.ops.nf4 import BLOCKS_PER_SCALE, DYNAMIC, NF4, dequantise, dequantise_scales, quantise, quantise_scales

pytestmark = pytest.mark.peers("bitsandbytes")
peer: Any = pytest.importorskip(
    "bitsandbytes.functional", reason="bitsandbytes is not installed here; see `make test-peers`", exc_type=ImportError
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_of(dtype: torch.dtype) -> Tensor:
    """[512, 1024], of which one block is zero and one has values halfway between two codes."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[3, :64] = 0.0
    weight[5, :15], weight[5, 15:64] = (NF4[1:] + NF4[:-1]) / 2, 1.0
    return weight.to(dtype)


def test_the_tables_are_its() -> None:
    assert torch.equal(peer.create_dynamic_map(), DYNAMIC)
    assert torch.equal(peer.get_4bit_type("nf4", device="cpu"), NF4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_absmax_and_values_have_its_bits(dtype: torch.dtype) -> None:
    weight = weight_of(dtype)
    packed, state = peer.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    codes, absmax = quantise(weight)
    assert torch.equal(codes.flatten(), packed.flatten()) and torch.equal(absmax.flatten(), state.absmax)
    values = torch.empty_like(weight)
    dequantise(codes, absmax, values)
    assert torch.equal(values, peer.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_nested_state_dequantised_here_has_its_bits(dtype: torch.dtype) -> None:
    weight = weight_of(dtype)
    packed, state = peer.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    scales = state.state2.absmax.repeat_interleave(BLOCKS_PER_SCALE)
    absmax = dequantise_scales(state.absmax.flatten(), scales, state.offset)
    values = torch.empty_like(weight)
    dequantise(packed.view(512, 16, 32), absmax.view(512, 16), values)
    assert torch.equal(values, peer.dequantize_4bit(packed, state))


def test_own_nested_codes_are_its() -> None:
    """They are the nearest values, as on its GPUs; on CPUs it rounds to a grid first: on that grid all are equal."""
    absmax = torch.randn(65_536, 64, generator=torch.Generator().manual_seed(2)).abs().amax(1)
    mine = quantise_scales(absmax)
    assert mine.offset.item() == pytest.approx(absmax.mean().item(), rel=2e-7)
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(absmax - mine.offset, DYNAMIC, BLOCKS_PER_SCALE)
    assert torch.equal(scales, mine.scales)
    x = (absmax - mine.offset) * (1 / scales).repeat_interleave(BLOCKS_PER_SCALE)
    assert torch.equal(nearest(x), mine.codes.long())
    assert torch.equal(nearest(on_its_grid(x)), codes.flatten().long())
    assert (codes.flatten() == mine.codes).float().mean() >= 0.997


def nearest(x: Tensor) -> Tensor:
    """Numbers of the nearest values of the 8-bit table."""
    return torch.bucketize(x, (DYNAMIC[1:] + DYNAMIC[:-1]) / 2)


def on_its_grid(x: Tensor) -> Tensor:
    """[-1, 1] -> the nearest of 65,536 values of equal distances: its search on CPUs is a table with one code each."""
    return ((x + 1) * 32767.5 + 0.5).int() / 32767.5 - 1


def test_a_stored_weight_has_the_bytes_of_its_sections() -> None:
    """Each section of a fused weight is what bitsandbytes makes of the unfused layer."""
    weight = weight_of(torch.float32)
    form = NF4Form((256, 128, 128), 1024, double=False)
    stored, _ = form.pack(weight)
    for rows, mine in zip(weight.split(form.sections), stored.split(form.sections), strict=True):
        packed, state = peer.quantize_4bit(rows.contiguous(), quant_type="nf4", blocksize=64)
        blocks = mine.unflatten(1, (16, 36))
        assert torch.equal(blocks[..., :32].flatten(), packed.flatten())
        assert torch.equal(blocks[..., 32:].contiguous().view(torch.float32).flatten(), state.absmax)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_8_bits_has_its_codes_its_scales_and_its_values(dtype: torch.dtype) -> None:
    weight = weight_of(dtype)
    codes, scales, _ = peer.int8_vectorwise_quant(weight)
    form = Int8Form((512,), 1024)
    stored, own = form.pack(weight)
    assert torch.equal(own.view(torch.float32), scales)
    assert torch.equal(stored.view(torch.int8), codes)
    values = torch.empty(512, 1024)
    form.unpack(stored, own.view(torch.float32), values, first_row=0, columns=ALONE.axis)
    assert torch.equal(values, peer.int8_vectorwise_dequant(codes, scales))
