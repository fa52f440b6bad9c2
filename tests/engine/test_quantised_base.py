"""A quantised base: its codes are those of the whole tensor in every layout; memory, loading, checkpoints, refusals."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of
from engines import world_size_of
from held_bytes import bytes_held
from jobs import call_main, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from saved_runs import read_whole
from sweeps import further, some_of
from test_bad_input import assert_told
from torch._subclasses.fake_tensor import FakeTensorMode

from megatronish.checkpoint.folder import read_state
from megatronish.commands.convert import main as convert
from megatronish.config.config import Config
from megatronish.config.read import read_config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.engine.build import build_engine, place_on
from megatronish.estimate.costs.memory import expected_memory
from megatronish.estimate.costs.parameters import quantised as quantised_cost
from megatronish.formats.load_sharded import load_weights, quantised
from megatronish.formats.weights import LazyTensor
from megatronish.launch.place import Place
from megatronish.layers.quantised import QuantisedWeight
from megatronish.model.quantised import quantised_weights
from megatronish.ops.nf4 import dequantise, dequantise_scales, quantise, quantise_scales
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.sharding import Piece, fill_initial
from megatronish.train.base_model import draw_base
from megatronish.train.checkpoint_state import base_tensors_of
from megatronish.train.start import start_mesh

SIZES = "--hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 256"
GATED = "--swiglu --disable-bias-linear --normalization RMSNorm --num-query-groups 2 --group-query-attention"
EXPERTS = f"{GATED} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"
QLORA = AdapterConfig(adapter_type="lora", lora_rank=2, quantize_base="nf4")
INT8 = replace(QLORA, quantize_base="int8")
ALONE = Axis("alone")


def config_of(flags: str, adapter: AdapterConfig = QLORA) -> Config:
    config, _ = read_config(tiny(Path("never-written"), f"{SIZES} {flags}"))
    return replace(config, adapter=adapter)


def whole_weight(held: QuantisedWeight, name: str) -> torch.Tensor:
    """The weight itself, all of it, as `draw_base` draws it."""
    values = torch.empty(held.dense.shape)
    fill_initial(values, held.dense, (0,) * values.dim(), names=(1234, "init", name))
    return values


def packed(held: QuantisedWeight, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored form and scales of the whole weight; of experts, stacks of them."""
    if held.num_experts is None:
        return held.form.pack(whole)
    pairs = [held.form.pack(expert.flatten(0, -2)) for expert in whole]
    stored = torch.stack([stored for stored, _ in pairs])
    return stored.view(held.stored_shape(held.dense.shape)), torch.stack([scales for _, scales in pairs])


def reads_as_whole(held: QuantisedWeight, local: torch.Tensor, whole: torch.Tensor, axes: dict[str, Axis]) -> bool:
    """Whether the local weight, dequantised, is this rank's part of the whole one after quantisation."""
    alone = QuantisedWeight(held.form, held.dense, rows=ALONE, columns=ALONE, num_local=held.num_experts)
    stored, scales = packed(held, whole)
    if alone.scales is not None:
        alone.scales.data = scales
    is_stack = held.num_experts is not None
    of_whole = (
        torch.stack([alone.matrix(stored[e].flatten(0, -2), torch.float32, e) for e in range(len(stored))])
        if is_stack
        else alone.matrix(stored, torch.float32)
    ).view(held.dense.shape)
    assert (of_whole - whole).std() < 0.12 * whole.std()
    mine = (
        torch.stack([held.matrix(local[e].flatten(0, -2), torch.float32, e) for e in range(len(local))])
        if is_stack
        else held.matrix(local, torch.float32)
    ).view(*local.shape[:-1], -1)
    return all(
        torch.equal(piece.view(mine), Piece((), piece.global_offset, piece.sizes).view(of_whole))
        for piece in held.dense.pieces(axes)
    )


def compare(place: Place, flags: str, adapters: Sequence[AdapterConfig]) -> list[int]:
    """Numbers of weights that were compared, bit for bit, with the quantisation of the whole ones."""
    mesh = start_mesh(config_of(flags), place)
    return [_compare(mesh, config_of(flags, adapter)) for adapter in adapters]


