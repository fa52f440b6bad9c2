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
        import_plugins([str(EXAMPLES / "vaultgemma.py")])
        yield


KEYS = {"query_pre_attn_scalar": 7, "sliding_window": 5, "pad_token_id": None}


@pytest.mark.parametrize("caps", [(50.0, 30.0), (None, None)], ids=["capped", "uncapped"])
def test_a_family_of_the_cookbook_computes_what_transformers_computes(
    tmp_path: Path, caps: tuple[float | None, float | None]
) -> None:
    torch.manual_seed(3)
    of_scores, of_logits = caps
    config = peer.transformers.VaultGemmaConfig(
        **peer._SIZES, **KEYS, attn_logit_softcapping=of_scores, final_logit_softcapping=of_logits
    )
    model = peer.transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = peer.tokens()
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
    assert back.config.model_type == "vaultgemma"
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    torch.testing.assert_close(peer.logits_of(back, tokens), expected, rtol=1e-5, atol=1e-5)


def test_another_activation_is_refused_by_its_key(tmp_path: Path) -> None:
    config = peer.transformers.VaultGemmaConfig(**peer._SIZES, **KEYS)
    peer.transformers.VaultGemmaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_activation": "gelu"}))
    with pytest.raises(UserError, match='hidden_activation="gelu" is not supported'):
        to_ours(tmp_path / "theirs", tmp_path / "ours")
