"""Tests of what the ends of a BERT cost: FLOPs as torch counts them in a step, and times that the planner adds."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatronish.config.read import read_config
from megatronish.config.sections.model import ModelConfig
from megatronish.estimate.costs.candidate import UNASKED, without_layout
from megatronish.estimate.planner.device_speed import gradient_seconds, product_seconds
from megatronish.estimate.planner.devices import find_device
from megatronish.estimate.planner.layer_time import Passes
from megatronish.estimate.planner.named_layout import read_layout
from megatronish.estimate.planner.search import Search
from megatronish.estimate.planner.workload import Workload
from megatronish.model.batch import MicroBatch, SentencePairs
from megatronish.model.bert import Bert, BertLosses
from megatronish.model.gpt import Execution
from megatronish.specs.flops import forward_flops, model_flops_per_token

S, B, VOCABULARY = 16, 3, 64
MODEL = ModelConfig(
    model_type="bert",
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    make_vocab_size_divisible_by=64,
)
BASE = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --micro-batch-size 8 --mock-data"


@pytest.mark.parametrize("no_head", [False, True])
def test_flops_of_a_step_are_those_that_torch_counts(no_head: bool) -> None:
    model = replace(MODEL, bert_no_binary_head=no_head)
    bert = Bert(model, vocab_size=VOCABULARY, num_positions=S, execution=Execution(attention_backend="unfused"))
    for parameter in bert.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids, every = torch.randint(VOCABULARY, (B, S)), torch.ones(B, S, dtype=torch.bool)
    batch = MicroBatch(ids, ids, every, torch.arange(S).expand(B, S), torch.arange(B))
    pairs = SentencePairs(torch.zeros_like(ids), torch.tensor([True, False, True]), num_masked=B * S)
    with FlopCounterMode(display=False) as counter:
        losses = bert(None, batch.with_sentences(pairs), step=None)
        sum(each.sum() for each in (losses if isinstance(losses, BertLosses) else [losses])).backward()
    expected = model_flops_per_token(model, vocab_size=VOCABULARY, seq_length=S)
    assert counter.get_total_flops() == round(B * S * expected)
    dense = 2 * 32 * 32 + (0 if no_head else (2 * 32 * 32 + 2 * 32 * 2) / S)
    assert forward_flops(model, vocab_size=VOCABULARY, seq_length=S).logits == 2 * 32 * VOCABULARY + dense


def head_of(flags: str, layout: str) -> tuple[Search, Passes]:
    argv = [*BASE.split(), "--lr", "1", "--train-iters", "1", *flags.split()]
    config = read_config(argv, unasked=UNASKED, settle_layout=without_layout).config
    search = Search(config, Workload.of(config, 30522), find_device("a100-sxm"), 8)
    return search, search.clock.layers.head(read_layout(layout, gpus=8))


@pytest.mark.parametrize(("layout", "shared"), [("tp=4", 1), ("tp=4,sp", 4)])
def test_the_planner_knows_the_time_of_the_dense_layers(layout: str, shared: int) -> None:
    bert = "--model-type bert --objective masked_lm"
    (search, both), (_, masked), (_, gpt) = (
        head_of(flags, f"{layout},micro=8") for flags in (bert, f"{bert} --bert-no-binary-head", "")
    )
    machine, rows = search.clock.layers.machine, 8 * 512 // shared
    assert masked.forward.products - gpt.forward.products == pytest.approx(product_seconds(machine, rows, 768, 768))
    assert masked.weight.products - gpt.weight.products == pytest.approx(gradient_seconds(machine, rows, 768, 768))
    assert masked.backward.pointwise > gpt.backward.pointwise
    of_pairs = [product_seconds(machine, 8, 768, columns) for columns in (768, 2)]
    assert both.forward.products - masked.forward.products == pytest.approx(sum(of_pairs))
    lora = f"{bert} --load never-read --adapter-type lora"
    assert head_of(lora, f"{layout},micro=8")[1].weight.products == 0