def _compare(mesh: Mesh, config: Config) -> int:
    engine = build_engine(config, mesh, vocab_size=101)
    draw_base(engine, seed=1234)
    tensors, number = base_tensors_of(engine), 0
    for name, name_of_scales, held in quantised_weights(engine.stage.model):
        whole = whole_weight(held, name)
        for key, expected in zip((name, name_of_scales), packed(held, whole), strict=True):
            if f"model.{key}" in tensors:  # ZeRO may have given all of it to others
                for piece in tensors[f"model.{key}"].pieces:
                    mine = piece.view(tensors[f"model.{key}"].local)
                    assert torch.equal(mine, Piece((), piece.global_offset, piece.sizes).view(expected)), key
        number += 1
        if config.parallel.zero < 3:
            local = engine.stage.model.get_parameter(name)
            assert reads_as_whole(held, local, whole, dict(mesh.domains[held.dense.domain].model)), name
    return number


@pytest.mark.parametrize(
    "flags",
    [
        further(""),
        further(f"{GATED} --tp 2 --dp 2 --zero-stage 2"),
        f"{GATED} --tp 2 --dp 2 --zero-stage 3",
        "--tp 2 --dp 2 --zero-stage 1",
        f"{EXPERTS} --tp 2 --ep 2 --etp 2 --dp 2",
        f"{EXPERTS} --tp 2 --ep 2 --etp 1 --zero-stage 3",
    ],
)
def test_codes_and_scales_are_those_of_the_whole_tensor_in_every_layout(flags: str) -> None:
    adapters = [QLORA, INT8]
    if not flags.startswith(EXPERTS) and "--zero-stage 1" not in flags:
        adapters.append(replace(QLORA, double_quantization=False))
    for numbers in run_ranks(world_size_of(flags), compare, flags, adapters):
        assert numbers == [2 * 4] * len(adapters)


BYTES = "--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --num-layers 1 --bf16"


def bytes_of(place: Place, flags: str, adapter: AdapterConfig) -> tuple[float, float]:
    """Bytes a frozen weight of a linear layer, and bytes of all parameters, in the storages that hold them."""
    config = config_of(flags, adapter)
    engine = build_engine(config, start_mesh(config, place), vocab_size=101)
    names = [
        name
        for name in dict(engine.stage.model.named_parameters())
        if ".adapters." not in name and name.startswith("layers.") and "norm" not in name and ".bias" not in name
    ]
    sizes = {"attention.qkv": 3 * 512 * 512, "attention.out": 512 * 512, "mlp.fc1": 1024 * 512, "mlp.fc2": 1024 * 512}
    parameters = dict(engine.stage.model.named_parameters())
    assert len(names) == len(sizes) * (1 if adapter.quantize_base is None or not adapter.double_quantization else 2)
    of_linears = sum(parameters[name].numel() * parameters[name].element_size() for name in names)
    del parameters
    return of_linears / sum(sizes.values()), bytes_held()


@cache
def bytes_alone(adapter: AdapterConfig) -> tuple[float, float]:
    """The same in one process."""
    (found,) = run_ranks(1, bytes_of, BYTES, adapter)
    return found


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (QLORA, 0.516),
        (replace(QLORA, double_quantization=False), 0.5625),
        (INT8, 1.0068),  # 4 bytes for each row of 512 or 1,024
        further((replace(QLORA, quantize_base=None), 2.0)),
    ],
)
def test_a_frozen_weight_takes_the_bytes_of_its_form_and_the_forecast_knows_it(
    adapter: AdapterConfig, expected: float
) -> None:
    each, total = bytes_alone(adapter)
    assert each == pytest.approx(expected, abs=3e-4)
    _, without = bytes_alone(replace(QLORA, quantize_base=None))
    assert without - total == pytest.approx((2.0 - expected) * 2_097_152, rel=5e-3, abs=5e4)
    config = config_of(BYTES, adapter)
    if adapter.quantize_base is not None:
        assert quantised_cost(config.model, [0], adapter).bytes_per_parameter == pytest.approx(each, abs=1e-9)
    stage = _stage(config)
    (now,) = expected_memory(config, stage, vocab_size=101)
    (before,) = expected_memory(replace(config, adapter=replace(adapter, quantize_base=None)), stage, vocab_size=101)
    assert before.parameters - now.parameters == pytest.approx((2.0 - each) * 2_097_152, abs=2)


