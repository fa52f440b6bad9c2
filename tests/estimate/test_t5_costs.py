"""Tests of what a T5 costs: FLOPs as torch counts them in a step, and a plan that can be read again and built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from theorem import batches_of, build, sides_of
from theorem_cases import choices, problem_of, spread_of
from torch.utils.flop_counter import FlopCounterMode

from megatronish.commands.plan import main
from megatronish.config.check import refuse_unrunnable_plans
from megatronish.config.read import read_config
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare
from megatronish.estimate.costs.candidate import UNASKED
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.specs.flops import forward_flops

VOCABULARY = 132


def test_flops_of_a_step_are_those_that_torch_counts() -> None:
    chosen = {feature: values[0] for feature, values in choices(Layout()).items()}
    chosen |= {"family": "t5", "eod_mask_loss": False, "num_microbatches": 1, "decoupled": False}
    problem, spread = problem_of(Layout(), chosen), spread_of(Layout(), chosen)
    encoder, decoder = sides_of(problem.seq_length)
    model = replace(problem.model, encoder_seq_length=encoder, decoder_seq_length=decoder)
    engine = build(Mesh.of(spread.parallel, Place()), replace(problem, model=model), spread)
    batches = batches_of(problem, BatchShare(0, 1, spread.micro_batch_size), 0)
    with FlopCounterMode(display=False) as counter:
        engine.step(batches, num_steps_done=0, learning_rate=0.1, weight_decay=0.0)
    counted = counter.get_flop_counts()["Global"]
    num_tokens = sum(batch.tokens.numel() for batch in batches)
    expected = forward_flops(model, vocab_size=VOCABULARY, seq_length=problem.seq_length, attention="full")
    # Gradients of weights are added in place, which torch does not count: two products of a linear layer for three.
    assert counted[torch.ops.aten.mm] == round(2 * num_tokens * (expected.linear + expected.logits))
    assert counted[torch.ops.aten.bmm] == round(3 * num_tokens * (expected.scores + expected.values))


CONFIG = """
[model]
model_type = "t5"
encoder_num_layers = 24
decoder_num_layers = 24
hidden_size = 1024
num_attention_heads = 16
encoder_seq_length = 512
decoder_seq_length = 128
position_embedding_type = "relative"

[training]
micro_batch_size = 4
global_batch_size = 512
bf16 = true
train_iters = 10

[optimizer]
lr = 1e-4

[data]
mock_data = true
vocab_extra_ids = 100
"""


@pytest.mark.long
def test_a_plan_of_a_t5_is_a_config_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, planned = tmp_path / "t5.toml", tmp_path / "plan.toml"
    config.write_text(CONFIG)
    words = ["--config", str(config), "--gpus", "16", "--network", "50GB/s", "--write", str(planned), "--explain", "2"]
    assert main(words, program="megatronish plan") == 0
    assert "a step: 512 samples of 640" in capsys.readouterr().out
    written = read_config(["--config", str(planned)], world_size=16, unasked=UNASKED).config
    refuse_unrunnable_plans(written)
    assert written.layout.world_size == 16 and written.model.has_encoder
