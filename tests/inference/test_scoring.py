"""Tests of log-likelihoods and of texts until stop strings, in layouts with copies of the model too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import write_chat_model
from ranks import run_ranks
from sweeps import some_of

from megatronish.commands.evaluate import without_network
from megatronish.core.errors import UserError
from megatronish.core.layout import Layout
from megatronish.inference.generate import Sampling
from megatronish.inference.load import find_trained, load_found, load_model
from megatronish.inference.scoring import Likelihood, Scoring, TokenPair, Writing
from megatronish.inference.session import Session
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT
from megatronish.parallel.mesh import Mesh

SEEN = 12
NUMBERS = torch.Generator().manual_seed(2)
PAIRS = [
    TokenPair(*(tuple(torch.randint(260, (size,), generator=NUMBERS).tolist()) for size in sizes))
    for sizes in ((1, 1), (3, 4), (9, 2), (2, 9), (11, 5), (4, 12), (6, 1))
]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("scored") / "base")


def spelled(tokens: Any) -> str:
    return "".join(f"{token:03d}." for token in tokens)


def in_session(place: Place, model: Path, layout: Layout, orders: list[Any]) -> list[Any]:
    """Results of orders on the main rank."""
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous)
    session = Session(load_found(find_trained(model), mesh, dtype=torch.float32), mesh, SEEN, 2, spelled)
    if not mesh.is_main:
        session.follow()
        return []
    found = [session.do(order) for order in orders]
    session.close()
    return found


@torch.no_grad()
def by_hand(model: GPT, pair: TokenPair) -> Likelihood:
    """Likelihood of a pair, from the logits of the whole text."""
    tokens = [*pair.context, *pair.continuation][-(SEEN + 1) :]
    ids = torch.tensor([tokens[:-1]])
    places = torch.arange(ids.shape[1])[None]
    batch = MicroBatch(ids, ids, torch.ones_like(ids, dtype=torch.bool), places, torch.zeros(1).long())
    logits = model.logits(model.hidden(None, batch, step=None))[:, 0, : model.vocab_size].double().log_softmax(-1)
    count = min(len(pair.continuation), SEEN)
    labels = torch.tensor(tokens[-count:])
    logits = logits[-count:]
    return Likelihood(float(logits.gather(1, labels[:, None]).sum()), bool((logits.argmax(-1) == labels).all()))


@pytest.mark.parametrize(
    "layout",
    some_of([Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(dp=2, tp=2, pp=2)], [Layout(dp=2, tp=2, pp=2)]),
    ids=str,
)
def test_likelihoods_and_texts_are_those_of_one_process(model: Path, layout: Layout) -> None:
    alone = load_model(model).model
    # A continuation that is greedy: what the model itself writes.
    (text,) = Writing([[7, 8]], 3, frozenset(), (), Sampling(0.0))(
        Session(load_model(model), Mesh.start(), SEEN, 2, spelled)
    )
    pairs = [*PAIRS, TokenPair((7, 8), tuple(int(word) for word in text.split(".")[:-1]))]
    expected = [by_hand(alone, pair) for pair in pairs]
    assert expected[-1].is_greedy and not all(each.is_greedy for each in expected)
    writing = Writing(PROMPTS, 6, frozenset(), (), Sampling(0.0))
    texts = writing(Session(load_model(model), Mesh.start(), SEEN, 8, spelled))
    stop = texts[2][8:12]  # the third token of the last text
    stopped = Writing(PROMPTS, 6, frozenset(), (stop,), Sampling(0.0))
    found = run_ranks(layout.world_size, in_session, model, layout, [Scoring(tuple(pairs)), writing, stopped])[0]
    for one, other in zip(found[0], expected, strict=True):
        assert (one.value, one.is_greedy) == (pytest.approx(other.value, rel=1e-5), other.is_greedy)
    assert found[1] == texts
    assert found[2] == [each.split(stop)[0] for each in texts] and found[2][2] != texts[2]


def test_a_text_is_as_long_as_it_is_without_filler() -> None:
    batch = Scoring(tuple(PAIRS))._input([0, 2, 4], SEEN)
    assert batch.text_lengths is not None and batch.text_lengths.tolist() == [1, 10, SEEN]
    assert batch.tokens.shape == (3, SEEN)


def test_one_question_leaves_copies_of_the_model_idle(model: Path) -> None:
    found = run_ranks(2, in_session, model, Layout(dp=2), [Scoring(tuple(PAIRS[:1])), Scoring(())])[0]
    assert (len(found[0]), found[1]) == (1, [])


def test_data_of_a_task_that_cannot_be_downloaded_is_a_sentence() -> None:
    class ConnectError(Exception):
        """As httpx has it."""

    for error in (ConnectionError("Couldn't reach 'hellaswag' on the Hub"), ConnectError("no name")):
        told = "the data of --tasks hellaswag cannot be downloaded"
        with pytest.raises(UserError, match=told), without_network(["hellaswag"]):
            raise ValueError("no data") from error
    with pytest.raises(ValueError, match="a bug"), without_network(["hellaswag"]):
        raise ValueError("a bug")