def _stage(config: Config) -> Any:
    from megatronish.parallel.stages import Stages

    return Stages.of(config.parallel, config.model, vocab_size=101, seq_length=16).loads(1)


def held_while_read(place: Place) -> tuple[int, int]:
    """Most tensors of the base that were alive at once while it was read, and how many there are."""
    config = config_of("--num-layers 3")
    engine = build_engine(config, start_mesh(config, place), vocab_size=101)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def lazy(held: QuantisedWeight) -> LazyTensor:
        def read() -> torch.Tensor:
            nonlocal most
            values = torch.ones(held.dense.shape)
            alive.add(values)
            most = max(most, len(alive))
            return values

        return LazyTensor(held.dense.shape, torch.float32, read)

    weights = list(quantised_weights(engine.stage.model))
    tensors = quantised({name: lazy(held) for name, _, held in weights}, weights, device=torch.device("cpu"))
    into = {name: each for name, each in base_tensors_of(engine).items() if name.removeprefix("model.") in tensors}
    load_weights(tensors, into, source=Path("here"))
    return most, len(weights)


def test_a_base_is_quantised_as_it_is_read() -> None:
    ((most, number),) = run_ranks(1, held_while_read)
    assert most <= 2 < number


# --- runs ------------------------------------------------------------------------------------------------------------

LORA = f"{SIZES} --adapter-type lora --lora-rank 2 --lora-dropout 0.1 --train-iters 4 --save-interval 2"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("base") / "run"
    train_on_ranks(tiny(run_dir, f"{SIZES} --train-iters 1"))
    return run_dir


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, base: Path) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("tuned") / "run"
    return run_dir, train_on_ranks(tiny(run_dir, f"{LORA} --quantize-base nf4 --load {base}"))


def test_a_quantised_run_goes_on_in_another_layout(tmp_path: Path, base: Path, tuned: tuple[Path, str]) -> None:
    flags, run_dir = f"{LORA} --quantize-base nf4 --load {base}", tmp_path / "run"
    train_on_ranks(tiny(run_dir, f"{flags} --exit-interval 2"))
    train_on_ranks(tiny(run_dir, f"{flags} --tp 2 --dp 2 --zero-stage 3"), world_size=4)
    for step, expected in steps_of(tuned[0]).items():
        assert steps_of(run_dir)[step] == pytest.approx(expected, rel=1e-5), step


OFFLOAD = "--zero-stage 3 --dp 2 --optimizer-cpu-offload --param-cpu-offload"
FP16 = "--fp16 --initial-loss-scale 1024"  # without overflows


@pytest.mark.parametrize(
    ("precision", "tolerance"), some_of([("", 1e-5), (FP16, 2e-3)], [("", 1e-5)]), ids=["fp32", "fp16"]
)
def test_a_quantised_run_waits_in_the_memory_of_the_cpu(
    tmp_path: Path, base: Path, tuned: tuple[Path, str], precision: str, tolerance: float
) -> None:
    flags, alone = f"{LORA} --quantize-base nf4 --load {base} {precision}", tuned[0]
    if precision:
        alone = tmp_path / "one"
        train_on_ranks(tiny(alone, flags))
    train_on_ranks(tiny(tmp_path / "two", f"{flags} {OFFLOAD}"), world_size=2)
    assert len(steps_of(alone)) == 4
    for step, expected in steps_of(alone).items():
        assert steps_of(tmp_path / "two")[step] == pytest.approx(expected, rel=tolerance), step


