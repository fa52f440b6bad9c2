"""Tests of models with experts from and to Hugging Face: every bit comes back, every layout loads the same model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf, to_ours
from engines import world_size_of
from expert_models import CONFIGS, E, F, packed, tensors_of_family, write_family
from jobs import call_main, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from sweeps import some_of
from test_bad_input import assert_told
from torch import Tensor

from megatronish.checkpoint.storage import CheckpointReader
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.read import read_config
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.engine.build import build_engine
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.config import hf_config_of
from megatronish.formats.load_sharded import load_weights, open_hf
from megatronish.formats.safetensors import FILE
from megatronish.formats.start import read_start
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import LazyTensor, from_ours
from megatronish.formats.weights import to_ours as rename
from megatronish.launch.place import Place
from megatronish.parallel.sharding import Piece
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.resume import begin
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

FAMILIES = tuple(CONFIGS)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.long
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_keeps_every_bit_and_publishes_single_experts(tmp_path: Path, name: str, is_packed: bool) -> None:
    theirs = write_family(tmp_path / "theirs", name, is_packed=is_packed)
    report = to_ours(theirs, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert report.unmatched_in == report.unmatched_out == ()
    assert_same(load_file(tmp_path / "back" / FILE), tensors_of_family(name))
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: value for key, value in back.items() if key != "torch_dtype"} == CONFIGS[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_written_anew_means_the_same(tmp_path: Path, name: str) -> None:
    before = hf.describe(write_family(tmp_path / "theirs", name))
    written = hf_config_of(before.model, vocab_size=101, seq_length=16, eos_token_id=100)
    # A Kimi K2 is a DeepSeek-V3 under another name, which it keeps when it comes back, and has from nowhere else.
    assert written["model_type"] == {"kimi_k2": "deepseek_v3"}.get(name, name)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.json").write_text(json.dumps(written))
    assert hf.describe(tmp_path / "again").model == before.model


def loaded(place: Place, folder: Path, flags: str) -> dict[str, float]:
    """Compare the masters of this rank with the folder, bit for bit; the metrics of a step."""
    argv = tiny(Path("never-written"), flags)
    drops = {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--ffn-hidden-size",
        "--vocab-size",
        "--seq-length",
    }
    kept = [word for pair in zip(argv[::2], argv[1::2], strict=False) if pair[0] not in drops for word in pair]
    config, _ = read_config([*kept, "--load-hf", str(folder)], read_start=read_start)
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size)
    begin(job, engine, lambda _line: None)
    expected = open_hf(folder).tensors
    for name, mine in tensors_of(engine, with_optimizer=False).items():
        whole = expected[name.removeprefix("model.")].read()
        for piece in mine.pieces:
            part = Piece((), piece.global_offset, piece.sizes).view(whole)
            assert torch.equal(piece.view(mine.local), part), name
    batches = job.batches_of(job.datasets.train)
    result = engine.step(batches(0, 4), num_steps_done=0, learning_rate=1e-2, weight_decay=0.1)
    return {**result.metrics, "grad_norm": result.grad_norm}


LAYOUTS = [
    "--dp 2 --ep 2",
    "--dp 4 --ep 4 --zero-stage 1",
    "--pp 2 --tp 2 --etp 2 --sequence-parallel",
    "--dp 2 --tp 2 --ep 2 --etp 2 --zero-stage 3",
    "--cp 2 --tp 2 --ep 4 --etp 1",
]


@pytest.mark.parametrize("name", some_of(FAMILIES, ["qwen2_moe"]))
def test_every_layout_loads_and_trains_the_same_model(tmp_path: Path, name: str) -> None:
    folder = write_family(tmp_path / "theirs", name)
    common = "--mock-data --optimizer sgd"
    (serial,) = run_ranks(1, loaded, folder, common)
    for layout in LAYOUTS:
        for found in run_ranks(world_size_of(layout), loaded, folder, f"{common} {layout}"):
            assert found == pytest.approx(serial, rel=1e-5), layout


class RecordedRows:
    """Stack [E, 2, F, D] of which rows are taken one by one; it is an error to read it whole."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def lazy(self) -> LazyTensor:
        return LazyTensor((E, 2, F, 3), torch.float32, self.whole, self.part)

    def whole(self) -> Tensor:
        raise AssertionError("the stack is read whole")

    def part(self, start: int, stop: int) -> Tensor:
        self.seen.append((start, stop))
        return torch.arange(start, stop).view(-1, 1, 1, 1).expand(-1, 2, F, 3).float()


