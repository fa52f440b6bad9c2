"""Tests of weights in 4 bits as gpt-oss is published: every product exact, an expert at a time, mistakes told."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf, to_ours
from expert_models import D, E, tensors_of_family, write_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.quantised import from_mxfp4
from megatronish.formats.safetensors import FILE
from megatronish.formats.weights import LazyTensor

SETTINGS = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
OUTPUTS, COUNT = 6, 3


def drawn(number: int = E, *, outputs: int = OUTPUTS, count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Bytes of blocks and of scales, all codes and nearly all exponents among them."""
    made = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (number, outputs, count, 16), generator=made, dtype=torch.uint8)
    return blocks, torch.randint(0, 253, (number, outputs, count), generator=made, dtype=torch.uint8)


def value(code: int, scale: int) -> float:
    """Of a number in 4 bits, by the definition of e2m1 and of e8m0."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return math.ldexp(-size if sign else size, scale - 127)


def lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone, lambda start, stop: tensor[start:stop].clone())


def test_every_number_is_exact() -> None:
    blocks, scales = drawn()
    read = from_mxfp4(Path("folder"), {"w_blocks": lazy(blocks), "w_scales": lazy(scales), "b": lazy(scales.float())})
    assert read.keys() == {"w", "b"}
    whole = read["w"].read()
    assert (tuple(whole.shape), whole.dtype) == (read["w"].shape, torch.bfloat16) == ((E, 96, OUTPUTS), torch.bfloat16)
    for e, out, place in torch.cartesian_prod(torch.arange(E), torch.arange(OUTPUTS), torch.arange(96)).tolist():
        byte = int(blocks[e, out, place // 32, place % 32 // 2])
        expected = value(byte >> 4 if place % 2 else byte & 15, int(scales[e, out, place // 32]))
        assert float(whole[e, place, out].double()) == expected
    assert torch.equal(read["w"].rows(1, 3), whole[1:3])


def in_4_bits(folder: Path) -> dict[str, Tensor]:
    """Put the experts of a folder in 4 bits; the weights that it then has."""
    expected = {key: each.bfloat16() for key, each in load_file(folder / FILE).items()}
    stored = dict(expected)
    for key in [key for key in expected if key.endswith("_proj") and ".experts." in key]:
        number, inputs, outputs = stored.pop(key).shape
        blocks, scales = drawn(number, outputs=outputs, count=inputs // 32)
        scales = scales % 4 + 122  # weights as a model has them
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        lazies = {"w_blocks": lazy(blocks), "w_scales": lazy(scales)}
        expected[key] = from_mxfp4(folder, lazies)["w"].read().contiguous()
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    return expected


def write_wide(folder: Path, **config: Any) -> Path:
    """A gpt-oss whose sizes have whole blocks."""
    write_family(folder, "gpt_oss", **{"hidden_size": 32, "intermediate_size": 64}, **config)
    made = torch.Generator().manual_seed(6)
    of_experts = {
        "gate_up_proj": (32, 128),
        "gate_up_proj_bias": (128,),
        "down_proj": (64, 32),
        "down_proj_bias": (32,),
    }
    tensors = {}
    for key, tensor in tensors_of_family("gpt_oss").items():
        shape = [32 if size == D else size for size in tensor.shape]
        if ".experts." in key:
            shape = [E, *of_experts[key.rpartition(".")[2]]]
        tensors[key] = torch.randn(shape, generator=made)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def test_a_published_folder_is_read_as_the_one_in_bf16_and_written_so(tmp_path: Path) -> None:
    folder = write_wide(tmp_path / "theirs", **SETTINGS)
    expected = in_4_bits(folder)
    to_ours(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = load_file(tmp_path / "back" / FILE)
    assert back.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(back[key], tensor), key
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()


def test_an_expert_is_read_at_a_time() -> None:
    blocks, scales = drawn()
    seen: list[tuple[int, int]] = []

    def by_rows(tensor: Tensor) -> LazyTensor:
        def rows(start: int, stop: int) -> Tensor:
            seen.append((start, stop))
            return tensor[start:stop].clone()

        def whole() -> Tensor:
            raise AssertionError("the stack is read whole")

        return LazyTensor(tuple(tensor.shape), tensor.dtype, whole, rows)

    read = from_mxfp4(Path("folder"), {"w_blocks": by_rows(blocks), "w_scales": by_rows(scales)})["w"]
    read.rows(2, 3)
    assert set(seen) == {(2, 3)}
    seen.clear()
    read.read()
    assert {stop - start for start, stop in seen} == {1}


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: [stored.pop(key) for key in [*stored] if key.endswith(name)]  # type: ignore[return-value]


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.update({key: change(each) for key, each in stored.items() if key.endswith(name)})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without("gate_up_proj_scales"), "gate_up_proj_scales is not there"),
        (
            changed("down_proj_scales", lambda each: each[:, :-1].clone()),
            "down_proj_scales is [4, 31, 2], which must have",
        ),
        (
            changed("down_proj_blocks", lambda each: each[..., :8].clone()),
            "is in 4 bits, [experts, outputs, blocks, 16]",
        ),
        (changed("down_proj_scales", lambda each: each.float()), "which must have a byte for each block"),
        (changed("down_proj_scales", lambda each: each * 0 + 255), "has a scale of 255, which is no number"),
        (without("gate_up_proj_blocks"), "gate_up_proj_scales is of type U8, and weights are read in"),
    ],
    ids=range(6),
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], told: str) -> None:
    folder = write_wide(tmp_path / "theirs", **SETTINGS)
    in_4_bits(folder)
    stored = load_file(folder / FILE)
    damage(stored)
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(UserError) as refused:
        to_ours(folder, tmp_path / "ours")
    assert told in str(refused.value)


def test_a_stack_is_described_without_being_read(tmp_path: Path) -> None:
    folder = write_wide(tmp_path / "theirs", **SETTINGS)
    in_4_bits(folder)
    tensors = hf.read(folder).tensors
    stack = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert (stack.shape, stack.dtype) == ((E, 32, 128), torch.bfloat16)