def test_its_base_is_that_of_an_unquantised_run_and_its_losses_are_not(
    tmp_path: Path, base: Path, tuned: tuple[Path, str]
) -> None:
    train_on_ranks(tiny(tmp_path / "plain", f"{LORA} --load {base}"))
    checkpoints = [run / "checkpoints" / "step_00000004" for run in (tuned[0], tmp_path / "plain")]
    assert read_state(checkpoints[0])["base"]["identity"] == read_state(checkpoints[1])["base"]["identity"]
    assert read_whole(checkpoints[0]).keys() == read_whole(checkpoints[1]).keys()
    found, plain = (steps_of(run) for run in (tuned[0], tmp_path / "plain"))
    assert all(found[step][0] != plain[step][0] for step in found)
    seen = call_main(tiny(tuned[0], f"{LORA} --load {base} --train-iters 5"))
    assert_told(seen, "adapter.quantize_base was nf4 and is None")


def test_its_adapter_is_exported_and_merged_into_the_unquantised_base(
    tmp_path: Path, base: Path, tuned: tuple[Path, str]
) -> None:
    run, merged, peft = tuned[0], tmp_path / "merged", tmp_path / "peft"
    ours = "--from megatronish --to megatronish"
    assert convert(f"--from megatronish --to peft --load {run} --save {peft}".split()) == 0
    assert (peft / "adapter_model.safetensors").exists()
    assert convert(f"{ours} --load {base} --adapter {run} --save {merged}".split()) == 0
    before, after = (read_whole(next(folder.glob("**/step_*"))) for folder in (base, merged))
    name = "model.layers.0.mlp.fc2.weight"
    learned, part = read_whole(run / "checkpoints" / "step_00000004"), "model.layers.0.mlp.fc2.adapters.default.down"
    update = 32.0 / 2 * learned[f"{part}.B"] @ learned[f"{part}.A"]
    assert update.any() and torch.allclose(after[name], before[name] + update, rtol=1e-6, atol=1e-7)
    # In generation, too, the adapter is applied to the base as it is.
    tokens = torch.arange(12).view(1, 12)
    applied, expected = logits_of(base, tokens, tp=2, adapter=run), logits_of(merged, tokens, tp=1)
    assert torch.allclose(applied, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--quantize-base nf4", ("trains all weights", "--adapter-type lora")),
        (
            "--adapter-type lora --load BASE --no-double-quantization",
            ("double_quantization=false", "--quantize-base nf4"),
        ),
        (
            "--adapter-type lora --load BASE --quantize-base int8 --no-double-quantization",
            ("double_quantization=false belongs to a base in NF4", "--no-double-quantization out"),
        ),
        (
            "--adapter-type lora --load BASE --quantize-base nf4 --tp 4",
            ("whole blocks of 64 inputs on each of 4 ranks", "has 128", "--tensor-model-parallel-size 2"),
        ),
        (
            "--adapter-type lora --load BASE --quantize-base nf4 --hidden-size 96",
            ("whole blocks of 64 inputs", "has 96; leave --quantize-base out"),
        ),
        ("--adapter-type lora --load BASE --quantize-base int3", ("int3", "nf4")),
    ],
)
def test_what_cannot_be_quantised_is_one_sentence(
    tmp_path: Path, base: Path, flags: str, words: tuple[str, ...]
) -> None:
    assert_told(call_main(tiny(tmp_path / "run", f"{SIZES} {flags}".replace("BASE", str(base)))), *words)


def test_a_model_of_the_meta_device_is_placed_on_tensors_without_memory_too() -> None:
    """As a dry run does; there parameters cannot be moved, only replaced."""
    with FakeTensorMode():
        model = torch.nn.Linear(4, 2, device="meta")
        model.bias.requires_grad_(False)
        kept = weakref.ref(model.weight)
        place_on(model, torch.device("cpu"))
        assert kept() is not model.weight
        found = [(each.device.type, tuple(each.shape), each.requires_grad) for each in model.parameters()]
    assert found == [("cpu", (2, 4), True), ("cpu", (2,), False)]


def test_tables_of_nf4_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph cannot hold a copy from memory that is not pinned."""
    copies: list[object] = []
    codes, absmax = quantise(torch.randn(2, 64))
    scales = quantise_scales(absmax.flatten())
    for _ in range(2):
        dequantise_scales(scales.codes, scales.scales, scales.offset)
        dequantise(codes, absmax, torch.empty(2, 64))
        monkeypatch.setattr(torch.Tensor, "to", lambda *args, **_: copies.append(args))
    assert copies == []