def test_a_rank_reads_only_the_experts_that_it_holds(tmp_path: Path) -> None:
    rows, local = RecordedRows(), torch.zeros(2, 2, F // 2, 3)
    piece = Piece((2, 0, F // 2, 0), (0, 0, 0, 0), (2, 2, F // 2, 3))
    target = GlobalTensor((E, 2, F, 3), (piece,), local, writes=True)
    load_weights({"stack": rows.lazy()}, {"model.stack": target}, source=tmp_path)
    assert rows.seen == [(2, 3), (3, 4)]
    assert local[0].eq(2).all() and local[1].eq(3).all()


def test_a_conversion_takes_one_expert_at_a_time(tmp_path: Path) -> None:
    rows = RecordedRows()
    rules = [
        TensorRule("stack", (f"{e}.gate", f"{e}.up"), lambda parts: torch.stack(tuple(parts)), lambda t: t.unbind(), e)
        for e in range(E)
    ]
    single = from_ours({"stack": rows.lazy()}, rules).tensors
    read = {name: tensor.read() for name, tensor in single.items()}
    assert rows.seen == [(e, e + 1) for e in range(E)]  # gate and up-projection of an expert are read together
    assert all(read[f"{e}.up"].eq(e).all() and read[f"{e}.up"].shape == (F, 3) for e in range(E))
    stacked = rename(single, rules).tensors["stack"]
    assert stacked.shape == (E, 2, F, 3)
    assert stacked.rows(1, 3).eq(RecordedRows().part(1, 3)).all()


def test_every_expert_is_stored_by_itself(tmp_path: Path) -> None:
    """So a reader of one expert verifies and reads no other: in what is converted, and in what runs save."""
    to_ours(write_family(tmp_path / "theirs", "mixtral"), tmp_path / "ours")
    flags = f"--num-experts {E} --train-iters 1 --dp 2 --ep 2 --zero-stage 1"
    train_on_ranks(tiny(tmp_path / "run", flags), world_size=2)
    for folder in (tmp_path / "ours" / "step_00000000", tmp_path / "run" / "checkpoints" / "step_00000001"):
        metadata: Any = CheckpointReader(folder).metadata
        for kind in ("gate_up", "down"):
            chunks = metadata.state_dict_metadata[f"model.layers.1.mlp.experts.{kind}.weight"].chunks
            assert all(chunk.sizes[0] == 1 for chunk in chunks)
            assert {chunk.offsets[0] for chunk in chunks} == set(range(E))


# Refusals


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 adds noise to the router in training"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_local_experts=4"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=true is not supported in this family"),
        ("qwen2_moe", {"decoder_sparse_step": 3}, "decoder_sparse_step=3 leaves no layer with experts; take the dense"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, r"mlp_only_layers=\[0, 1\] leaves no layer with experts"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers=.* must be a list of layers"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=true is not supported together with a norm"),
        ("olmoe", {"head_dim": 8}, "head_dim=8 must be hidden_size=24 over num_attention_heads in this family"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv=0 makes all queries, keys and values zero"),
        ("olmoe", {"sliding_window": 4}, "sliding_window=4 is not supported in this family"),
    ],
)
def test_what_a_family_with_experts_does_not_have_here_is_refused(
    tmp_path: Path, name: str, config: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        hf.read(write_family(tmp_path / "theirs", name, **config))


def test_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    folder, tensors = write_family(tmp_path / "theirs", "mixtral"), tensors_of_family("mixtral")
    both = packed("mixtral", tensors) | tensors
    save_file({name: tensor.clone() for name, tensor in both.items()}, folder / FILE)
    with pytest.raises(
        UserError, match=r"is model\.layers.* in another form, and both are there; remove the wrong one"
    ):
        hf.read(folder)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    folder, tensors = write_family(tmp_path / "theirs", "olmoe"), tensors_of_family("olmoe")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, folder / FILE)
    with pytest.raises(UserError, match=r"lacks model.layers.1.mlp.experts.2.up_proj.weight, which its model has"):
        to_ours(folder, tmp_path / "ours")


MIXTURE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 8}
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
LLAMA = SHAPE | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
BLOOM = SHAPE | {"position_embedding_type": "alibi", "embed_layernorm": True, "openai_gelu": True}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (SHAPE | MIXTURE, "express this model: gpt2, llama, mistral, "),
        (BLOOM | MIXTURE, " not num_experts=4; mixtral not position_embedding_type=alibi; "),
        (LLAMA | MIXTURE | {"rotary_interleaved": True}, "; mixtral not rotary_interleaved; "),
        (LLAMA | {"qk_layernorm": True, "qk_layernorm_across_heads": True}, "; mixtral, qwen2_moe, qwen3_moe, olmoe, "),
        (LLAMA | {"clip_qkv": 2.0}, "llama not clip_qkv=2.0"),
        (BLOOM | {"block": "a plug-in's"}, "bloom not block=a plug-in's"),
        (SHAPE | {"block": "a plug-in's"}, "gpt2 not block=a plug-in's"),
        (LLAMA | MIXTURE | {"moe_router_pre_softmax": True}, "mixtral not moe_router_pre_softmax without"),
        (LLAMA | MIXTURE | {"moe_layer_freq": "2"}, "mixtral not moe_layer_freq=2"),
        (LLAMA | MIXTURE | {"moe_shared_expert_intermediate_size": 8}, "qwen2_moe not a shared expert without moe_sh"),
    ],
    ids=str,
)
def test_a_family_refuses_the_experts_that_it_does_not_have(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match="no supported family of Hugging Face can express this model") as error:
        hf_config_of(ModelConfig(**fields), vocab_size=100, seq_length=64)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_expert_capacity_factor": 1.5},
    ],
    ids=str,
)
def test_a_choice_of_experts_that_no_family_has_is_named_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"no family of Hugging Face that is known here has {next(iter(fields))}"):
        hf_config_of(ModelConfig(**LLAMA | MIXTURE | fields), vocab_size=100, seq_length=64)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--qk-layernorm-across-heads", "qk_layernorm_across_heads says how --qk-layernorm normalises; add"),
        ("--qk-layernorm-across-heads --qk-layernorm", "with normalization=LayerNorm is not supported; add"),
    ],
)
def test_a_norm_over_all_heads_that_is_not_there_is_refused(tmp_path: Path, flags: str, told: str) -> None:
    assert_told(call_main(tiny(tmp_path / "run", flags)), told)


def test_a_loss_of_the_step_before_starts_without_counts(tmp_path: Path) -> None:
    """No family has the counts of --moe-router-load-balancing-type global_aux_loss, and no run takes them over."""
    folder = write_family(tmp_path / "theirs", "mixtral")
    to_ours(folder, tmp_path / "ours")
    loss = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 --optimizer sgd --mock-data"
    steps = f"{loss} --train-iters 2 --lr 1e-2 --micro-batch-size 1 --global-batch-size 4 --device cpu --eval-iters 0"
    for name, source in (("hf", f"--load-hf {folder}"), ("own", f"--load {tmp_path / 'ours'} --use-checkpoint-args")):
        train_on_ranks([*f"{steps} {source} --run-dir {tmp_path / name}".split()])
    assert steps_of(tmp_path / "hf") == steps_of(tmp_path / "own")
    report = to_hf(tmp_path / "hf", tmp_path / "back")
    assert report.left_out["model.layers.0.mlp.router.load"].startswith("choices of experts in the last step")
    assert report.unmatched_in == ()
