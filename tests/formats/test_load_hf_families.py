"""Tests of runs from foreign models with parts of their own: twenty steps in a layout are those of one process.

Steps are those of SGD: Adam's would make rounding of gradients near zero as large as any other gradient. One process
takes each global batch as a single micro-batch, ranks take two where a pipeline needs them.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf
from jobs import MOCK, Seen, steps_of, train_on_ranks
from sweeps import some_of

from megatronish.config.sections.model import ModelConfig
from megatronish.formats import native
from megatronish.formats.hf.config import read_hf_config
from megatronish.formats.weights import Description, LazyTensor, Model

VOCABULARY, LENGTH = 29, 16
LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "rotary_base": 50.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LONGROPE = {"rope_scaling_type": "longrope", "rope_scaling_factor": 8.0, "rope_short_factor": (1.0, 1.5)}
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {"swiglu": False, "squared_relu": True},
    "hunyuan_v1_dense": {"qk_layernorm": True, "qk_layernorm_after_rope": True},
    "phi3": LONGROPE
    | {"rope_long_factor": (2.0, 4.0), "rope_original_max_positions": 8, "rotary_percent": 0.5, "kv_channels": 8}
    | {"hidden_size": 32},
    "apertus": {"swiglu": False, "xielu": True, "qk_layernorm": True},
    "baichuan": {"position_embedding_type": "alibi", "num_query_groups": 4, "group_query_attention": False},
}
LAYOUTS = [
    ("--tp 2 --sequence-parallel", 2),
    ("--dp 2 --zero-stage 3", 2),
    ("--tp 2 --pp 2 --zero-stage 1", 4),
    ("--cp 2 --zero-stage 2", 2),
]
CASES = [(name, *layout) for name in FAMILIES for layout in LAYOUTS]


def write_model(folder: Path, model: ModelConfig) -> None:
    """A Hugging Face folder with random weights."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    description = Description(model, vocab_size=VOCABULARY, seq_length=64)
    for name, sharding in description.shardings().items():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        tensor = torch.normal(mean, 0.2, sharding.shape, generator=generator)
        tensors[name] = LazyTensor(sharding.shape, torch.float32, tensor.clone)
    native.write(folder.with_name("ours"), Model(description, tensors))
    to_hf(folder.with_name("ours"), folder)


Serial = Callable[[str], tuple[Path, dict[int, Seen]]]


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Serial:
    """A family's model, and the steps of one process that starts from it: made once for all layouts."""

    @cache
    def made(name: str) -> tuple[Path, dict[int, Seen]]:
        folder = tmp_path_factory.mktemp(name)
        write_model(folder / "theirs", ModelConfig(**(LLAMA | FAMILIES[name])))
        return folder / "theirs", steps_from(folder / "theirs", folder / "run", "--micro-batch-size 4")

    return made


def steps_from(model: Path, run_dir: Path, flags: str, *, world_size: int = 1) -> dict[int, Seen]:
    """Twenty steps of a run that starts from a foreign model."""
    common = f"--load-hf {model} --run-dir {run_dir} --seq-length {LENGTH} --global-batch-size 4 --train-iters 20"
    common = f"{common} --optimizer sgd --lr 0.1 --eval-iters 0 --device cpu {MOCK}"
    train_on_ranks([*common.split(), *flags.split()], world_size=world_size)
    return steps_of(run_dir)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout", "world_size"),
    some_of(CASES, [case for number, case in enumerate(CASES) if number % 5 == 0 or case[::2] == ("baichuan", 4)]),
    ids=lambda value: str(value).replace(" ", ""),
)
def test_twenty_steps_from_a_foreign_model_are_those_of_one_process(
    tmp_path: Path, serial: Serial, name: str, layout: str, world_size: int
) -> None:
    model, expected = serial(name)
    assert read_hf_config(model).origin["model_type"] == name
    seen = steps_from(model, tmp_path / "run", f"--micro-batch-size 2 {layout}", world_size=world_size)
    assert len(expected) == 20
    for step, each in expected.items():
        assert seen[step] == pytest.approx(each, rel=1e-5), f"step {step}"
