"""Tests of a plug-in's family of models against transformers: equal logits in both directions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from plugged import EXAMPLES, forgotten

from megatronish.config.plugins import import_plugins
from megatronish.core.errors import UserError

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)


@pytest.fixture(autouse=True)
def _plugged() -> Iterator[None]:
    with forgotten():
        import_plugins([str(EXAMPLES / "arcee.py")])
        yield


@pytest.mark.parametrize("biases", [False, True])
def test_a_family_of_the_cookbook_computes_what_transformers_computes(tmp_path: Path, biases: bool) -> None:
    torch.manual_seed(3)
    config = peer.transformers.ArceeConfig(**peer._SIZES, attention_bias=biases, mlp_bias=biases)
    model, tokens = peer.transformers.ArceeForCausalLM(config).eval(), peer.tokens()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "theirs")
    expected = peer.logits_of(model, tokens)
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    for tp in (1, 2):
        torch.testing.assert_close(logits_of(tmp_path / "ours", tokens, tp=tp), expected, rtol=1e-5, atol=1e-5)
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = peer.load(tmp_path / "back")
    assert back.config.model_type == "arcee"
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    torch.testing.assert_close(peer.logits_of(back, tokens), expected, rtol=1e-5, atol=1e-5)


def test_another_activation_is_refused_by_its_key(tmp_path: Path) -> None:
    config = peer.transformers.ArceeConfig(**peer._SIZES)
    peer.transformers.ArceeForCausalLM(config).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    with pytest.raises(UserError, match='hidden_act="gelu" is not Arcee'):
        to_ours(tmp_path / "theirs", tmp_path / "ours")
