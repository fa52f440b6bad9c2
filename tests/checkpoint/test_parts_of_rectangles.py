"""Tests of reading some rows of a large stored rectangle: an expert of many."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatronish.checkpoint.checksums import DamagedError, OpenedFile
from megatronish.config.sections.model import ModelConfig
from megatronish.formats import native
from megatronish.formats.weights import Description, LazyTensor, Model

EXPERTS = ModelConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=32,
    ffn_hidden_size=128,
    max_position_embeddings=8,
    num_experts=32,
    moe_ffn_hidden_size=128,
    disable_bias_linear=True,
)
STACK = "layers.0.mlp.experts.gate_up.weight"


def written(folder: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint in which each stack of experts is one rectangle, as a run on one rank writes it."""
    description = Description(EXPERTS, 64, 8)
    torch.manual_seed(1)
    weights = {name: torch.randn(sharding.shape) for name, sharding in description.shardings().items()}
    lazy = {name: LazyTensor(tuple(each.shape), each.dtype, each.clone) for name, each in weights.items()}
    native.write(folder, Model(description, lazy))
    return weights


def test_an_expert_of_a_stack_is_read_by_itself_and_the_rest_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = written(tmp_path / "a")
    assert weights[STACK].nbytes >= 2**20
    parts, verified = list[int](), list[int]()
    part, verify = OpenedFile.part, OpenedFile.verify

    def spy_on_part(file: OpenedFile, offset: int, length: int) -> bytearray:
        parts.append(length)
        return part(file, offset, length)

    def spy_on_verify(file: OpenedFile, offset: int, length: int) -> None:
        verified.append(length)
        verify(file, offset, length)

    monkeypatch.setattr(OpenedFile, "part", spy_on_part)
    monkeypatch.setattr(OpenedFile, "verify", spy_on_verify)
    tensor = native.read(tmp_path / "a").tensors[STACK]
    for expert in (3, 0, 31):
        assert torch.equal(tensor.rows(expert, expert + 1), weights[STACK][expert : expert + 1])
    assert torch.equal(tensor.rows(5, 7), weights[STACK][5:7])
    assert len(verified) == 1
    assert max(parts) == 2 * weights[STACK][0].nbytes  # and not the stack
    assert torch.equal(tensor.read(), weights[STACK])


def test_a_changed_byte_of_another_expert_is_found(tmp_path: Path) -> None:
    weights = written(tmp_path / "a")
    (file,) = (tmp_path / "a").rglob("__0_0.distcp")
    data = bytearray(file.read_bytes())
    place = data.find(weights[STACK][20].numpy().tobytes())
    data[place + 5] ^= 1
    file.write_bytes(data)
    tensor = native.read(tmp_path / "a").tensors[STACK]
    with pytest.raises(DamagedError, match="does not hold what was written"):
        tensor.rows(3, 4)
