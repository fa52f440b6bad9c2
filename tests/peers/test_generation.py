"""Tests of greedy generation against transformers, with converted models. Run by `make test-peers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_ours
from ranks import run_ranks

from megatronish.core.layout import ExpertLayout, Layout
from megatronish.inference.generate import Sampling, generate
from megatronish.inference.load import load_model
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
EOD = 2


def written_by(place: Place, load: Path, layout: Layout, prompts: list[list[int]], lengths: int) -> list[list[int]]:
    """What this rank saw to follow each prompt."""
    experts = ExpertLayout(1, layout.tp)
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous, experts=experts)
    trained = load_model(load, mesh=mesh)
    texts = [list[int]() for _ in prompts]
    seq_length = trained.description.seq_length
    greedy = Sampling(temperature=0.0)
    for number, token in generate(
        trained.model, prompts, num_tokens=lengths, seq_length=seq_length, stops={EOD}, sampling=greedy, mesh=mesh
    ):
        if token is not None:
            texts[number].append(token)
    return texts


def written_there(model: Any, prompt: list[int], length: int) -> list[int]:
    """What transformers writes after a prompt, without the end of the document."""
    tokens = torch.tensor([prompt])
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": EOD, "pad_token_id": EOD}
    # Without a mask it would take the padding token in a prompt for padding.
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()
    return found[:-1] if found[-1] == EOD else found


@pytest.mark.parametrize("name", peer.configs())
def test_the_likeliest_text_is_the_same(tmp_path: Path, name: str) -> None:
    model = peer.random_model(name)
    length = 10 if name.startswith("gpt2") else 30
    prompts = [row[:size] for row, size in zip(peer.tokens().repeat(2, 1).tolist(), (1, 6, 5, 4), strict=True)]
    expected = [written_there(model, prompt, length) for prompt in prompts]
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    for layout in (Layout(), Layout(tp=2)) if name in ("gpt2", "llama") else (Layout(),):
        assert run_ranks(layout.world_size, written_by, tmp_path / "ours", layout, prompts, length)[0] == expected


def test_texts_that_cross_the_original_context_of_longrope_are_the_same(tmp_path: Path) -> None:
    """Of 8 tokens: prompts that end before it, at it, and beyond it; keys and values are then computed once more."""
    model = peer.random_model("phi3-longrope")
    assert model.config.original_max_position_embeddings == 8
    prompts = [peer.tokens()[0, :size].tolist() for size in (7, 8, 9, 12)]
    expected = [written_there(model, prompt, 12) for prompt in prompts]
    model.save_pretrained(tmp_path / "theirs")
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    assert all(len(text) > 2 for text in expected)
    for layout in (Layout(), Layout(tp=2)):
        assert run_ranks(layout.world_size, written_by, tmp_path / "ours", layout, prompts, 12)[0] == expected
